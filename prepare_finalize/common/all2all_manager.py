"""Base of the managers that own the buffers of an all-to-all library (pplx-kernels, FlashInfer).

Such a library exchanges rows through buffers of a fixed shape, which all ranks allocate together. A
set of buffers holds the rows of one call, from its dispatch to its combine. The manager keeps
several sets of each shape, so that several calls can be in flight. Layers of the same shape share
the sets. `pplx.part` and `flashinfer.part` call `reserve` once, then `take` and `release` in every
call.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar

import torch

from modular_kernel.errors import CommunicationError, ConfigurationError, UnsupportedError
from modular_kernel.utils import forks
from prepare_finalize.common.torch_group import first_sentence
from prepare_finalize.rendezvous.connect import (
    check_process,
    new_prefix_store,
    resolve_process_group,
    resolve_timeout,
)
from prepare_finalize.rendezvous.hosts import check_one_host, find_hosts
from prepare_finalize.rendezvous.store_collectives import Properties, StoreCollectives

Shape = TypeVar("Shape")


class All2AllBuffers(Generic[Shape]):
    """One set of a library's buffers, with the library's object that exchanges rows through them.

    - all_to_all: the library's object.
    - shape: the sizes that the buffers were allocated for.
    - in_use: whether a call uses the buffers, from its dispatch to its combine.
    - use_count: number of calls that have used the buffers. It identifies the call of a handle.
    """

    def __init__(self, all_to_all: Any, shape: Shape) -> None:
        self.all_to_all, self.shape = all_to_all, shape
        self.in_use = False
        self.use_count = 0


class All2AllManager(ABC, Generic[Shape]):
    """Base of the managers of a library's buffers, for the ranks of one process group on one host.

    Subclasses document the arguments. Creating a manager is collective.
    """

    package: ClassVar[str]  # name of the library, for messages
    # Separates the keys of this kind of manager in the process group's key-value store.
    store_prefix: ClassVar[str] = ""

    def __init__(
        self,
        group: object | None = None,
        *,
        in_flight: int = 2,
        timeout_s: float | None = None,
        library: Any = None,
    ) -> None:
        if in_flight < 1:
            raise ConfigurationError("in_flight", got=in_flight, need=">= 1")
        self._generation = forks.generation()
        self.timeout_s = resolve_timeout(timeout_s)
        self._group = resolve_process_group(group)
        self._library = library or self.load_library()
        self.rank, self.world_size = self._group.rank(), self._group.size()
        self.in_flight = in_flight
        self._buffers: dict[Shape, list[All2AllBuffers[Shape]]] = {}
        self._destroyed = False
        try:
            self._store = new_prefix_store(self._group, self.timeout_s, prefix=self.store_prefix)
        except RuntimeError as error:
            raise self._error(first_sentence(error), "the group's store to answer") from error
        self._store_collectives = StoreCollectives(
            self._store, self.rank, self.world_size, self.timeout_s
        )
        self.hosts = find_hosts(self._store_collectives, self.rank)
        check_one_host(self.hosts, self.package)
        self._initialize()

    @staticmethod
    @abstractmethod
    def load_library() -> Any:
        """Import the library. Raise ConfigurationError if the library is missing.

        This is called before the ranks connect, so that no rank waits for a rank without the
        library.
        """

    @abstractmethod
    def _initialize(self) -> None:
        """Initialize the library, after the ranks have connected. Collective."""

    def check_equal(self, properties: Properties) -> None:
        """Raise CommunicationError on every rank unless all ranks pass the same properties.

        Collective.
        """
        self._check_open()
        self._store_collectives.check_equal(properties)

    def reserve(self, shape: Shape) -> None:
        """Allocate the first set of buffers of a shape, unless it exists. Collective."""
        self._check_open()
        if shape not in self._buffers:
            self._buffers[shape] = []
            self._allocate(shape)

    def take(self, shape: Shape) -> All2AllBuffers[Shape]:
        """Return free buffers for one call, allocated if necessary.

        Pass them to `release` after the combine of the call. All ranks must start and finish their
        calls in the same order, so that each uses the same set of buffers. Raise UnsupportedError,
        before anything is sent, if `in_flight` calls of this shape have not combined yet.
        """
        self._check_open()
        existing = self._buffers[shape]
        buffers = next((candidate for candidate in existing if not candidate.in_use), None)
        if buffers is None:
            if len(existing) == self.in_flight:
                need = f"at most {self.in_flight}; set {type(self).__name__}(in_flight=...)"
                raise UnsupportedError("calls in flight", got=len(existing) + 1, need=need)
            buffers = self._allocate(shape)
        buffers.in_use = True
        buffers.use_count += 1
        return buffers

    def release(self, buffers: All2AllBuffers[Shape]) -> None:
        """Return the buffers of a call that has combined."""
        buffers.in_use = False

    def destroy(self) -> None:
        """Free all buffers. Collective.

        Later use raises UnsupportedError. If calls have not combined yet, the buffers are kept,
        because a peer may still be writing to them. The process should then exit.
        """
        check_process(self._generation)
        if self._destroyed:
            return
        all_buffers = [buffers for existing in self._buffers.values() for buffers in existing]
        try:
            if not any(buffers.in_use for buffers in all_buffers):
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                self._store_collectives.check_equal({"destroy": len(all_buffers)})
                for buffers in all_buffers:
                    self._free(buffers)
        finally:
            self._buffers.clear()
            self._destroyed = True

    @abstractmethod
    def _free(self, buffers: All2AllBuffers[Shape]) -> None:
        """Free one set of buffers. Collective."""

    @abstractmethod
    def _allocate(self, shape: Shape) -> All2AllBuffers[Shape]:
        """Allocate one more set of buffers of a shape, and add it to `_buffers`. Collective."""

    def _check_open(self) -> None:
        check_process(self._generation)
        if self._destroyed:
            raise UnsupportedError(self.package, got="a destroyed manager", need="a new one")

    def _error(self, got: str, need: str) -> CommunicationError:
        subject = f"{self.package} between ranks"
        return CommunicationError(subject, got=got, need=need, rank=self.rank, phase="construct")
