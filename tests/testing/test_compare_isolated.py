"""`compare_by_group` compares huge and nonfinite tokens separately from ordinary tokens."""

from dataclasses import replace

import pytest
import torch

from modular_kernel.testing.cases.lists import BASE
from modular_kernel.testing.cases.value_kinds import assign_token_groups
from modular_kernel.testing.verify.compare_isolated import RoundingErrors, compare_by_group

PROBLEM = replace(BASE, tokens=12, dtype=torch.bfloat16)
W8A8 = replace(PROBLEM, quant="fp8_w8a8_channel")


def make_exact_rows(values: str) -> torch.Tensor:
    """Return a float64 reference output (T, H) for tokens with these values."""
    rows = torch.randn(12, PROBLEM.hidden, dtype=torch.float64)
    groups = assign_token_groups(values, 12)
    if values == "large":
        rows[groups == 1] *= 1e24
        rows[groups == 2] = torch.inf
    elif values != "ordinary":
        rows[groups == 1] = torch.nan
    return rows


def find_problems(
    values: str, change: tuple[int, float], problem: object = PROBLEM
) -> tuple[str, ...]:
    """Compare the rounded reference's rows after one row was multiplied by a factor.

    `change` is the row and the factor. A row of NaN is set to the factor instead.
    """
    torch.manual_seed(0)
    expected = make_exact_rows(values)
    rounded_reference = expected.to(torch.bfloat16).double()
    out = rounded_reference.to(torch.bfloat16)
    row, factor = change
    out[row] = factor if out[row].isnan().any() else out[row] * factor
    return compare_by_group(out, expected, rounded_reference, problem, values).problems  # type: ignore[arg-type]


@pytest.mark.parametrize("values", ["ordinary", "large", "nan_token", "inf_token"])
def test_rounded_reference_rows_pass(values: str) -> None:
    assert find_problems(values, (1, 1.0)) == ()


@pytest.mark.parametrize("values", ["ordinary", "large", "nan_token", "inf_token"])
def test_errors_in_ordinary_rows_are_found(values: str) -> None:
    assert find_problems(values, (1, 1.1)) != ()
    assert find_problems(values, (1, torch.nan)) != ()


def test_large_rows_are_compared_with_large_rows() -> None:
    (message, *_) = find_problems("large", (3, 1.1))
    assert message.startswith("tokens of values=large: relative RMS error")


def test_finite_outputs_must_be_right_where_the_rounded_reference_overflows() -> None:
    torch.manual_seed(0)
    expected = make_exact_rows("large")
    expected[2] = 1e5 * torch.randn(PROBLEM.hidden, dtype=torch.float64)
    rounded_reference = expected.to(torch.bfloat16).double()
    rounded_reference[2] = torch.inf
    for factor, is_wrong in ((1.0, False), (1.5, True), (torch.inf, False), (torch.nan, False)):
        out = expected.to(torch.bfloat16)
        out[2] *= factor
        assert (
            bool(compare_by_group(out, expected, rounded_reference, PROBLEM, "large").problems)
            is is_wrong
        )


def test_overflowing_rows_are_bounded_by_the_error_of_ordinary_tokens() -> None:
    """`RoundingErrors` holds the error that the rounded reference had with ordinary tokens."""
    torch.manual_seed(0)
    problem = W8A8.with_tokens(1)
    expected = torch.randn(1, problem.hidden, dtype=torch.float64)
    rounded_reference = torch.full_like(expected, torch.inf)
    out = expected.to(torch.bfloat16) + 0.05 * torch.randn(1, problem.hidden, dtype=torch.bfloat16)
    rounding_errors = RoundingErrors(rounding_error=0.05)
    arguments = expected, rounded_reference, problem, "large"
    assert compare_by_group(out, *arguments, rounding_errors=rounding_errors).problems == ()
    assert compare_by_group(out, *arguments).problems != ()
    assert compare_by_group(-2 * out, *arguments, rounding_errors=rounding_errors).problems != ()


def test_nan_token_must_stay_nan_with_quantized_activations() -> None:
    assert "instead of nan" in find_problems("nan_token", (6, 1.0))[0]
    assert "instead of nan" in find_problems("nan_token", (6, 1.0), W8A8)[0]
    assert find_problems("inf_token", (6, 1.0)) == ()
