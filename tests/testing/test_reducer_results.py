"""The check `reducer_results` accepts every reducer, and detects defects in sums and in skipped
pairs.
"""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from modular_kernel.contracts import TopKWeightAndReduce
from modular_kernel.ops import count, reduce
from modular_kernel.testing.verify.reducer_results import check_reducer_results
from topk_reduce import (
    KeepTopK,
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNaiveBatched,
    TopKWeightAndReduceNoOp,
)

REDUCERS = (
    KeepTopK(weighted=False),
    KeepTopK(weighted=True),
    TopKWeightAndReduceContiguous(),
    TopKWeightAndReduceDelegate(),
    TopKWeightAndReduceNaiveBatched(),
    TopKWeightAndReduceNoOp(),
)
Change = Callable[[torch.Tensor], torch.Tensor]


def list_findings(reducer: TopKWeightAndReduce) -> list[str]:
    experts = SimpleNamespace(finalize_weight_and_reduce_impl=lambda: reducer)
    first = SimpleNamespace(device=torch.device("cpu"))
    trial = SimpleNamespace(kernel=SimpleNamespace(experts=experts), first=first)
    return list(check_reducer_results(trial))


@pytest.mark.parametrize("reducer", REDUCERS, ids=lambda reducer: type(reducer).__name__)
def test_reducers_pass(reducer: TopKWeightAndReduce) -> None:
    assert list_findings(reducer) == []


@pytest.mark.parametrize("reducer", REDUCERS[2::2], ids=lambda reducer: type(reducer).__name__)
def test_sums_in_another_order_are_detected(
    reducer: TopKWeightAndReduce, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The patched kernel adds from the last pair of a token to the first."""

    def sum_reversed(
        rows: torch.Tensor,
        weights: torch.Tensor,
        _top_k: int,
        scale: float,
        out: torch.Tensor,
        source: str,
        ids: dict[str, torch.Tensor],
    ) -> None:
        pairs = ids["row_source_ptr"]
        if source == "ids":
            expert_map = ids["expert_map_ptr"].long()
            local_ids = torch.where(
                pairs < len(expert_map), expert_map[pairs.clamp(0, len(expert_map) - 1)], -1
            )
            is_kept = (pairs >= 0) & (local_ids >= 0) & (local_ids < ids["num_local_experts"])
        else:
            is_kept, rows = pairs >= 0, rows[pairs.clamp(min=0)]
        values = (rows * weights[..., None]).masked_fill(~is_kept[..., None], 0.0)
        total = torch.zeros_like(out)
        for k in reversed(range(values.shape[1])):
            total += values[:, k]
        out.copy_(total * scale)

    monkeypatch.setattr(reduce, "_launch_sum", sum_reversed)
    monkeypatch.setattr(reduce, "use_triton", lambda _: True)
    assert any("in the order of k" in finding for finding in list_findings(reducer))


def test_pairs_mapped_to_e_must_be_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    uncounted_local_ids = count.uncounted_local_ids
    monkeypatch.setattr(
        reduce, "uncounted_local_ids", lambda routing, e: uncounted_local_ids(routing, e + 1)
    )
    (finding,) = list_findings(TopKWeightAndReduceContiguous())
    assert "nan" in finding
    assert finding.endswith("with torch operations")
