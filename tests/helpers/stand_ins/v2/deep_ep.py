"""A stand-in for DeepEP 2.1.0 over any process group, with the library's signatures and checks.

It has the class ElasticBuffer, and the class Buffer with the interface of DeepEP 1.
"""

import os
from types import SimpleNamespace
from typing import ClassVar

import torch
import torch.distributed as dist
from moved_rows import Event, pad_rows, send_rows_to_ranks, sum_rows_by_rank
from v1 import deep_ep as deep_ep_1

__version__ = "2.1.0"
topk_idx_t = torch.int64
# As in deep_ep_1. The tables have 48 and 96 ranks, too, and smaller buffers for RDMA.
ROWS = {
    2: (256, 132), 4: (256, 132), 8: (256, 132), 16: (288, 140), 24: (288, 128), 32: (288, 128),
    48: (288, 128), 64: (288, 128), 96: (480, 132), 128: (560, 132), 144: (720, 132),
    160: (720, 132),
}  # fmt: skip
HOSTS = 2, 3, 4, 6, 8, 12, 16, 18, 20


def check_torch_deterministic():
    """Fail as the library does, without a message."""
    assert not (
        torch.are_deterministic_algorithms_enabled()
        and torch.utils.deterministic.fill_uninitialized_memory
    )


class Config(deep_ep_1.Config):
    rows = ROWS


class Buffer(deep_ep_1.Buffer):
    """The Buffer that DeepEP 2 keeps. Its calls have further checks."""

    num_sms = 20
    hosts = HOSTS
    made: ClassVar[list] = []

    def __init__(
        self,
        group,
        num_nvl_bytes=0,
        num_rdma_bytes=0,
        low_latency_mode=False,
        num_qps_per_rank=24,
        allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False,
        explicitly_destroy=False,
        enable_shrink=False,
        comm=None,
    ):
        self._initialize(
            group,
            num_nvl_bytes,
            num_rdma_bytes,
            low_latency_mode,
            num_qps_per_rank,
            explicitly_destroy,
        )
        if low_latency_mode:
            self.nvshmem_qp_depth = int(os.environ.get("NVSHMEM_QP_DEPTH", "1024"))  # noqa: TID251

    @property
    def ids_dtype(self):
        return topk_idx_t

    @staticmethod
    def set_num_sms(new_num_sms):
        assert new_num_sms % 2 == 0
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks):
        return Config(Buffer.num_sms, num_ranks, False)

    @staticmethod
    def get_combine_config(num_ranks):
        return Config(Buffer.num_sms, num_ranks, True)

    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        expert_alignment=1,
        num_worst_tokens=0,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        check_torch_deterministic()
        return super().dispatch(
            x,
            handle,
            num_tokens_per_rank,
            num_tokens_per_rdma_rank,
            is_token_in_rank,
            num_tokens_per_expert,
            topk_idx,
            topk_weights,
            expert_alignment,
            num_worst_tokens,
            config,
            previous_event,
            async_finish,
            allocate_on_comm_stream,
        )

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        bias=None,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        check_torch_deterministic()
        return super().combine(x, handle, config=config)

    def low_latency_dispatch(
        self,
        x,
        topk_idx,
        num_max_dispatch_tokens_per_rank,
        num_experts,
        cumulative_local_expert_recv_stats=None,
        dispatch_wait_recv_cost_stats=None,
        use_fp8=True,
        round_scale=False,
        use_ue8m0=False,
        async_finish=False,
        return_recv_hook=False,
    ):
        check_torch_deterministic()
        self.max_tokens = num_max_dispatch_tokens_per_rank
        assert self.nvshmem_qp_depth >= (num_max_dispatch_tokens_per_rank + 1) * 2
        return super().low_latency_dispatch(
            x,
            topk_idx,
            num_max_dispatch_tokens_per_rank,
            num_experts,
            use_fp8=use_fp8,
            return_recv_hook=return_recv_hook,
        )

    def low_latency_combine(
        self,
        x,
        topk_idx,
        topk_weights,
        handle,
        use_logfmt=False,
        zero_copy=False,
        async_finish=False,
        return_recv_hook=False,
        out=None,
        combine_wait_recv_cost_stats=None,
    ):
        check_torch_deterministic()
        assert self.nvshmem_qp_depth >= (self.max_tokens + 1) * 2
        return super().low_latency_combine(x, topk_idx, topk_weights, handle, out=out)


class ElasticBuffer:
    def __init__(
        self,
        group,
        num_bytes=None,
        num_cpu_bytes=0,
        num_max_tokens_per_rank=0,
        hidden=0,
        num_topk=0,
        use_fp8_dispatch=False,
        deterministic=False,
        allow_hybrid_mode=True,
        allow_multiple_reduction=True,
        prefer_overlap_with_compute=True,
        sl_idx=3,
        num_allocated_qps=0,
        num_cpu_timeout_secs=300,
        num_gpu_timeout_secs=100,
        explicitly_destroy=False,
    ):
        assert num_topk > 0
        assert explicitly_destroy
        self.max_tokens, self.fp8 = num_max_tokens_per_rank, use_fp8_dispatch

    def destroy(self):
        pass

    def dispatch(
        self,
        x,
        topk_idx=None,
        topk_weights=None,
        cumulative_local_expert_recv_stats=None,
        num_experts=None,
        num_max_tokens_per_rank=None,
        expert_alignment=None,
        num_sms=0,
        num_qps=0,
        previous_event=None,
        previous_event_before_epilogue=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
        handle=None,
        do_handle_copy=True,
        do_cpu_sync=None,
        do_expand=False,
        do_zero_padding=False,
        use_tma_aligned_col_major_sf=False,
    ):
        check_torch_deterministic()
        assert handle is None
        assert do_cpu_sync is False
        assert num_max_tokens_per_rank in (None, self.max_tokens)
        assert topk_idx.dtype == topk_idx_t
        sorted_ids = topk_idx.masked_fill(topk_idx < 0, num_experts).sort(1).values
        is_repeated = (sorted_ids[:, 1:] == sorted_ids[:, :-1]) & (sorted_ids[:, 1:] < num_experts)
        assert not is_repeated.any(), "the kernel would trap: a token has the same expert twice"
        quantized, num_rows = isinstance(x, tuple), self.max_tokens * dist.get_world_size()
        rows, ids, weights, places = send_rows_to_ranks(x, topk_idx, topk_weights, num_experts)
        padded = [pad_rows(part, num_rows) for part in (rows if quantized else (rows,))]
        counts = [sum(source <= rank for source, _ in places) for rank in self._ranks()]
        handle = SimpleNamespace(
            places=places,
            rows=num_rows,
            topk_idx=topk_idx.clone() if do_handle_copy else topk_idx,
            original_topk_idx=topk_idx.clone(),
            psum_num_recv_tokens_per_scaleup_rank=torch.tensor(counts, dtype=torch.int32),
        )
        received = tuple(padded) if quantized else padded[0]
        event = Event(async_with_compute_stream)
        ids = ids.to(topk_idx_t)
        return received, pad_rows(ids, num_rows), pad_rows(weights, num_rows), handle, event

    def _ranks(self):
        return range(dist.get_world_size())

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        bias=None,
        num_sms=0,
        num_qps=0,
        previous_event=None,
        previous_event_before_epilogue=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
    ):
        check_torch_deterministic()
        assert x.is_contiguous()
        assert x.dtype == torch.bfloat16
        assert len(x) == handle.rows
        assert torch.equal(handle.topk_idx, handle.original_topk_idx), (
            "ids were overwritten between dispatch and combine"
        )
        return sum_rows_by_rank(x, handle.places, len(handle.original_topk_idx)), None, Event(False)
