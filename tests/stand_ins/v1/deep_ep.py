"""DeepEP V1's interface, over any process group."""

import torch
import torch.distributed as dist
from moved_rows import Event, rows_by_expert, rows_by_rank, sums_by_expert, sums_by_rank, worst


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes, num_ranks):
        return hidden_bytes * num_ranks + 1  # the caller rounds up


class Buffer:
    num_sms = 20

    def __init__(
        self,
        group,
        num_nvl_bytes=0,
        num_rdma_bytes=0,
        low_latency_mode=False,
        num_qps_per_rank=24,
        explicitly_destroy=False,
    ):
        assert num_nvl_bytes % 128 == 0
        assert num_rdma_bytes > 0 if low_latency_mode else num_nvl_bytes > 0
        assert explicitly_destroy

    def destroy(self):
        pass

    @staticmethod
    def set_num_sms(number):
        assert number % 2 == 0
        Buffer.num_sms = number

    @staticmethod
    def get_dispatch_config(num_ranks):
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx, num_experts):
        assert topk_idx.dtype == torch.int64
        self.experts = num_experts
        return "per rank", None, "per expert", "in rank", None

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
    ):
        """num_worst_tokens: so many rows come back, ids are -1 behind those that came, and nothing
        else is written there. The host then waits for nothing, and knows no numbers."""
        assert (num_tokens_per_rank, is_token_in_rank) == ("per rank", "in rank")
        assert num_tokens_per_expert == "per expert"
        assert num_worst_tokens > 0, "the host would wait, which no graph can hold"
        for tensor in (topk_idx, topk_weights, *(x if isinstance(x, tuple) else (x,))):
            assert tensor.is_contiguous()
        assert topk_weights.dtype == torch.float32
        rows, ids, weights, places = rows_by_rank(x, topk_idx, topk_weights, self.experts, 0.0)
        padded = [
            worst(part, num_worst_tokens) for part in (rows if isinstance(x, tuple) else (rows,))
        ]
        received = tuple(padded) if isinstance(x, tuple) else padded[0]
        ids, weights = worst(ids, num_worst_tokens, -1), worst(weights, num_worst_tokens)
        handle = places, len(topk_idx), num_worst_tokens
        return received, ids, weights, [], handle, Event(async_finish)

    def combine(self, x, handle, config=None):
        places, tokens, rows = handle
        assert x.is_contiguous()
        assert x.dtype == torch.bfloat16
        assert len(x) == rows, "as many rows as were received, used or not"
        return sums_by_rank(x, places, tokens), None, Event(False)

    @staticmethod
    def get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank, hidden, ranks, experts):
        return hidden

    def low_latency_dispatch(
        self, x, topk_idx, most, num_experts, use_fp8=True, return_recv_hook=False
    ):
        assert topk_idx.dtype == torch.int64
        world_size = dist.get_world_size()
        assert world_size * most % 4 == 0
        local, rows = num_experts // world_size, world_size * most
        counts = torch.empty(local, dtype=torch.int32)
        out = [torch.full((local, rows, x.shape[1]), torch.nan, dtype=x.dtype)]
        parts = (x,)
        if use_fp8:
            groups = x.float().unflatten(1, (-1, 128))
            scale = groups.abs().amax(2).clamp(min=1e-4) / 448
            parts = ((groups / scale[..., None]).flatten(1).to(torch.float8_e4m3fn), scale)
            out = [out[0].to(torch.float8_e4m3fn), torch.full((local, rows, scale.shape[1]), 1e9)]
        places = rows_by_expert(parts, topk_idx, num_experts, out, counts)
        received = tuple(out) if use_fp8 else out[0]
        # What was sent may be read when the hook was called: nothing here can tell.
        hook = (lambda: None) if return_recv_hook else None
        return received, counts, (places, num_experts), Event(False), hook

    def low_latency_combine(self, x, topk_idx, topk_weights, handle, out=None):
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        places, experts = handle
        made = sums_by_expert(x, places, topk_idx, topk_weights, experts)
        if out is not None:
            assert out.is_contiguous()
            made = out.copy_(made)
        return made, Event(False), None
