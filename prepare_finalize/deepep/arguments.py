"""What the first generation's Buffer is made with, for any number of ranks, without making one.

Its kernels for many tokens know hosts of 8 GPUs: beyond 8 ranks, a row goes over RDMA to the GPU of
the same number on another host, and over NVLink from there. Then a second buffer is needed, and a
queue pair for each channel, of which two multiprocessors make one.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from modular_kernel.errors import ConfigurationError

PEERS = 8  # GPUs of a host
WORLD_SIZES = (2, 4, 8, 16, 32, 64, 128, 144, 160)  # that kernels for many tokens are built for
_ALIGNMENT = 128  # bytes
_MOST_BYTES = 2**31 - 1  # of either buffer where there are two
# A block has 1024 threads, a warp for each channel; and there must be two channels.
_SMS = range(4, 65, 2)


@dataclass(frozen=True)
class BufferArguments:
    """Keywords of the library's Buffer: bytes for NVLink and for RDMA, and queue pairs."""

    num_nvl_bytes: int
    num_rdma_bytes: int
    low_latency_mode: bool
    num_qps_per_rank: int

    def make(self, kind: Any, group: Any) -> Any:
        """Make the Buffer over a ProcessGroup; collective."""
        return kind(group, **asdict(self), explicitly_destroy=True)


@dataclass(frozen=True)
class ManyTokens:
    """For the kernels for many tokens: a Buffer's arguments, and the configurations of its use."""

    arguments: BufferArguments
    dispatch: Any
    combine: Any


def many_tokens(kind: Any, hidden: int, world_size: int, num_sms: int | None) -> ManyTokens:
    """Return what serves rows of `hidden` bfloat16 values on `world_size` ranks, by its own hints.

    num_sms: multiprocessors; None for the library's choice. ConfigurationError where that is no
    number for ranks of several hosts, or asks for more memory than those kernels can address.
    """
    used, across = num_sms or kind.num_sms, world_size > PEERS
    if across and used not in _SMS:
        need = f"an even number, {_SMS[0]} to {_SMS[-1]}, between hosts"
        raise ConfigurationError("num_sms", got=used, need=need)
    dispatch, combine = (
        _config(kind, method, world_size, num_sms)
        for method in ("get_dispatch_config", "get_combine_config")
    )
    row = hidden * torch.bfloat16.itemsize
    nvl, rdma = (
        _aligned(max(getattr(config, hint)(row, world_size) for config in (dispatch, combine)))
        for hint in ("get_nvl_buffer_size_hint", "get_rdma_buffer_size_hint")
    )
    if across and max(nvl, rdma) > _MOST_BYTES:
        got = f"{max(nvl, rdma)} bytes with num_sms={used}"
        need = f"<= {_MOST_BYTES} between hosts: fewer multiprocessors"
        raise ConfigurationError("DeepEP's high throughput buffer", got=got, need=need)
    arguments = BufferArguments(nvl, rdma, False, used // 2 if across else 1)
    return ManyTokens(arguments, dispatch, combine)


def few_tokens(
    kind: Any, tokens: int, hidden: int, experts: int, world_size: int
) -> BufferArguments:
    """Return what serves the kernels for few tokens: a queue pair for each expert of a rank."""
    nbytes = kind.get_low_latency_rdma_size_hint(tokens, hidden, world_size, experts)
    return BufferArguments(0, nbytes, True, experts // world_size)


def _config(kind: Any, method: str, world_size: int, num_sms: int | None) -> Any:
    """Return the library's configuration, with `num_sms` if given.

    The library takes `num_sms` from the configuration's class.
    """
    before = kind.num_sms
    try:
        if num_sms is not None:
            kind.num_sms = num_sms
        return getattr(kind, method)(world_size)
    finally:
        kind.num_sms = before


def _aligned(nbytes: int) -> int:
    return math.ceil(nbytes / _ALIGNMENT) * _ALIGNMENT
