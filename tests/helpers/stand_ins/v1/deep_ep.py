"""A stand-in for DeepEP 1.2.1 over any process group, with the library's signatures and checks."""

from typing import ClassVar

import torch
import torch.distributed as dist
from moved_rows import (
    Event,
    pad_rows,
    send_rows_to_experts,
    send_rows_to_ranks,
    sum_rows_by_expert,
    sum_rows_by_rank,
)

PEERS = 8
# Number of ranks -> rows per channel and peer in the receive buffers of NVLink and RDMA.
ROWS = {
    2: (256, 128), 4: (256, 128), 8: (256, 128), 16: (288, 140), 24: (288, 128), 32: (288, 128),
    64: (288, 140), 128: (560, 128), 144: (720, 132), 160: (720, 132),
}  # fmt: skip
# Numbers of hosts for which internode kernels are compiled. They differ from those in ROWS.
HOSTS = 2, 4, 8, 16, 18, 20
METADATA_BYTES = 8 + 128 * 4 + 128 * 8 + 128 * 4  # source, ids, weights and scales of a row


class Config:
    """A configuration of dispatch or combine. Combine needs larger buffers."""

    rows = ROWS

    def __init__(self, num_sms, ranks, combine):
        assert ranks in self.rows, f"Unsupported number of EP ranks: {ranks}"
        self.channels, (self.nvl_rows, self.rdma_rows) = num_sms // 2, self.rows[ranks]
        self.nvl_rows += combine

    def get_nvl_buffer_size_hint(self, hidden_bytes, num_ranks):
        rows = self.channels * min(num_ranks, PEERS) * self.nvl_rows
        return rows * (hidden_bytes + METADATA_BYTES) + 1  # the caller rounds up

    def get_rdma_buffer_size_hint(self, hidden_bytes, num_ranks):
        if num_ranks <= PEERS:
            return 0
        assert num_ranks % PEERS == 0
        rows = self.channels * (num_ranks // PEERS) * self.rdma_rows
        return rows * (hidden_bytes + METADATA_BYTES + 16) * 2 + 1


class Buffer:
    """A communication buffer.

    peers: number of ranks per host. made: number of ranks and arguments of each buffer that this
    process created. hosts: numbers of hosts that have kernels. ids_dtype: dtype of ids.
    """

    num_sms = 20
    peers = PEERS
    hosts = HOSTS
    ids_dtype = torch.int64
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

    def _initialize(
        self,
        group,
        num_nvl_bytes,
        num_rdma_bytes,
        low_latency_mode,
        num_qps_per_rank,
        explicitly_destroy,
    ):
        ranks = dist.get_world_size() if group is None else group.size()
        self.internode = ranks > self.peers and not low_latency_mode
        assert explicitly_destroy
        assert ranks < self.peers or ranks % self.peers == 0
        assert num_nvl_bytes % 128 == num_rdma_bytes % 128 == 0
        if low_latency_mode:
            assert num_rdma_bytes > 0
        else:
            assert num_nvl_bytes > 0
            assert (num_rdma_bytes > 0) is self.internode
        if self.internode:
            assert ranks // self.peers in self.hosts, "Unsupported RDMA ranks"
            assert max(num_nvl_bytes, num_rdma_bytes) < 2**31
            assert num_qps_per_rank in (self.num_sms // 2, self.num_sms), (
                "as many queue pairs as channels or SMs"
            )
        self.made.append((ranks, num_nvl_bytes, num_rdma_bytes, low_latency_mode, num_qps_per_rank))

    def destroy(self):
        self.made.append("destroyed")

    @staticmethod
    def set_num_sms(number):
        assert number % 2 == 0
        Buffer.num_sms = number

    @staticmethod
    def get_dispatch_config(num_ranks):
        return Config(Buffer.num_sms, num_ranks, False)

    @staticmethod
    def get_combine_config(num_ranks):
        return Config(Buffer.num_sms, num_ranks, True)

    def get_dispatch_layout(
        self,
        topk_idx,
        num_experts,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        assert topk_idx.dtype == self.ids_dtype
        self.experts = num_experts
        return "per rank", self._per_host, "per expert", "in rank", None

    @property
    def _per_host(self):
        return "per host" if self.internode else None

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
        """Dispatch tokens.

        num_worst_tokens: number of returned rows. It is fixed so that the host does not wait for
        counts. Ids of unused rows are -1, and their other values are not written. It must be 0
        between hosts.
        """
        assert (num_tokens_per_rank, is_token_in_rank) == ("per rank", "in rank")
        assert num_tokens_per_expert == "per expert"
        assert num_tokens_per_rdma_rank == self._per_host
        if self.internode:
            assert num_worst_tokens == 0, "Internode dispatch has no num_worst_tokens"
        else:
            assert num_worst_tokens > 0, "the host would wait, which a CUDA graph cannot capture"
        for tensor in (topk_idx, topk_weights, *(x if isinstance(x, tuple) else (x,))):
            assert tensor.is_contiguous()
        assert topk_weights.dtype == torch.float32
        rows, ids, weights, places = send_rows_to_ranks(
            x, topk_idx, topk_weights, self.experts, 0.0
        )
        num_rows = num_worst_tokens or len(ids)
        padded = [pad_rows(part, num_rows) for part in (rows if isinstance(x, tuple) else (rows,))]
        received = tuple(padded) if isinstance(x, tuple) else padded[0]
        ids = pad_rows(ids.to(self.ids_dtype), num_rows, -1)
        weights = pad_rows(weights, num_rows)
        handle = places, len(topk_idx), num_rows
        return received, ids, weights, [], handle, Event(async_finish)

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
        places, tokens, rows = handle
        assert x.is_contiguous()
        assert x.dtype == torch.bfloat16
        assert len(x) == rows, "as many rows as were received, used or not"
        return sum_rows_by_rank(x, places, tokens), None, Event(False)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts
    ):
        assert num_max_dispatch_tokens_per_rank * num_ranks % 4 == num_experts % num_ranks == 0
        return num_experts * num_max_dispatch_tokens_per_rank * hidden * 8 + 128

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
        assert topk_idx.dtype == self.ids_dtype
        max_tokens = num_max_dispatch_tokens_per_rank
        assert len(x) == len(topk_idx) <= max_tokens
        world_size = dist.get_world_size()
        assert world_size * max_tokens % 4 == 0
        local, rows = num_experts // world_size, world_size * max_tokens
        counts = torch.empty(local, dtype=torch.int32)
        out = [torch.full((local, rows, x.shape[1]), torch.nan, dtype=x.dtype)]
        parts = (x,)
        if use_fp8:
            groups = x.float().unflatten(1, (-1, 128))
            scale = groups.abs().amax(2).clamp(min=1e-4) / 448
            parts = ((groups / scale[..., None]).flatten(1).to(torch.float8_e4m3fn), scale)
            out = [out[0].to(torch.float8_e4m3fn), torch.full((local, rows, scale.shape[1]), 1e9)]
        places = send_rows_to_experts(parts, topk_idx, num_experts, out, counts)
        received = tuple(out) if use_fp8 else out[0]
        # In the library, the hook receives the rows. Here, they have already been received.
        hook = (lambda: None) if return_recv_hook else None
        return received, counts, (places, num_experts), Event(False), hook

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
        assert topk_idx.dtype == self.ids_dtype
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        places, experts = handle
        combined = sum_rows_by_expert(x, places, topk_idx, topk_weights, experts)
        if out is not None:
            assert out.is_contiguous()
            combined = out.copy_(combined)
        return combined, Event(False), None
