"""DeepEP V2's interface, over any process group."""

from types import SimpleNamespace

import torch
from moved_rows import rows_by_rank, sums_by_rank

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
    ):
        assert num_topk > 0
        assert explicitly_destroy
        self.most, self.fp8 = num_max_tokens_per_rank, use_fp8_dispatch

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
        do_cpu_sync=None,
    ):
        assert isinstance(x, tuple) is self.fp8
        assert do_cpu_sync is False
        assert num_max_tokens_per_rank == self.most
        rows, ids, weights, places = rows_by_rank(x, topk_idx, topk_weights, num_experts)
        padded = [self._worst(part) for part in (rows if self.fp8 else (rows,))]
        handle = SimpleNamespace(places=places, tokens=len(topk_idx))
        received = tuple(padded) if self.fp8 else padded[0]
        return received, self._worst(ids), self._worst(weights), handle, None

    def _worst(self, rows):
        """As many as can come; those that did not are undefined."""
        out = torch.full((2 * self.most, rows.shape[1]), 5.0).to(rows.dtype)
        if rows.dtype.is_floating_point:
            out = torch.full((2 * self.most, rows.shape[1]), torch.nan).to(rows.dtype)
        out[: len(rows)] = rows
        return out

    def combine(self, x, handle, num_sms=0):
        return sums_by_rank(x, handle.places, handle.tokens), None, None
