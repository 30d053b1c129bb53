"""Reducers (TopKWeightAndReduce), which apply router weights and sum over the top-k experts.

In shapes, T is the number of tokens, K the number of experts of a token (top-k), H the hidden size,
e the number of local experts, and C the number of rows reserved for each expert. A pair is a token
together with one of its K experts. A skipped pair has the expert id -1.
"""

from topk_reduce.contiguous import TopKWeightAndReduceContiguous
from topk_reduce.delegate import TopKWeightAndReduceDelegate
from topk_reduce.keep_topk import KeepTopK, reducer_for
from topk_reduce.naive_batched import TopKWeightAndReduceNaiveBatched
from topk_reduce.noop import TopKWeightAndReduceNoOp

COMPONENTS = (
    TopKWeightAndReduceNoOp,
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceNaiveBatched,
    TopKWeightAndReduceDelegate,
    KeepTopK,
)

__all__ = [
    "COMPONENTS",
    "KeepTopK",
    "TopKWeightAndReduceContiguous",
    "TopKWeightAndReduceDelegate",
    "TopKWeightAndReduceNaiveBatched",
    "TopKWeightAndReduceNoOp",
    "reducer_for",
]
