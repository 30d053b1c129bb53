"""TopKWeightAndReduce parts, which apply router weights and sum over top-k."""

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
