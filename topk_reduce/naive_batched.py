"""Reducer that gathers the rows of each token from the batched format and sums them."""

import torch

from modular_kernel.contracts import TopKWeightAndReduce
from modular_kernel.ops.reduce import gather_weight_and_sum
from modular_kernel.spec.problem import Reduce
from modular_kernel.tensors import ExpertRows
from topk_reduce.checks import check_rows


class TopKWeightAndReduceNaiveBatched(TopKWeightAndReduce):
    """Gather the rows of each token from (e, C, H); weight and sum them to (T, H) in float32.

    Only the rows in row_of_pair_TK are read.
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
