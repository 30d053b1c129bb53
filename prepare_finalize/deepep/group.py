"""DeepEPGroup: DeepEP's buffers for one process group.

    manager = DeepEPGroup(group)                     # can be shared by the parts of many layers
    kernel = make_kernel("DeepEPHTPrepareAndFinalize", "TritonExperts", problem, group=manager)
    ...
    manager.destroy()

DeepEPGroup is the manager of the exchange components ("parts") over DeepEP. A buffer is created on
first use and shared by all parts that need the same sizes. Creating and destroying managers, parts
and buffers is collective: every rank of the group must do it, in the same order. If a rank is
missing, the library's kernels wait for it and then stop the device permanently. Ranks therefore
compare the arguments of each collective step through the group's store before anything is launched.

DeepEP 1 has the class Buffer. DeepEP 2 has this class, too, and the class ElasticBuffer, which this
module calls the second generation.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from modular_kernel.errors import (
    CommunicationError,
    ConfigurationError,
    DeviceError,
    UnsupportedError,
)
from modular_kernel.settings import (
    is_deepep_gin_disabled,
    nvshmem_uses_ibgda,
    read_nvshmem_qp_depth,
)
from modular_kernel.utils import forks
from prepare_finalize.common.library_calls import LIBRARY_ERRORS, unpack
from prepare_finalize.common.torch_group import first_sentence
from prepare_finalize.deepep.arguments import high_throughput_arguments, low_latency_arguments
from prepare_finalize.deepep.library import (
    check_dispatch_between_hosts,
    ids_dtype,
    limits_tokens_by_qp_depth,
    load_deepep,
    max_tokens_of_qp_depth,
    summarize,
)
from prepare_finalize.deepep.low_latency_buffer import LowLatencyBuffer
from prepare_finalize.rendezvous.connect import (
    check_process,
    new_prefix_store,
    resolve_process_group,
    resolve_timeout,
)
from prepare_finalize.rendezvous.hosts import find_hosts
from prepare_finalize.rendezvous.store_collectives import Properties, StoreCollectives

BufferT = TypeVar("BufferT")
_MIN_LIBRARY_TIMEOUT_S = 100.0  # minimum timeout of the kernels of the second generation
_RDMA_DEVICES_DIR = Path("/sys/class/infiniband")


class DeepEPGroup:
    """DeepEP's buffers for one process group, whose backend for GPUs is NCCL.

    group: a ProcessGroup of torch.distributed; None is the default group.
    timeout_s: timeout of collective steps that create or free buffers, in seconds; None is
        MK_TIMEOUT_S, or 10 s. Calls have the timeout of the library, about 100 s.
    num_sms: number of SMs, even, for kernels with this option; None is the library's default.

    Raise ConfigurationError if the group cannot be used, and CommunicationError if a rank does not
    respond.
    """

    device = "cuda"
    _num_nvshmem_buffers = 0  # of all managers in this process

    def __init__(
        self,
        group: object | None = None,
        *,
        timeout_s: float | None = None,
        num_sms: int | None = None,
    ) -> None:
        if num_sms is not None and (num_sms < 2 or num_sms % 2):
            raise ConfigurationError("num_sms", got=num_sms, need="an even number from 2 on")
        self._generation = forks.generation()
        self.timeout_s = resolve_timeout(timeout_s)
        self.process_group = _resolve_nccl_group(group)
        self.rank, self.world_size = self.process_group.rank(), self.process_group.size()
        self.num_sms = num_sms
        self._buffers: dict[tuple[object, ...], Any] = {}
        self._destroyed = False
        try:
            store = new_prefix_store(self.process_group, self.timeout_s, prefix="/deepep")
        except RuntimeError as error:
            need = f"an answer within {self.timeout_s:g} s"
            raise CommunicationError(
                "process group's store",
                got=first_sentence(error),
                need=need,
                rank=self.rank,
                phase="construct",
            ) from error
        self._store_collectives = StoreCollectives(
            store, self.rank, self.world_size, self.timeout_s
        )
        # Compare num_sms before any other collective, so that all ranks raise in the same
        # collective.
        self.check_equal({"num_sms": num_sms})
        self.hosts = find_hosts(self._store_collectives, self.rank)

    def check_device(self, device: torch.device | str) -> None:
        """Raise DeviceError unless `device` is this process's current GPU."""
        requested = torch.device(device)
        if requested.type != self.device or requested.index not in (
            None,
            torch.cuda.current_device(),
        ):
            need = f"{self.device}, the process's current one, which has the buffers"
            raise DeviceError("tensors of an exchange", got=requested, need=need)

    @property
    def is_capturing(self) -> bool:
        """Whether the current stream is being captured in a CUDA graph."""
        return torch.cuda.is_current_stream_capturing()

    def check_open(self) -> None:
        """Raise UnsupportedError after `destroy`, and StateError in a forked child."""
        check_process(self._generation)
        if self._destroyed:
            raise UnsupportedError("exchange", got="a destroyed manager", need="a new one")

    def check_equal(self, properties: Properties) -> None:
        """Raise CommunicationError on every rank unless all ranks pass the same properties.

        Collective, over the store; nothing is launched on the device.
        """
        self.check_open()
        self._store_collectives.check_equal(properties)

    def high_throughput(self, hidden: int) -> "HighThroughputBuffer":
        """Return the high-throughput buffer for rows of `hidden` bfloat16 values."""
        return self._get_or_create(
            ("high throughput", hidden), lambda: self._make_high_throughput(hidden)
        )

    def low_latency(self, tokens: int, hidden: int, experts: int) -> LowLatencyBuffer:
        """Return the low-latency buffer for at most `tokens` tokens per rank.

        experts: number of experts of all ranks together, the same number on each.
        """
        sizes = tokens, hidden, experts
        return self._get_or_create(("low latency", *sizes), lambda: self._make_low_latency(*sizes))

    def elastic(self, tokens: int, hidden: int, top_k: int) -> Any:
        """Return the buffer of the second generation for at most `tokens` tokens per rank."""
        sizes = tokens, hidden, top_k
        return self._get_or_create(("elastic", *sizes), lambda: self._make_elastic(*sizes))

    def destroy(self) -> None:
        """Free the buffers. Collective. Later use raises UnsupportedError.

        Raise CommunicationError if a rank does not respond. The buffers are then kept, because that
        rank may still write to them.
        """
        check_process(self._generation)
        buffers, self._buffers = self._buffers, {}
        if self._destroyed or not buffers:
            self._destroyed = True
            return
        self._destroyed = True
        torch.cuda.synchronize()
        self._store_collectives.check_equal({"destroy": list(buffers)})
        for key, buffer in reversed(buffers.items()):
            buffer.destroy()
            DeepEPGroup._num_nvshmem_buffers -= self._uses_nvshmem(key)

    def _check_network(self, properties: Properties) -> None:
        """For ranks on several hosts, check that all have RDMA NICs and the same `properties`.

        Raise CommunicationError on all ranks if `properties` differ, and ConfigurationError on all
        ranks if there are no NICs.
        """
        if len(self.hosts) == 1:
            return
        self.check_equal({"RDMA NIC": has_rdma_nic(), **properties})
        if not has_rdma_nic():
            need = "RDMA NICs for DeepEP between hosts"
            raise ConfigurationError("network of the hosts", got="no RDMA NIC", need=need)

    def _check_nvshmem(self) -> None:
        """For ranks on several hosts, check their NICs and settings of NVSHMEM.

        Raise ConfigurationError if this process already has a buffer. The library initializes
        NVSHMEM for each buffer, which a process can do only once, and the high-throughput and
        low-latency kernels number ranks differently.
        """
        if len(self.hosts) == 1:
            return
        properties = {"IBGDA": nvshmem_uses_ibgda(), "buffers": DeepEPGroup._num_nvshmem_buffers}
        self._check_network(properties)
        if DeepEPGroup._num_nvshmem_buffers:
            need = "one Buffer of deep_ep in a process, of one kind and size, between hosts"
            raise ConfigurationError("DeepEP's buffers", got="another is in use", need=need)

    def _get_or_create(self, key: tuple[object, ...], create: Callable[[], BufferT]) -> BufferT:
        self.check_open()
        if key not in self._buffers:
            try:
                self._buffers[key] = create()
                DeepEPGroup._num_nvshmem_buffers += self._uses_nvshmem(key)
            except LIBRARY_ERRORS as error:
                if isinstance(error, (CommunicationError, ConfigurationError)):
                    raise
                need = _BUFFER_REQUIREMENTS[str(key[0])]
                subject = f"DeepEP's {key[0]} buffer"
                raise ConfigurationError(subject, got=summarize(error), need=need) from error
        buffer: BufferT = self._buffers[key]
        return buffer

    def _uses_nvshmem(self, key: tuple[object, ...]) -> bool:
        """Return whether a buffer is a Buffer, not an ElasticBuffer, and spans several hosts."""
        return len(self.hosts) > 1 and key[0] != "elastic"

    def _make_high_throughput(self, hidden: int) -> "HighThroughputBuffer":
        library = load_deepep(1)
        buffer_class = library.Buffer
        if len(self.hosts) > 1:
            check_dispatch_between_hosts(library)
        config = high_throughput_arguments(buffer_class, hidden, self.world_size, self.num_sms)
        self._check_nvshmem()
        buffer = config.buffer.make_buffer(buffer_class, self.process_group)
        return HighThroughputBuffer(buffer, config.dispatch, config.combine)

    def _make_low_latency(self, tokens: int, hidden: int, experts: int) -> LowLatencyBuffer:
        library = load_deepep(1)
        buffer_class = library.Buffer
        self._check_nvshmem()
        self._check_qp_depth(buffer_class, tokens)
        if nvshmem_uses_ibgda() and not has_rdma_nic():
            raise no_queue_pairs_error("IBGDA enabled without an RDMA NIC")
        arguments = low_latency_arguments(buffer_class, tokens, hidden, experts, self.world_size)
        buffer = arguments.make_buffer(buffer_class, self.process_group)
        # A library that was built with IBGDA has set the variable that enables it.
        if nvshmem_uses_ibgda() and not has_rdma_nic():
            buffer.destroy()
            raise no_queue_pairs_error("a build that enables IBGDA, without an RDMA NIC")
        low_latency = LowLatencyBuffer(buffer, tokens, experts)
        try:
            low_latency.self_test(hidden, ids_dtype(library))
        except RuntimeError as error:
            raise no_queue_pairs_error(
                f"a first exchange that failed: {summarize(error)}"
            ) from error
        return low_latency

    def _check_qp_depth(self, buffer_class: Any, tokens: int) -> None:
        """Raise ConfigurationError on all ranks if queue pairs are not deep enough for the tokens.

        Raise CommunicationError on all ranks if their depths differ.
        """
        if not limits_tokens_by_qp_depth(buffer_class):
            return
        depth = read_nvshmem_qp_depth()
        self.check_equal({"NVSHMEM_QP_DEPTH": depth})
        if tokens > max_tokens_of_qp_depth(depth):
            got = f"{tokens} tokens on a rank with NVSHMEM_QP_DEPTH={depth}"
            need = (
                f"<= {max_tokens_of_qp_depth(depth)} tokens, or"
                f" NVSHMEM_QP_DEPTH={2 * (tokens + 1)} or more"
            )
            raise ConfigurationError("DeepEP's low latency buffer", got=got, need=need)

    def _make_elastic(self, tokens: int, hidden: int, top_k: int) -> Any:
        buffer_class = load_deepep(2).ElasticBuffer
        self._check_network({"EP_DISABLE_GIN": "1" if is_deepep_gin_disabled() else "0"})
        if len(self.hosts) > 1 and is_deepep_gin_disabled():
            need = "EP_DISABLE_GIN=0: hosts reach each other through NCCL's GIN alone"
            raise ConfigurationError("DeepEP's elastic buffer", got="EP_DISABLE_GIN=1", need=need)
        # The library uses the NCCL communicator of the group, which its first collective creates.
        dist.barrier(self.process_group, device_ids=[torch.cuda.current_device()])
        timeout_secs = math.ceil(max(_MIN_LIBRARY_TIMEOUT_S, self.timeout_s))
        return buffer_class(
            self.process_group,
            num_max_tokens_per_rank=tokens,
            hidden=hidden,
            num_topk=top_k,
            num_cpu_timeout_secs=timeout_secs,
            num_gpu_timeout_secs=timeout_secs,
            explicitly_destroy=True,
        )


class HighThroughputBuffer:
    """A Buffer for the high-throughput kernels, and the configurations of its kernels."""

    def __init__(self, buffer: Any, dispatch: Any, combine: Any) -> None:
        self._buffer, self._dispatch_config, self._combine_config = buffer, dispatch, combine

    def dispatch(
        self,
        rows: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        *,
        num_experts: int,
        num_worst_tokens: int,
        is_async: bool,
    ) -> tuple[Any, ...]:
        """Send each row once to every rank that has one of its experts.

        rows: (T, H) contiguous; or quantized rows, and their scales.
        ids_TK: expert numbers, in the library's dtype of ids; -1 skips a pair.
        num_experts: number of experts of all ranks together.
        num_worst_tokens: number of received rows, including unused ones. 0 makes the CPU wait for
            the number of rows, and there are no unused ones.
        is_async: whether the current stream has to wait for the returned event.

        Returns the received rows, ids and weights, the library's handle, and the event.
        """
        layout = self._buffer.get_dispatch_layout(ids_TK, num_experts)
        counts_by_rank, counts_by_host, counts_E, is_sent_TR, _ = unpack(
            layout, 5, "DeepEP's get_dispatch_layout"
        )
        results = self._buffer.dispatch(
            rows,
            num_tokens_per_rank=counts_by_rank,
            num_tokens_per_rdma_rank=counts_by_host,
            is_token_in_rank=is_sent_TR,
            num_tokens_per_expert=counts_E,
            topk_idx=ids_TK,
            topk_weights=weights_TK,
            num_worst_tokens=num_worst_tokens,
            config=self._dispatch_config,
            async_finish=is_async,
        )
        received, ids_RK, weights_RK, _, handle, event = unpack(results, 6, "DeepEP's dispatch")
        return received, ids_RK, weights_RK, handle, event

    def combine(self, rows_RH: torch.Tensor, handle: Any) -> torch.Tensor:
        """Send rows back and return the sums over ranks for this rank's tokens, (T, H).

        handle: the library's handle of the dispatch.
        """
        results = self._buffer.combine(rows_RH, handle, config=self._combine_config)
        sums_TH: torch.Tensor = unpack(results, 3, "DeepEP's combine")[0]
        return sums_TH

    def destroy(self) -> None:
        """Free the buffer. Collective."""
        self._buffer.destroy()


# Requirements of each kind of buffer, for error messages.
_BUFFER_REQUIREMENTS = {
    "high throughput": (
        "GPUs of a host that reach each other over NVLink, 2, 4 or 8 of them; 8 of each of several"
        " hosts, with NVSHMEM and RDMA NICs"
    ),
    "low latency": "NVSHMEM, and GPUs that reach each other over NVLink or through RDMA NICs",
    "elastic": "NCCL 2.30.4 or newer, nvcc and cuobjdump, and EP_DISABLE_GIN=1 without RDMA NICs",
}


def has_rdma_nic() -> bool:
    """Return whether the host has an InfiniBand or RoCE device."""
    return _RDMA_DEVICES_DIR.is_dir() and any(_RDMA_DEVICES_DIR.iterdir())


def no_queue_pairs_error(got: str) -> ConfigurationError:
    """Return the error for low-latency kernels without RDMA queue pairs.

    Without queue pairs of IBGDA (RDMA that the GPU initiates), the kernels of deep_ep 1.2.1 and 2
    stop the device, even if NVLink reaches every peer. The process then cannot use its GPU any
    more.
    """
    need = (
        "RDMA NICs with IBGDA; or, where NVLink reaches every peer, a build of deep_ep whose"
        " low-latency kernels require no queue pairs, with NVSHMEM_IB_ENABLE_IBGDA=0 and"
        " NVSHMEM_REMOTE_TRANSPORT=none"
    )
    return ConfigurationError("DeepEP's low latency buffer", got=got, need=need)


def _resolve_nccl_group(group: object | None) -> dist.ProcessGroup:
    """Return `group`, or the default group for None.

    Raise ConfigurationError unless its backend for GPUs is NCCL.
    """
    resolved = resolve_process_group(group)
    config = dist.get_backend_config(resolved)
    backends = dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)
    if backends.get("cuda") != "nccl":
        raise ConfigurationError("process group's backend", got=config, need="nccl for cuda")
    return resolved
