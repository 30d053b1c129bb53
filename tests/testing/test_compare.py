"""`compare` accepts outputs as exact as the rounded reference and rejects each kind of wrong
output.
"""

from dataclasses import replace

import pytest
import torch

from modular_kernel.spec.problem import Combine, Problem
from modular_kernel.testing.verify.compare import MAX_ERROR_RATIO, Comparison, compare

PROBLEM = Problem(tokens=40, hidden=96, intermediate=32, experts=4, top_k=2, dtype=torch.bfloat16)
NOISE = 2e-3


def add_noise(exact: torch.Tensor, size: float, seed: int) -> torch.Tensor:
    """Return `exact` with a random relative error of `size`."""
    generator = torch.Generator().manual_seed(seed)
    return exact * (1 + size * torch.randn(exact.shape, dtype=torch.float64, generator=generator))


def make_random_exact_TH(*shape: int) -> torch.Tensor:
    shape = shape or (PROBLEM.tokens, PROBLEM.hidden)
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def compare_with_rounded_reference(
    out: torch.Tensor, exact: torch.Tensor, problem: Problem = PROBLEM
) -> Comparison:
    return compare(out, exact, add_noise(exact, NOISE, seed=2), problem)


def make_accurate_output(exact: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return `exact` with half of the rounded reference's error, rounded to `dtype`."""
    return add_noise(exact, NOISE / 2, seed=3).to(dtype)


def get_failure_message(comparison: Comparison) -> str:
    assert not comparison.ok
    return "; ".join(comparison.problems)


def test_output_as_exact_as_the_rounded_reference_passes() -> None:
    exact = make_random_exact_TH()
    comparison = compare_with_rounded_reference(make_accurate_output(exact), exact)
    assert comparison.ok, comparison
    assert (
        0 < comparison.error <= comparison.bound == pytest.approx(MAX_ERROR_RATIO * NOISE, rel=0.1)
    )


def test_exact_output_passes_and_has_no_error() -> None:
    exact = make_random_exact_TH().bfloat16().double()
    comparison = compare_with_rounded_reference(exact.bfloat16(), exact)
    assert comparison.ok
    assert comparison.error == comparison.worst_row == comparison.worst_value == 0


def test_output_with_twice_the_error_of_the_rounded_reference_fails() -> None:
    exact = make_random_exact_TH()
    assert "RMS" in get_failure_message(
        compare_with_rounded_reference(add_noise(exact, 2 * NOISE, seed=4).bfloat16(), exact)
    )


def test_zero_output_fails() -> None:
    exact = make_random_exact_TH()
    assert compare_with_rounded_reference(
        torch.zeros_like(exact).bfloat16(), exact
    ).error == pytest.approx(1)


@pytest.mark.parametrize("factor", [0.99, 1.01, -1.0, 2.0])
def test_a_wrong_factor_fails(factor: float) -> None:
    exact = make_random_exact_TH()
    assert "RMS" in get_failure_message(
        compare_with_rounded_reference(make_accurate_output(factor * exact), exact)
    )


def add_alternating(row: torch.Tensor, size: float) -> None:
    """Add `size` to even columns and subtract it from odd ones, so that no value is an outlier."""
    row[0::2] += size
    row[1::2] -= size


def test_one_bad_row_fails_and_is_named() -> None:
    """An error of 1 % in one of 4000 rows is a relative RMS error of only 2e-4."""
    problem = PROBLEM.with_tokens(4000)
    exact = make_random_exact_TH(4000, 96)
    out = add_noise(exact, NOISE / 2, seed=3)
    add_alternating(out[1234], 0.012)
    (message,) = compare_with_rounded_reference(out.bfloat16(), exact, problem).problems
    assert "of row 1234 >" in message


def test_error_of_a_row_may_exceed_its_rounded_reference_error_by_a_quarter() -> None:
    exact = make_random_exact_TH()
    rounded_reference = add_noise(exact, NOISE, seed=2)
    saturated = exact[7] * (1 + 20 * NOISE)
    rounded_reference[7] = saturated
    quantized_problem = replace(PROBLEM, quant="fp8_w8a8_tensor:static=true")
    out = make_accurate_output(exact)
    out[7] = saturated.bfloat16()
    assert compare(out, exact, rounded_reference, quantized_problem, rounding_error=1.0).ok
    assert "of row 7" in get_failure_message(
        compare(out, exact, rounded_reference, PROBLEM, rounding_error=1.0)
    )
    out[7] = (exact[7] * (1 + 26 * NOISE)).bfloat16()
    assert "of row 7" in get_failure_message(
        compare(out, exact, rounded_reference, quantized_problem, rounding_error=1.0)
    )
    # A large error of the rounded reference in row 7 does not raise the bound of row 9.
    out[7], out[9] = saturated.bfloat16(), (exact[9] * (1 + 20 * NOISE)).bfloat16()
    assert "of row 9" in get_failure_message(
        compare(out, exact, rounded_reference, quantized_problem, rounding_error=1.0)
    )


def test_one_bad_value_fails_and_is_named() -> None:
    """One wrong value of 4096 raises the error of its row to less than four times the median error
    of rows, which is the bound of a row. Only the bound of a value finds it.
    """
    problem = replace(PROBLEM, hidden=4096)
    exact = make_random_exact_TH(40, 4096)
    out = make_accurate_output(exact)
    out[7, 4095] -= float(exact.square().mean().sqrt()) * 0.4
    (message,) = compare_with_rounded_reference(out, exact, problem).problems
    assert "row 7 column 4095" in message


def test_a_small_row_must_be_as_exact_as_a_large_one() -> None:
    exact = make_random_exact_TH()
    exact[5] *= 1e-3
    out = make_accurate_output(exact)
    assert compare_with_rounded_reference(out, exact).ok
    out[5] = 0
    assert "row 5" in get_failure_message(compare_with_rounded_reference(out, exact))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nonfinite_values_fail(value: float) -> None:
    exact = make_random_exact_TH()
    out = make_accurate_output(exact)
    out[3, 4] = value
    comparison = compare_with_rounded_reference(out, exact)
    assert comparison.error == torch.inf
    assert get_failure_message(comparison) == "1 values are not finite, the first at row 3 column 4"


def test_all_nan_in_float64_reference_and_output_fails() -> None:
    exact = torch.full((40, 96), torch.nan, dtype=torch.float64)
    assert not compare_with_rounded_reference(exact.bfloat16(), exact).ok


def test_rows_that_are_zero_must_be_zero() -> None:
    exact = make_random_exact_TH()
    exact[[2, 9]] = 0
    out = make_accurate_output(exact)
    assert compare_with_rounded_reference(out, exact).ok
    out[9, 0] = 1e-30
    expected = "1 rows are not zero although all of their pairs are skipped, the first is row 9"
    assert expected in get_failure_message(compare_with_rounded_reference(out, exact))


def test_row_numbers_count_zero_rows() -> None:
    """Messages number rows among all rows, not among the nonzero ones."""
    exact = make_random_exact_TH()
    exact[:7] = 0
    out = add_noise(exact, NOISE / 2, seed=3)
    add_alternating(out[20], 0.012)
    assert any(
        "of row 20 >" in problem
        for problem in compare_with_rounded_reference(out.bfloat16(), exact).problems
    )
    add_alternating(out[30], 1.0)
    message = get_failure_message(compare_with_rounded_reference(out.bfloat16(), exact))
    assert "of row 30 >" in message
    assert "of row 30 column" in message


def test_zero_output_passes_only_if_the_reference_is_zero() -> None:
    exact = torch.zeros(40, 96, dtype=torch.float64)
    assert compare_with_rounded_reference(exact.bfloat16(), exact).ok
    assert not compare_with_rounded_reference(exact.bfloat16() + 1, exact).ok


@pytest.mark.parametrize("combine", list(Combine))
def test_output_without_tokens_passes(combine: Combine) -> None:
    problem = replace(PROBLEM, tokens=0, combine=combine)
    exact = torch.zeros(problem.output_shape, dtype=torch.float64)
    assert compare_with_rounded_reference(exact.bfloat16(), exact, problem).ok


def test_unreduced_top_k_is_compared_row_by_row() -> None:
    problem = replace(PROBLEM, combine=Combine.TOPK_WEIGHTED)
    exact = make_random_exact_TH(40, 2, 96)
    exact[3, 1] = 0
    out = make_accurate_output(exact)
    assert compare_with_rounded_reference(out, exact, problem).ok
    assert not compare_with_rounded_reference(out.flip(1), exact, problem).ok
    out[3, 1] = 1
    assert "row 7" in get_failure_message(compare_with_rounded_reference(out, exact, problem))


def test_wrong_shape_and_dtype_are_both_named() -> None:
    exact = make_random_exact_TH()
    message = get_failure_message(compare_with_rounded_reference(exact[:, :95].float(), exact))
    assert "shape is (40, 95), should be (40, 96)" in message
    assert "dtype is float32, should be bfloat16" in message


def test_wrong_number_of_tokens_fails() -> None:
    exact = make_random_exact_TH()
    assert "shape" in get_failure_message(
        compare_with_rounded_reference(make_accurate_output(exact)[:39], exact)
    )


def test_bound_of_float32_is_at_least_eps() -> None:
    """An error of the size of float32 rounding passes even if the rounded reference is exact."""
    problem = replace(PROBLEM, dtype=torch.float32)
    exact = make_random_exact_TH()
    within_bound = add_noise(exact, 9e-7, seed=5).float()
    beyond_bound = add_noise(exact, 1e-5, seed=5).float()
    assert compare(within_bound, exact, exact, problem).ok
    assert not compare(beyond_bound, exact, exact, problem).ok


def test_the_bound_depends_only_on_the_rounded_reference() -> None:
    """An output with large errors does not raise its own bound."""
    exact = make_random_exact_TH()
    bounds = {
        compare_with_rounded_reference(add_noise(exact, size, seed=6).bfloat16(), exact).bound
        for size in (0, 0.1, 1)
    }
    assert len(bounds) == 1
