"""Reducer of layers that return a row for each pair instead of their sum."""

import torch

from modular_kernel.contracts import TopKWeightAndReduce
from modular_kernel.ops.reduce import gather_rows, scale_rows
from modular_kernel.spec.problem import Combine, Problem
from modular_kernel.tensors import ExpertRows
from topk_reduce.checks import check_rows


class KeepTopK(TopKWeightAndReduce):
    """Rows -> (T, K, H), in the order of the pairs; zero for skipped pairs.

    weighted: whether to multiply rows by the router weight and the routed scaling factor, so that
        their sum over K is the combined output. Otherwise the rows of the experts are returned
        unchanged.
    """

    kind = None

    def __init__(self, *, weighted: bool) -> None:
        self.weighted = weighted

    def apply(self, rows: ExpertRows, out: torch.Tensor) -> None:
        if getattr(rows, "checked", None) is not True:
            by_token = getattr(rows, "row_of_pair_TK", None) is None
            check_rows(rows, out, "(T, K, H)" if by_token else "(e, C, H)")
        weights_TK = rows.topk_weights_TK if self.weighted else None
        scale = rows.scale if self.weighted else 1.0
        if rows.row_of_pair_TK is None:
            routing, e = rows.routing, rows.num_local
            scale_rows(rows.rows, weights_TK, scale=scale, out=out, routing=routing, num_local=e)
        else:
            source = rows.rows.flatten(0, 1)
            gather_rows(source, rows.row_of_pair_TK, weights_TK, scale=scale, out=out)


def reducer_for(problem: Problem, reduce: TopKWeightAndReduce) -> TopKWeightAndReduce:
    """Return the reducer for finalize: `reduce` if the problem sums over top-k, else KeepTopK."""
    if problem.combine is Combine.SUM:
        return reduce
    return KeepTopK(weighted=problem.combine is Combine.TOPK_WEIGHTED)
