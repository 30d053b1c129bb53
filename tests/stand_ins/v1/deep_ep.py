"""DeepEP V1's interface, over any process group."""

import torch
from moved_rows import rows_by_expert, rows_by_rank, sums_by_expert, sums_by_rank


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
    ):
        assert (num_tokens_per_rank, is_token_in_rank) == ("per rank", "in rank")
        assert num_tokens_per_expert == "per expert"
        made = rows_by_rank(x, topk_idx, topk_weights, self.experts)
        return *made[:3], [], (made[3], len(topk_idx)), None

    def combine(self, x, handle):
        return sums_by_rank(x, *handle), None, None

    @staticmethod
    def get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank, hidden, ranks, experts):
        return hidden

    def low_latency_dispatch(self, x, topk_idx, most, num_experts, use_fp8=True):
        assert topk_idx.dtype == torch.int64
        assert most % 2 == 0
        local, rows = num_experts // 2, 2 * most
        counts = torch.empty(local, dtype=torch.int32)
        out = [torch.full((local, rows, x.shape[1]), torch.nan, dtype=x.dtype)]
        parts = (x,)
        if use_fp8:
            groups = x.float().unflatten(1, (-1, 128))
            scale = groups.abs().amax(2) / 448
            parts = ((groups / scale[..., None]).flatten(1).to(torch.float8_e4m3fn), scale)
            out = [out[0].to(torch.float8_e4m3fn), torch.full((local, rows, scale.shape[1]), 1e9)]
        places = rows_by_expert(parts, topk_idx, num_experts, out, counts)
        received = tuple(out) if use_fp8 else out[0]
        return received, counts, (places, num_experts), None, None

    def low_latency_combine(self, x, topk_idx, topk_weights, handle):
        assert x.dtype == torch.bfloat16
        places, experts = handle
        return sums_by_expert(x, places, topk_idx, topk_weights, experts), None, None
