"""Reducer for layers that return a row for each (token, expert) pair instead of their sum."""

import torch

from modular_kernel.contracts import TopKWeightAndReduce
from modular_kernel.ops.reduce import gather_rows, scale_rows
from modular_kernel.spec.problem import Combine, Problem
from modular_kernel.tensors import ExpertRows
from topk_reduce.checks import check_rows


class KeepTopK(TopKWeightAndReduce):
    """Copy the row of each pair to the output (T, K, H). Rows of skipped pairs become zero.

    weighted: whether to multiply each row by its router weight and the routed scaling factor. The
        sum of weighted rows over K is the layer's output.
    """

    kind = None

    def __init__(self, *, weighted: bool) -> None:
        self.weighted = weighted

    def apply(self, rows: ExpertRows, out: torch.Tensor) -> None:
        if getattr(rows, "checked", None) is not True:
            is_token_major = getattr(rows, "row_of_pair_TK", None) is None
            check_rows(rows, out, "(T, K, H)" if is_token_major else "(e, C, H)")
        weights_TK = rows.topk_weights_TK if self.weighted else None
        scale = rows.scale if self.weighted else 1.0
        if rows.row_of_pair_TK is None:
            routing, e = rows.routing, rows.num_local
            scale_rows(rows.rows, weights_TK, scale=scale, out=out, routing=routing, num_local=e)
        else:
            rows_RH = rows.rows.flatten(0, 1)
            gather_rows(rows_RH, rows.row_of_pair_TK, weights_TK, scale=scale, out=out)


def reducer_for(problem: Problem, sum_reducer: TopKWeightAndReduce) -> TopKWeightAndReduce:
    """Return `sum_reducer` if `problem` sums over top-k. Otherwise, return a KeepTopK."""
    if problem.combine is Combine.SUM:
        return sum_reducer
    return KeepTopK(weighted=problem.combine is Combine.TOPK_WEIGHTED)
