"""Arguments of the Buffer class of DeepEP 1, for any number of ranks.

The high-throughput kernels assume hosts of 8 GPUs. With more than 8 ranks, a row is sent over RDMA
to the GPU with the same index on another host, and over NVLink from there. This requires a second
buffer, and one RDMA queue pair per channel. A channel is a pair of SMs.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from modular_kernel.errors import ConfigurationError

GPUS_PER_HOST = 8
WORLD_SIZES = (2, 4, 8, 16, 32, 64, 128, 144, 160)  # supported by the high-throughput kernels
_ALIGNMENT = 128  # bytes
_MAX_BYTES = 2**31 - 1  # maximum size of each of the two buffers, with several hosts
# Valid numbers of SMs with several hosts, two per channel. There are at least two channels. A block
# has one warp per channel, and at most 1024 threads, so there are at most 32 channels.
_VALID_NUM_SMS = range(4, 65, 2)


@dataclass(frozen=True)
class BufferArguments:
    """Keyword arguments of the library's Buffer.

    num_nvl_bytes, num_rdma_bytes: sizes of the buffers for NVLink and for RDMA.
    low_latency_mode: whether the buffer is for the low-latency kernels.
    num_qps_per_rank: number of RDMA queue pairs.
    """

    num_nvl_bytes: int
    num_rdma_bytes: int
    low_latency_mode: bool
    num_qps_per_rank: int

    def make_buffer(self, buffer_class: Any, group: Any) -> Any:
        """Create the library's Buffer over a ProcessGroup. Collective."""
        return buffer_class(group, **asdict(self), explicitly_destroy=True)


@dataclass(frozen=True)
class HighThroughputArguments:
    """Arguments of a high-throughput Buffer, and the library's dispatch and combine configs."""

    buffer: BufferArguments
    dispatch: Any
    combine: Any


def high_throughput_arguments(
    buffer_class: Any, hidden: int, world_size: int, num_sms: int | None
) -> HighThroughputArguments:
    """Return arguments for rows of `hidden` bfloat16 values, from the library's size hints.

    num_sms: number of SMs that the kernels use; None is the library's default.

    Raise ConfigurationError if ranks are on several hosts, and either num_sms is not valid for
    several hosts or the buffers exceed the memory that the kernels can address.
    """
    sms, is_multi_host = num_sms or buffer_class.num_sms, world_size > GPUS_PER_HOST
    if is_multi_host and sms not in _VALID_NUM_SMS:
        need = f"an even number, {_VALID_NUM_SMS[0]} to {_VALID_NUM_SMS[-1]}, with several hosts"
        raise ConfigurationError("num_sms", got=sms, need=need)
    dispatch, combine = (
        _get_config(buffer_class, method, world_size, num_sms)
        for method in ("get_dispatch_config", "get_combine_config")
    )
    row_bytes = hidden * torch.bfloat16.itemsize
    nvl_bytes, rdma_bytes = (
        _align_up(
            max(getattr(config, hint)(row_bytes, world_size) for config in (dispatch, combine))
        )
        for hint in ("get_nvl_buffer_size_hint", "get_rdma_buffer_size_hint")
    )
    if is_multi_host and max(nvl_bytes, rdma_bytes) > _MAX_BYTES:
        got = f"{max(nvl_bytes, rdma_bytes)} bytes with num_sms={sms}"
        need = f"<= {_MAX_BYTES} with several hosts, so a smaller num_sms"
        raise ConfigurationError("DeepEP's high throughput buffer", got=got, need=need)
    arguments = BufferArguments(nvl_bytes, rdma_bytes, False, sms // 2 if is_multi_host else 1)
    return HighThroughputArguments(arguments, dispatch, combine)


def low_latency_arguments(
    buffer_class: Any, tokens: int, hidden: int, experts: int, world_size: int
) -> BufferArguments:
    """Return arguments for the low-latency kernels, with one queue pair per expert of a rank."""
    nbytes = buffer_class.get_low_latency_rdma_size_hint(tokens, hidden, world_size, experts)
    return BufferArguments(0, nbytes, True, experts // world_size)


def _get_config(buffer_class: Any, method: str, world_size: int, num_sms: int | None) -> Any:
    """Return the library's configuration for `num_sms`.

    The library reads the number of SMs from a class attribute, which is set during the call.
    """
    previous_num_sms = buffer_class.num_sms
    try:
        if num_sms is not None:
            buffer_class.num_sms = num_sms
        return getattr(buffer_class, method)(world_size)
    finally:
        buffer_class.num_sms = previous_num_sms


def _align_up(nbytes: int) -> int:
    return math.ceil(nbytes / _ALIGNMENT) * _ALIGNMENT
