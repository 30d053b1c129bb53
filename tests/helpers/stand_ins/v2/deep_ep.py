"""A stand-in for DeepEP V2 over any process group."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from moved_rows import Event, pad_rows, send_rows_to_ranks, sum_rows_by_rank

topk_idx_t = torch.int64


class ElasticBuffer:
    def __init__(
        self,
        group,
        num_max_tokens_per_rank=0,
        hidden=0,
        num_topk=0,
        use_fp8_dispatch=False,
        explicitly_destroy=False,
        **timeouts,
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
        num_experts=None,
        num_max_tokens_per_rank=None,
        num_sms=0,
        async_with_compute_stream=False,
        do_handle_copy=True,
        do_cpu_sync=None,
    ):
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
        return received, pad_rows(ids, num_rows), pad_rows(weights, num_rows), handle, event

    def _ranks(self):
        return range(dist.get_world_size())

    def combine(self, x, handle, num_sms=0):
        assert x.is_contiguous()
        assert x.dtype == torch.bfloat16
        assert len(x) == handle.rows
        assert torch.equal(handle.topk_idx, handle.original_topk_idx), (
            "ids were overwritten between dispatch and combine"
        )
        return sum_rows_by_rank(x, handle.places, len(handle.original_topk_idx)), None, Event(False)
