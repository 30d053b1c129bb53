"""Reducer for rows (T, K, H) in token order."""

import torch

from modular_kernel.contracts import TopKWeightAndReduce
from modular_kernel.ops.reduce import weight_and_sum
from modular_kernel.spec.problem import Reduce
from modular_kernel.tensors import ExpertRows
from topk_reduce.checks import check_rows


class TopKWeightAndReduceContiguous(TopKWeightAndReduce):
    """Weight the rows (T, K, H) and sum them over K to (T, H), accumulating in float32.

    Rows of skipped pairs must be zero.
    """

    kind = Reduce.CONTIGUOUS

    def apply(self, rows: ExpertRows, out: torch.Tensor) -> None:
        if getattr(rows, "checked", None) is not True:
            check_rows(rows, out, "(T, K, H)")
        weight_and_sum(
            rows.rows,
            rows.topk_weights_TK,
            scale=rows.scale,
            out=out,
            routing=rows.routing,
            num_local=rows.num_local,
        )
