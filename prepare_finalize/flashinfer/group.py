"""FlashInferGroup: workspaces of FlashInfer's all-to-all for one process group.

    manager = FlashInferGroup(group)           # collective, like every line below
    kernel = make_kernel("FlashInferCutlassMoEPrepareAndFinalize", "TritonExperts", problem,
                         group=manager)
    ...
    manager.destroy()

A workspace is the library's memory on each GPU through which one call at a time exchanges its rows.
Workspaces are large, and layers of one shape share them. Use one manager per model, not per layer.
"""

from itertools import count
from typing import Any

import torch

from modular_kernel.errors import DeviceError
from prepare_finalize.common.all2all_manager import All2AllBuffers, All2AllManager
from prepare_finalize.common.library_calls import LIBRARY_ERRORS
from prepare_finalize.common.torch_group import first_sentence
from prepare_finalize.flashinfer.exchange import AlltoAllShape, Exchange, Ranks, make_exchange
from prepare_finalize.flashinfer.library import load

_serials = count(1)  # numbers of this process's workspaces


FlashInferBuffers = All2AllBuffers[AlltoAllShape]


class FlashInferGroup(All2AllManager[AlltoAllShape]):
    """Workspaces of FlashInfer's all-to-all for the ranks of one process group on one host.

    group: a ProcessGroup with NCCL or gloo, through which the library exchanges memory handles;
        None is the default group.
    in_flight: maximum number of calls of one shape between dispatch and combine. Each call uses a
        workspace, which is allocated when it is first needed.
    timeout_s: timeout of the steps before the library is called, in seconds; None is MK_TIMEOUT_S,
        or 10 s. The library's kernels wait for peers, and stop the device permanently after about
        300 s.
    library: replacement for the namespace of FlashInfer's classes, for tests.

    Raise ConfigurationError if the library is missing, and CommunicationError if a rank does not
    respond or ranks pass different arguments.
    """

    package = "FlashInfer"
    store_prefix = "/flashinfer"
    load_library = staticmethod(load)
    device = "cuda"

    def _initialize(self) -> None:
        self.check_equal({"in_flight": self.in_flight})

    def check_device(self, device: torch.device | str) -> None:
        """Raise DeviceError unless `device` is this process's current GPU."""
        requested = torch.device(device)
        current = None if self.device == "cpu" else torch.cuda.current_device()
        if requested.type != self.device or requested.index not in (None, current):
            need = f"{self.device}, the process's current one, which has the workspaces"
            raise DeviceError("tensors of an exchange", got=requested, need=need)

    def _free(self, buffers: FlashInferBuffers) -> None:
        exchange: Exchange = buffers.all_to_all
        exchange.free()

    def _allocate(self, shape: AlltoAllShape) -> FlashInferBuffers:
        existing = self._buffers[shape]
        self._store_collectives.check_equal({"workspaces": len(existing) + 1, "shape": shape})
        ranks = Ranks(self.rank, self.world_size, self._make_communicator(), self._group)
        try:
            exchange = make_exchange(self._library, shape, ranks, self._next_serial())
        except LIBRARY_ERRORS as error:
            got = first_sentence(RuntimeError(str(error).strip() or type(error).__name__))
            raise self._error(got, "FlashInfer to share its workspaces") from error
        existing.append(FlashInferBuffers(exchange, shape))
        return existing[-1]

    def _next_serial(self) -> int:
        """Return the same number on every rank, which no other workspace of these ranks has.

        The library returns the same workspace for equal sizes, even to different groups and calls.
        The size of a workspace depends on this number.
        """
        gathered = self._store_collectives.all_gather({"serial": next(_serials)})
        serial = max(int(properties["serial"]) for properties in gathered)
        while next(_serials) <= serial:
            pass
        return serial

    def _make_communicator(self) -> Any:
        """Return a communicator of the library over the whole group.

        The library calls `Split` to get a subgroup, but needs the whole group here.
        """

        class FullGroupBackend(self._library.TorchDistBackend):  # type: ignore[misc, name-defined]
            def Split(self, color: int, key: int) -> "FullGroupBackend":
                return self

        return FullGroupBackend(self._group)
