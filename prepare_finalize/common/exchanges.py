"""Base of managers over a library's all-to-all: buffers by shape, and calls in flight."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar

import torch

from modular_kernel.errors import CommunicationError, ConfigurationError, UnsupportedError
from modular_kernel.utils import forks
from prepare_finalize.common.torch_group import first_sentence
from prepare_finalize.rendezvous.connect import (
    check_process,
    deadline_of,
    member_group,
    new_prefix_store,
)
from prepare_finalize.rendezvous.hosts import check_one_host, find_hosts
from prepare_finalize.rendezvous.store_rounds import Meeting, Properties

Shape = TypeVar("Shape")


class Exchange(Generic[Shape]):
    """One all-to-all of a library. Each use is a dispatch followed by its combine."""

    def __init__(self, all_to_all: Any, shape: Shape) -> None:
        self.all_to_all, self.shape = all_to_all, shape
        self.in_use = False
        self.use_count = 0  # number of calls that have used it


class ExchangeManager(ABC, Generic[Shape]):
    """Buffers of a library for the ranks of one process group on one host.

    - package: the library's name, for messages.
    - store_prefix: prefix of the store keys, below those of the group.
    - group, in_flight, deadline_s, library: see the subclasses.

    Creating a manager is collective.
    """

    package: ClassVar[str]
    store_prefix: ClassVar[str] = ""

    def __init__(
        self,
        group: object | None = None,
        *,
        in_flight: int = 2,
        deadline_s: float | None = None,
        library: Any = None,
    ) -> None:
        if in_flight < 1:
            raise ConfigurationError("in_flight", got=in_flight, need=">= 1")
        self._generation = forks.generation()
        self.deadline_s = deadline_of(deadline_s)
        self._group = member_group(group)
        self._library = library or self.load_library()
        self.rank, self.world_size = self._group.rank(), self._group.size()
        self.in_flight = in_flight
        self._exchanges: dict[Shape, list[Exchange[Shape]]] = {}
        self._destroyed = False
        try:
            self._store = new_prefix_store(self._group, self.deadline_s, prefix=self.store_prefix)
        except RuntimeError as error:
            raise self._error(first_sentence(error), "the group's store to answer") from error
        self._meeting = Meeting(self._store, self.rank, self.world_size, self.deadline_s)
        self.hosts = find_hosts(self._meeting, self.rank)
        check_one_host(self.hosts, self.package)
        self._initialize()

    @staticmethod
    @abstractmethod
    def load_library() -> Any:
        """Return the library; raise ConfigurationError, before ranks meet, if it is missing."""

    @abstractmethod
    def _initialize(self) -> None:
        """Initialize the library once all ranks are connected. Collective."""

    def agree(self, properties: Properties) -> None:
        """Raise CommunicationError on every rank unless all ranks pass the same properties."""
        self._check_open()
        self._meeting.agree(properties)

    def reserve(self, shape: Shape) -> None:
        """Allocate the first buffers of a shape, unless they exist. Collective."""
        self._check_open()
        if shape not in self._exchanges:
            self._exchanges[shape] = []
            self._allocate(shape)

    def take(self, shape: Shape) -> Exchange[Shape]:
        """Return buffers for one call; pass them to `release` after its combine.

        Raises UnsupportedError, before anything is sent, if `in_flight` calls of this shape have
        not combined yet. All ranks must start and finish their calls in the same order.
        """
        self._check_open()
        exchanges = self._exchanges[shape]
        exchange = next((candidate for candidate in exchanges if not candidate.in_use), None)
        if exchange is None:
            if len(exchanges) == self.in_flight:
                need = f"at most {self.in_flight}; set {type(self).__name__}(in_flight=...)"
                raise UnsupportedError("calls in flight", got=len(exchanges) + 1, need=need)
            exchange = self._allocate(shape)
        exchange.in_use = True
        exchange.use_count += 1
        return exchange

    def release(self, exchange: Exchange[Shape]) -> None:
        """Release the buffers of a call that has combined."""
        exchange.in_use = False

    def destroy(self) -> None:
        """Free all buffers. Collective: waits until every rank calls it.

        Later use raises UnsupportedError. If calls have not combined yet, the buffers are kept,
        because a peer may still be writing to them; the process should then exit.
        """
        check_process(self._generation)
        if self._destroyed:
            return
        all_exchanges = [
            exchange for exchanges in self._exchanges.values() for exchange in exchanges
        ]
        try:
            if not any(exchange.in_use for exchange in all_exchanges):
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                self._meeting.agree({"destroy": len(all_exchanges)})
                for exchange in all_exchanges:
                    self._free(exchange)
        finally:
            self._exchanges.clear()
            self._destroyed = True

    @abstractmethod
    def _free(self, exchange: Exchange[Shape]) -> None:
        """Free one set of buffers, which every rank frees at the same time."""

    @abstractmethod
    def _allocate(self, shape: Shape) -> Exchange[Shape]:
        """Allocate and keep more buffers of a shape, on all ranks."""

    def _check_open(self) -> None:
        check_process(self._generation)
        if self._destroyed:
            raise UnsupportedError(self.package, got="a destroyed manager", need="a new one")

    def _error(self, got: str, need: str) -> CommunicationError:
        subject = f"{self.package} between ranks"
        return CommunicationError(subject, got=got, need=need, rank=self.rank, phase="construct")
