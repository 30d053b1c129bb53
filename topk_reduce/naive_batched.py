"""Weighted sum of rows in the batched format, each found through its pair."""

import torch

from modular_kernel.contracts import TopKWeightAndReduce
from modular_kernel.ops.reduce import gather_weight_and_sum
from modular_kernel.spec.problem import Reduce
from modular_kernel.tensors import ExpertRows
from topk_reduce.checks import check_rows


class TopKWeightAndReduceNaiveBatched(TopKWeightAndReduce):
    """(e, C, H) rows -> (T, H) through row_of_pair_TK, accumulated in float32.

    Only rows of pairs are read.
    """

    kind = Reduce.NAIVE_BATCHED

    def apply(self, rows: ExpertRows, out: torch.Tensor) -> None:
        if getattr(rows, "checked", None) is not True:
            check_rows(rows, out, "(e, C, H)")
        assert rows.row_of_pair_TK is not None  # checked above, or by the kernel
        gather_weight_and_sum(
            rows.rows.flatten(0, 1),
            rows.row_of_pair_TK,
            rows.topk_weights_TK,
            scale=rows.scale,
            out=out,
        )
