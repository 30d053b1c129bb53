"""Tokens that would hide others are judged by themselves."""

from dataclasses import replace

import pytest
import torch

from modular_kernel.testing.cases.hostile import token_groups
from modular_kernel.testing.cases.lists import BASE
from modular_kernel.testing.verify.compare_isolated import RecipeErrors, compare_by_group

PROBLEM = replace(BASE, tokens=12, dtype=torch.bfloat16)
W8A8 = replace(PROBLEM, quant="fp8_w8a8_channel")


def exact(values: str) -> torch.Tensor:
    """(T, H) float64 as an oracle gives for such tokens."""
    rows = torch.randn(12, PROBLEM.hidden, dtype=torch.float64)
    groups = token_groups(values, 12)
    if values == "large":
        rows[groups == 1] *= 1e24
        rows[groups == 2] = torch.inf
    elif values != "ordinary":
        rows[groups == 1] = torch.nan
    return rows


def found(values: str, change: tuple[int, float], problem: object = PROBLEM) -> tuple[str, ...]:
    """What is wrong with rows as the recipe gives them, but for one row that is something else."""
    torch.manual_seed(0)
    want = exact(values)
    recipe = want.to(torch.bfloat16).double()
    out = recipe.to(torch.bfloat16)
    row, factor = change
    out[row] = factor if out[row].isnan().any() else out[row] * factor
    return compare_by_group(out, want, recipe, problem, values).problems  # type: ignore[arg-type]


@pytest.mark.parametrize("values", ["ordinary", "large", "nan_token", "inf_token"])
def test_rows_as_the_recipe_gives_them_are_right(values: str) -> None:
    assert found(values, (1, 1.0)) == ()


@pytest.mark.parametrize("values", ["ordinary", "large", "nan_token", "inf_token"])
def test_an_ordinary_row_is_seen_beside_the_others(values: str) -> None:
    assert found(values, (1, 1.1)) != ()
    assert found(values, (1, torch.nan)) != ()


def test_a_large_row_is_judged_among_its_like() -> None:
    (line, *_) = found("large", (3, 1.1))
    assert line.startswith("tokens of values=large: relative RMS error")


def test_where_the_recipe_overflows_a_finite_value_must_be_right() -> None:
    torch.manual_seed(0)
    want = exact("large")
    want[2] = 1e5 * torch.randn(PROBLEM.hidden, dtype=torch.float64)
    recipe = want.to(torch.bfloat16).double()
    recipe[2] = torch.inf
    for factor, wrong in ((1.0, False), (1.5, True), (torch.inf, False), (torch.nan, False)):
        out = want.to(torch.bfloat16)
        out[2] *= factor
        assert bool(compare_by_group(out, want, recipe, PROBLEM, "large").problems) is wrong


def test_without_ordinary_tokens_a_row_that_overflows_may_err_as_the_recipe_does() -> None:
    """A call of one token, and it is a large one: how far the recipe is off says another call."""
    torch.manual_seed(0)
    problem = W8A8.with_tokens(1)
    want = torch.randn(1, problem.hidden, dtype=torch.float64)
    recipe = torch.full_like(want, torch.inf)
    out = want.to(torch.bfloat16) + 0.05 * torch.randn(1, problem.hidden, dtype=torch.bfloat16)
    fair = RecipeErrors(recipe_error=0.05)
    given = want, recipe, problem, "large"
    assert compare_by_group(out, *given, recipe_errors=fair).problems == ()
    assert compare_by_group(out, *given).problems != ()
    assert compare_by_group(-2 * out, *given, recipe_errors=fair).problems != ()


def test_a_nan_token_stays_one_also_where_activations_are_quantized() -> None:
    assert "instead of nan" in found("nan_token", (6, 1.0))[0]
    assert "instead of nan" in found("nan_token", (6, 1.0), W8A8)[0]
    assert found("inf_token", (6, 1.0)) == ()
