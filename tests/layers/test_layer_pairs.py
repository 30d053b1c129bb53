"""Every pair of feature values of a layer is correct on every rank, or refused by a documented
rule.

Features are exchanges, EP and TP sizes and their groups, the sum over ranks, routers, shared
experts, factors, biases, activations and schemes. Features that work alone can fail in combination:
for example, after an exchange the outputs must be summed over TP ranks only. A row has one value of
each feature.
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
# Maximum relative error of outputs summed over ranks, by dtype and for 8-bit activations.
MAX_ERRORS, MAX_W8A8_ERROR = {"float32": 1e-5, "bfloat16": 1e-2}, 8e-2


def compute_relative_errors(row: dict[str, Any], outputs: list[torch.Tensor]) -> list[float]:
    """Return the errors of the ranks' outputs, or of their sums if the layer does not sum."""
    expected, (ep, tp) = expected_output(row), row["place"].split
    assert not [out for out in outputs if isinstance(out, str)], outputs
    by_ep_rank = [outputs[e * tp : (e + 1) * tp] for e in range(ep)]
    if row["place"].reduce:
        return [
            relative_error(out, expected[tokens_of(row, e)])
            for e in range(ep)
            for out in by_ep_rank[e]
        ]
    tp_sums = [sum(out.double() for out in rank_outputs) for rank_outputs in by_ep_rank]
    if row["place"].exchange != "none":
        return [relative_error(out, expected[tokens_of(row, e)]) for e, out in enumerate(tp_sums)]
    return [relative_error(sum(tp_sums), expected)]


def test_all_pairs_of_values_and_all_rules_are_covered() -> None:
    assert DRAWN.unmet() == []
    for reason in DRAWN.impossible().values():
        known_prefixes = ("refused: ", "EPMoE ", "one rank ", "this place ", "replicated ")
        assert reason.startswith(known_prefixes), reason


@pytest.mark.share(2)
@pytest.mark.parametrize("row", DRAWN.accepted, ids=name_of)
def test_a_layer_over_ranks_equals_the_float64_reference(
    row: dict[str, Any], rank_pool: Pool
) -> None:
    check_layer(row, rank_pool)


@pytest.mark.parametrize("exchange", ["replicated", "rows"])
def test_the_output_of_an_exchange_is_summed_over_tp_only(exchange: str, rank_pool: Pool) -> None:
    """Tests of single features do not detect a wrong sum over EP and TP ranks after an exchange."""
    place = Place(exchange, (2, 2), "each and both", True)
    check_layer(next(row for row in DRAWN.accepted if row["place"] == place), rank_pool)


def check_layer(row: dict[str, Any], rank_pool: Pool) -> None:
    outputs = outputs_of(row, rank_pool)
    bound = MAX_W8A8_ERROR if row["quant"] in W8A8 else MAX_ERRORS[row["dtype"]]
    assert max(compute_relative_errors(row, outputs)) <= bound


@pytest.mark.share(2)
@pytest.mark.parametrize(
    ("rule", "row"), [pytest.param(*refused, id=name_of(refused)) for refused in DRAWN.refused]
)
def test_refused_rows_raise_the_error_of_their_rule(
    rule: Refusal, row: dict[str, Any], rank_pool: Pool
) -> None:
    for out in outputs_of(row, rank_pool):
        assert isinstance(out, str), "a layer that a rule refuses was computed"
        assert out.startswith(f"{rule.error.__name__}: "), out
        assert re.search(rule.message, out), out
