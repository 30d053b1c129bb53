"""PplxGroup: buffers of pplx-kernels for one process group.

    manager = PplxGroup(group)                 # collective, like every line below
    kernel = make_kernel("PplxPrepareAndFinalize", "BatchedTritonExperts", problem, group=manager)
    ...
    manager.destroy()

Buffers are large, and layers of one shape share them. Use one manager per model, not per layer.
"""

from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group

from modular_kernel.errors import (
    CapacityError,
    ConfigurationError,
    DeviceError,
)
from prepare_finalize.common.all2all_manager import All2AllBuffers, All2AllManager
from prepare_finalize.common.torch_group import first_sentence
from prepare_finalize.rendezvous.at_exit import Communicator
from prepare_finalize.rendezvous.connect import connect
from prepare_finalize.rendezvous.failure_log import failure_key
from prepare_finalize.rendezvous.store_collectives import Properties

_MARGIN_BYTES = 256 << 20  # GPU memory to leave free in addition to the library's buffers


@dataclass(frozen=True)
class PplxShape:
    """The sizes of one AllToAll of the library, the same on every rank.

    max_tokens: largest T of a rank.
    slots: number of expert slots of all ranks together.
    top_k: experts per token.
    hidden: hidden size.
    row_bytes, scale_bytes: bytes of a dispatched row and of its scales, multiples of 16.
    """

    max_tokens: int
    slots: int
    top_k: int
    hidden: int
    row_bytes: int
    scale_bytes: int

    def device_bytes(self, world_size: int) -> int:
        """Return the bytes that the library allocates on each rank, without small tables."""
        dispatched_bytes = -(-(self.row_bytes + self.scale_bytes + 4) // 16) * 16
        max_row_bytes = max(dispatched_bytes, 4 * self.hidden)
        return self.max_tokens * (self.slots // world_size) * max_row_bytes * world_size


PplxBuffers = All2AllBuffers[PplxShape]


class PplxGroup(All2AllManager[PplxShape]):
    """Buffers of pplx-kernels for the ranks of one process group, on one host with NVLink.

    group: a ProcessGroup with any backend; None is the default group. The library exchanges memory
        handles through a separate gloo group.
    in_flight: maximum number of calls of one shape between dispatch and combine. Each call uses a
        set of buffers, which is allocated when it is first needed.
    timeout_s: timeout of the methods of this class, in seconds; None is MK_TIMEOUT_S, or 10 s. A
        dispatch or combine waits on the GPU for its peers without a timeout.
    library: replacement for the package pplx_kernels, for tests.

    Raise ConfigurationError if the library is missing or the ranks cannot share memory, and
    CommunicationError if a rank does not respond or ranks pass different arguments.
    """

    package = "pplx-kernels"

    @staticmethod
    def load_library() -> Any:
        """Import pplx_kernels. Raise ConfigurationError if it cannot be used."""
        try:
            import pplx_kernels
        except ImportError as error:
            raise ConfigurationError("pplx_kernels", got=error, need="the package") from error
        if not hasattr(pplx_kernels.ops._ops, "all_to_all_intranode_create"):
            got = "a package whose libpplx_kernels.so does not load (it logged why)"
            need = "a build for this torch and CUDA"
            raise ConfigurationError("pplx_kernels", got=got, need=need)
        return pplx_kernels

    def _initialize(self) -> None:
        _check_gpus(
            [
                properties["gpu"]
                for properties in self._store_collectives.all_gather(_get_gpu_uuid())
            ],
            self.rank,
        )
        self._name: Any = f"modular_kernel/{uuid4().hex}"  # unique in this process
        self._communicator = Communicator(self, device="cpu")
        self._connect(self._store, self.timeout_s)

    def check_device(self, device: torch.device | str) -> None:
        """Raise DeviceError if `device` is a GPU other than the process's current one."""
        requested = torch.device(device)
        if requested.type == "cuda" and requested.index not in (None, torch.cuda.current_device()):
            need = f"cuda:{torch.cuda.current_device()}, where the buffers are"
            raise DeviceError("tensors of an exchange", got=requested, need=need)

    def destroy(self) -> None:
        """Free all buffers, as in `All2AllManager.destroy`, and close the gloo group."""
        if self._destroyed:
            return
        try:
            super().destroy()
        finally:
            self._communicator.close()

    def _free(self, buffers: PplxBuffers) -> None:
        buffers.all_to_all.destroy()

    def _connect(self, store: Any, timeout_s: float) -> None:
        """Create a gloo group, and register it with torch under the name passed to the library."""
        try:
            backend = connect("cpu", store, self.rank, self.world_size, timeout_s)
        except RuntimeError as error:
            store.set(failure_key(self.rank), "{}")
            raise self._error(
                first_sentence(error), f"every rank within {timeout_s:g} s"
            ) from error
        group: Any = dist.ProcessGroup(store, self.rank, self.world_size)
        gloo = dist.ProcessGroup.BackendType.GLOO
        group._set_default_backend(gloo)
        group._register_backend(torch.device("cpu"), gloo, backend)
        group._set_group_name(self._name)
        _register_process_group(self._name, group)
        self._communicator.group, self._communicator.name = group, self._name

    def _allocate(self, shape: PplxShape) -> PplxBuffers:
        existing = self._buffers[shape]
        _check_memory(shape, self.world_size)  # without enough memory, the library aborts
        self._store_collectives.check_equal({"buffers": len(existing) + 1, "shape": shape})
        try:
            all_to_all = self._library.AllToAll.intranode(
                max_num_tokens=shape.max_tokens,
                num_experts=shape.slots,
                experts_per_token=shape.top_k,
                rank=self.rank,
                world_size=self.world_size,
                dp_size=1,
                hidden_dim=shape.hidden,
                hidden_dim_bytes=shape.row_bytes,
                hidden_dim_scale_bytes=shape.scale_bytes,
                group_name=self._name,
            )
        except RuntimeError as error:
            raise self._error(first_sentence(error), "pplx-kernels to share its buffers") from error
        existing.append(PplxBuffers(all_to_all, shape))
        return existing[-1]


def _get_gpu_uuid() -> Properties:
    gpu = "none"
    if torch.cuda.is_available():
        gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return {"gpu": gpu}


def _check_gpus(gpus: list[str], rank: int) -> None:
    """Raise ConfigurationError unless each rank has its own GPU, with peer access to the others."""
    if "none" in gpus:
        return
    if len(set(gpus)) < len(gpus):
        raise ConfigurationError("GPUs of the ranks", got=gpus, need="one for each rank")
    devices = range(torch.cuda.device_count())
    device_by_uuid = {str(torch.cuda.get_device_properties(i).uuid): i for i in devices}
    local_device = torch.cuda.current_device()
    for peer, gpu in enumerate(gpus):
        # The library checks access to GPUs that are not visible to this process.
        peer_device = device_by_uuid.get(gpu, local_device)
        if peer_device != local_device and not torch.cuda.can_device_access_peer(
            local_device, peer_device
        ):
            got = f"rank {rank} cannot reach rank {peer}'s"
            raise ConfigurationError("GPUs of the ranks", got=got, need="peer access")


def _check_memory(shape: PplxShape, world_size: int) -> None:
    """Raise CapacityError unless there is enough free GPU memory for one set of buffers."""
    if not torch.cuda.is_available():
        return
    need = shape.device_bytes(world_size) + _MARGIN_BYTES
    if torch.cuda.mem_get_info()[0] < need:
        torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if free < need:
        raise CapacityError("GPU memory for pplx-kernels", got=f"{free} bytes free", need=need)
