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
from prepare_finalize.rendezvous.store_rounds import Facts, Meeting

Shape = TypeVar("Shape")


class Exchange(Generic[Shape]):
    """One all-to-all of a library. Each use is a dispatch followed by its combine."""

    def __init__(self, all_to_all: Any, shape: Shape) -> None:
        self.all_to_all, self.shape = all_to_all, shape
        self.busy = False
        self.turn = 0  # number of calls that have used it


class ExchangeManager(ABC, Generic[Shape]):
    """Buffers of a library for the ranks of one process group on one host.

    - package: the library's name, for messages.
    - beside: prefix of the store keys, below those of the group.
    - group, in_flight, deadline_s, library: see the subclasses.

    Creating a manager is collective.
    """

    package: ClassVar[str]
    beside: ClassVar[str] = ""

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
        self._made_in = forks.generation()
        self.deadline_s = deadline_of(deadline_s)
        self._group = member_group(group)
        self._library = library or self.load_library()
        self.rank, self.world_size = self._group.rank(), self._group.size()
        self.in_flight = in_flight
        self._exchanges: dict[Shape, list[Exchange[Shape]]] = {}
        self._destroyed = False
        try:
            self._store = new_prefix_store(self._group, self.deadline_s, below=self.beside)
        except RuntimeError as error:
            raise self._error(first_sentence(error), "the group's store to answer") from error
        self._meeting = Meeting(self._store, self.rank, self.world_size, self.deadline_s)
        self.hosts = find_hosts(self._meeting, self.rank)
        check_one_host(self.hosts, self.package)
        self._met()

    @staticmethod
    @abstractmethod
    def load_library() -> Any:
        """Return the library; raise ConfigurationError, before ranks meet, if it is missing."""

    @abstractmethod
    def _met(self) -> None:
        """Initialize the library once all ranks are connected. Collective."""

    def agree(self, facts: Facts) -> None:
        """Raise CommunicationError on every rank unless all ranks pass the same facts."""
        self._check_open()
        self._meeting.agree(facts)

    def reserve(self, shape: Shape) -> None:
        """Allocate the first buffers of a shape, unless it has some. Collective."""
        self._check_open()
        if shape not in self._exchanges:
            self._exchanges[shape] = []
            self._make(shape)

    def take(self, shape: Shape) -> Exchange[Shape]:
        """Return buffers for one call; pass them to `give_back` after its combine.

        Raises UnsupportedError, before anything is sent, if `in_flight` calls of this shape still
        wait for their combine. Every rank must start and finish its calls in the same order.
        """
        self._check_open()
        exchanges = self._exchanges[shape]
        exchange = next((candidate for candidate in exchanges if not candidate.busy), None)
        if exchange is None:
            if len(exchanges) == self.in_flight:
                need = f"at most {self.in_flight}; set {type(self).__name__}(in_flight=...)"
                raise UnsupportedError("calls in flight", got=len(exchanges) + 1, need=need)
            exchange = self._make(shape)
        exchange.busy = True
        exchange.turn += 1
        return exchange

    def give_back(self, exchange: Exchange[Shape]) -> None:
        """Release the buffers of a call that has combined."""
        exchange.busy = False

    def destroy(self) -> None:
        """Free all buffers once every rank calls this; collective.

        Later use raises UnsupportedError. If calls still wait for their combine, the buffers are
        kept, because a peer may be writing to them; the process should then exit.
        """
        check_process(self._made_in)
        if self._destroyed:
            return
        all_exchanges = [each for of_shape in self._exchanges.values() for each in of_shape]
        try:
            if not any(each.busy for each in all_exchanges):
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                self._meeting.agree({"destroy": len(all_exchanges)})
                for each in all_exchanges:
                    self._free(each)
        finally:
            self._exchanges.clear()
            self._destroyed = True

    @abstractmethod
    def _free(self, exchange: Exchange[Shape]) -> None:
        """Free one set of buffers, which every rank frees at the same time."""

    @abstractmethod
    def _make(self, shape: Shape) -> Exchange[Shape]:
        """Allocate and keep more buffers of a shape, on all ranks."""

    def _check_open(self) -> None:
        check_process(self._made_in)
        if self._destroyed:
            raise UnsupportedError(self.package, got="a destroyed manager", need="a new one")

    def _error(self, got: str, need: str) -> CommunicationError:
        subject = f"{self.package} between ranks"
        return CommunicationError(subject, got=got, need=need, rank=self.rank, phase="construct")
