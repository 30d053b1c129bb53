"""Every pair of features of a layer: a correct output on every rank, or a documented refusal.

Features are exchanges, EP and TP ranks and their groups, the sum over ranks, routers, shared
experts, factors, biases, activations and schemes. A feature that is correct alone can fail in
combination: for example, the sum over ranks after an exchange must be over TP only, whatever groups
there are.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering_rows import Refusal, name_of
from layer_rows import DRAWN, W8A8, Place, expected_output, outputs_of, tokens_of
from small_layers import relative_error

from modular_kernel.testing.ranks.pool import RankPool

Pool = Callable[[int], RankPool]
# Of a sum over ranks against float64, by dtype; and with activations of 8 bits.
BOUNDS, W8A8_BOUND = {"float32": 1e-5, "bfloat16": 1e-2}, 8e-2


def errors(row: dict[str, Any], outputs: list[torch.Tensor]) -> list[float]:
    """Return the errors of each rank's output, or of the sums that the caller computes."""
    want, (ep, tp) = expected_output(row), row["place"].split
    assert not [out for out in outputs if isinstance(out, str)], outputs
    by_rank = [outputs[e * tp : (e + 1) * tp] for e in range(ep)]
    if row["place"].reduce:
        return [
            relative_error(out, want[tokens_of(row, e)]) for e in range(ep) for out in by_rank[e]
        ]
    over_tp = [sum(out.double() for out in row_) for row_ in by_rank]
    if row["place"].exchange != "none":
        return [relative_error(out, want[tokens_of(row, e)]) for e, out in enumerate(over_tp)]
    return [relative_error(sum(over_tp), want)]


def test_all_pairs_of_values_and_all_rules_are_covered() -> None:
    assert DRAWN.unmet() == []
    for reason in DRAWN.impossible().values():
        known = ("refused: ", "EPMoE ", "one rank ", "this place ", "replicated ")
        assert reason.startswith(known), reason


@pytest.mark.share(2)
@pytest.mark.parametrize("row", DRAWN.accepted, ids=name_of)
def test_a_layer_over_ranks_equals_the_float64_reference(
    row: dict[str, Any], rank_pool: Pool
) -> None:
    check_layer(row, rank_pool)


@pytest.mark.parametrize("exchange", ["replicated", "rows"])
def test_the_output_of_an_exchange_is_summed_over_tp_only(exchange: str, rank_pool: Pool) -> None:
    """A group of EP and TP in combination with an exchange; the tests of each feature alone passed
    with this defect.
    """
    place = Place(exchange, (2, 2), "each and both", True)
    check_layer(next(row for row in DRAWN.accepted if row["place"] == place), rank_pool)


def check_layer(row: dict[str, Any], rank_pool: Pool) -> None:
    outputs = outputs_of(row, rank_pool)
    bound = W8A8_BOUND if row["quant"] in W8A8 else BOUNDS[row["dtype"]]
    assert max(errors(row, outputs)) <= bound


@pytest.mark.share(2)
@pytest.mark.parametrize(
    ("rule", "row"), [pytest.param(*each, id=name_of(each)) for each in DRAWN.refused]
)
def test_every_refusal_is_that_of_its_rule(
    rule: Refusal, row: dict[str, Any], rank_pool: Pool
) -> None:
    for out in outputs_of(row, rank_pool):
        assert isinstance(out, str), "a layer that a rule refuses was computed"
        assert out.startswith(f"{rule.error.__name__}: "), out
        assert re.search(rule.message, out), out
