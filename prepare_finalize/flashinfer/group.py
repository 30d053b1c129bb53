"""FlashInferGroup: workspaces of FlashInfer's all-to-all for one process group.

    manager = FlashInferGroup(group)           # collective, like every line below
    kernel = make_kernel("FlashInferCutlassMoEPrepareAndFinalize", "TritonExperts", problem,
                         group=manager)
    ...
    manager.destroy()

A workspace is the library's memory on each GPU through which one call at a time exchanges its rows.
Workspaces are large, and layers of one shape share them. Use one manager per model, not per layer.
"""

from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from modular_kernel.errors import DeviceError
from prepare_finalize.common.all2all_manager import All2AllBuffers, All2AllManager
from prepare_finalize.common.torch_group import first_sentence
from prepare_finalize.flashinfer.library import load

_LIBRARY_ERRORS = (RuntimeError, AssertionError, ImportError, OSError, ValueError)
_SIZE_STEP = 128  # bytes by which the sizes of workspaces differ; see `_unique_padding`
_serials = count(1)  # numbers of this process's workspaces


@dataclass(frozen=True)
class AlltoAllShape:
    """The sizes of one MoeAlltoAll of the library, the same on every rank.

    max_tokens: largest T of a rank, at least 1.
    num_experts: number of expert slots of all ranks together.
    top_k: experts per token.
    dispatch_bytes, combine_bytes: bytes of one token's payloads in dispatch and in combine.
    """

    max_tokens: int
    num_experts: int
    top_k: int
    dispatch_bytes: int
    combine_bytes: int


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
    library: replacement for flashinfer.comm, for tests.

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
        # The library caches workspaces until the process exits. This private method is the only way
        # to release one.
        buffers.all_to_all._reset_workspace()

    def _allocate(self, shape: AlltoAllShape) -> FlashInferBuffers:
        library, existing = self._library, self._buffers[shape]
        self._store_collectives.check_equal({"workspaces": len(existing) + 1, "shape": shape})
        try:
            nbytes = library.moe_a2a_get_workspace_size_per_rank(
                self.world_size, shape.max_tokens, shape.dispatch_bytes, shape.combine_bytes
            )
            all_to_all = library.MoeAlltoAll(
                library.Mapping(
                    world_size=self.world_size,
                    rank=self.rank,
                    gpus_per_node=self.world_size,
                    tp_size=self.world_size,
                    moe_ep_size=self.world_size,
                    moe_tp_size=1,
                ),
                max_num_tokens=shape.max_tokens,
                top_k=shape.top_k,
                num_experts=shape.num_experts,
                workspace_size_per_rank=nbytes + self._unique_padding(),
                mnnvl_config=library.MnnvlConfig(comm_backend=self._make_communicator()),
            )
        except _LIBRARY_ERRORS as error:
            got = first_sentence(RuntimeError(str(error).strip() or type(error).__name__))
            raise self._error(got, "FlashInfer to share its workspaces") from error
        existing.append(FlashInferBuffers(all_to_all, shape))
        return existing[-1]

    def _unique_padding(self) -> int:
        """Return a number of extra bytes that makes the size of a workspace unique.

        The library returns the same workspace for equal sizes, even to different groups and calls.
        """
        gathered = self._store_collectives.all_gather({"serial": next(_serials)})
        serial = max(int(properties["serial"]) for properties in gathered)
        while next(_serials) <= serial:
            pass
        return serial * _SIZE_STEP

    def _make_communicator(self) -> Any:
        """Return a communicator of the library over the whole group.

        The library calls `Split` to get a subgroup, but needs the whole group here.
        """

        class FullGroupBackend(self._library.TorchDistBackend):  # type: ignore[misc, name-defined]
            def Split(self, color: int, key: int) -> "FullGroupBackend":
                return self

        return FullGroupBackend(self._group)
