"""The tolerance: what is as good as the recipe passes, and each kind of damage does not."""

from dataclasses import replace

import pytest
import torch

from modular_kernel.spec.problem import Combine, Problem
from modular_kernel.testing.verify.compare import FACTOR, Comparison, compare

PROBLEM = Problem(tokens=40, hidden=96, intermediate=32, experts=4, top_k=2, dtype=torch.bfloat16)
NOISE = 2e-3


def noisy(exact: torch.Tensor, size: float, seed: int) -> torch.Tensor:
    """`exact` with a relative error of `size`, random."""
    generator = torch.Generator().manual_seed(seed)
    return exact * (1 + size * torch.randn(exact.shape, dtype=torch.float64, generator=generator))


def exact_TH(*shape: int) -> torch.Tensor:
    shape = shape or (PROBLEM.tokens, PROBLEM.hidden)
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def judged(out: torch.Tensor, exact: torch.Tensor, problem: Problem = PROBLEM) -> Comparison:
    return compare(out, exact, noisy(exact, NOISE, seed=2), problem)


def good(exact: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """An output as inexact as the recipe (bfloat16 adds some)."""
    return noisy(exact, NOISE / 2, seed=3).to(dtype)


def words(comparison: Comparison) -> str:
    assert not comparison.ok
    return "; ".join(comparison.problems)


def test_as_good_as_the_recipe_passes() -> None:
    exact = exact_TH()
    comparison = judged(good(exact), exact)
    assert comparison.ok, comparison
    assert 0 < comparison.error <= comparison.bound == pytest.approx(FACTOR * NOISE, rel=0.1)


def test_exact_passes_and_has_no_error() -> None:
    exact = exact_TH().bfloat16().double()
    comparison = judged(exact.bfloat16(), exact)
    assert comparison.ok
    assert comparison.error == comparison.worst_row == comparison.worst_value == 0


def test_half_as_exact_as_the_recipe_fails() -> None:
    exact = exact_TH()
    assert "RMS" in words(judged(noisy(exact, 2 * NOISE, seed=4).bfloat16(), exact))


def test_zeros_fail() -> None:
    exact = exact_TH()
    assert judged(torch.zeros_like(exact).bfloat16(), exact).error == pytest.approx(1)


@pytest.mark.parametrize("factor", [0.99, 1.01, -1.0, 2.0])
def test_a_wrong_factor_fails(factor: float) -> None:
    exact = exact_TH()
    assert "RMS" in words(judged(good(factor * exact), exact))


def push(row: torch.Tensor, size: float) -> None:
    """Add an error of `size` in each value, up and down in turn: no value stands out."""
    row[0::2] += size
    row[1::2] -= size


def test_one_bad_row_fails_and_is_named() -> None:
    """One per cent off in one of 4000 rows: 2e-4 on average."""
    problem = PROBLEM.with_tokens(4000)
    exact = exact_TH(4000, 96)
    out = noisy(exact, NOISE / 2, seed=3)
    push(out[1234], 0.012)
    (text,) = judged(out.bfloat16(), exact, problem).problems
    assert "of row 1234 >" in text


def test_a_row_that_is_coarse_in_the_recipe_too_may_be_a_quarter_more() -> None:
    exact = exact_TH()
    recipe = noisy(exact, NOISE, seed=2)
    cut_off = exact[7] * (1 + 20 * NOISE)
    recipe[7] = cut_off
    quantized = replace(PROBLEM, quant="fp8_w8a8_tensor:static=true")
    out = good(exact)
    out[7] = cut_off.bfloat16()
    assert compare(out, exact, recipe, quantized, recipe_error=1.0).ok
    assert "of row 7" in words(compare(out, exact, recipe, PROBLEM, recipe_error=1.0))
    out[7] = (exact[7] * (1 + 26 * NOISE)).bfloat16()
    assert "of row 7" in words(compare(out, exact, recipe, quantized, recipe_error=1.0))
    # Another row must not profit by it.
    out[7], out[9] = cut_off.bfloat16(), (exact[9] * (1 + 20 * NOISE)).bfloat16()
    assert "of row 9" in words(compare(out, exact, recipe, quantized, recipe_error=1.0))


def test_one_bad_value_fails_and_is_named() -> None:
    """A value of one row of 4096 missing: a row error that four times the median would hide."""
    problem = replace(PROBLEM, hidden=4096)
    exact = exact_TH(40, 4096)
    out = good(exact)
    out[7, 4095] -= float(exact.square().mean().sqrt()) * 0.4
    (text,) = judged(out, exact, problem).problems
    assert "row 7 column 4095" in text


def test_a_small_row_must_be_as_exact_as_a_large_one() -> None:
    exact = exact_TH()
    exact[5] *= 1e-3
    out = good(exact)
    assert judged(out, exact).ok
    out[5] = 0
    assert "row 5" in words(judged(out, exact))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nothing_but_finite_values_pass(value: float) -> None:
    exact = exact_TH()
    out = good(exact)
    out[3, 4] = value
    comparison = judged(out, exact)
    assert comparison.error == torch.inf
    assert words(comparison) == "1 values not finite, first at row 3 column 4"


def test_all_nan_in_oracle_and_output_fails() -> None:
    exact = torch.full((40, 96), torch.nan, dtype=torch.float64)
    assert not judged(exact.bfloat16(), exact).ok


def test_rows_that_are_zero_must_be_zero() -> None:
    exact = exact_TH()
    exact[[2, 9]] = 0
    out = good(exact)
    assert judged(out, exact).ok
    out[9, 0] = 1e-30
    assert "1 rows not zero though every pair is skipped: row 9" in words(judged(out, exact))


def test_rows_are_counted_among_all() -> None:
    """A row's number does not change where zero rows stand before it."""
    exact = exact_TH()
    exact[:7] = 0
    out = noisy(exact, NOISE / 2, seed=3)
    push(out[20], 0.012)
    assert any("of row 20 >" in problem for problem in judged(out.bfloat16(), exact).problems)
    push(out[30], 1.0)
    text = words(judged(out.bfloat16(), exact))
    assert "of row 30 >" in text
    assert "of row 30 column" in text


def test_all_rows_zero() -> None:
    exact = torch.zeros(40, 96, dtype=torch.float64)
    assert judged(exact.bfloat16(), exact).ok
    assert not judged(exact.bfloat16() + 1, exact).ok


@pytest.mark.parametrize("combine", list(Combine))
def test_no_tokens(combine: Combine) -> None:
    problem = replace(PROBLEM, tokens=0, combine=combine)
    exact = torch.zeros(problem.output_shape, dtype=torch.float64)
    assert judged(exact.bfloat16(), exact, problem).ok


def test_kept_top_k_is_judged_row_by_row() -> None:
    problem = replace(PROBLEM, combine=Combine.TOPK_WEIGHTED)
    exact = exact_TH(40, 2, 96)
    exact[3, 1] = 0
    out = good(exact)
    assert judged(out, exact, problem).ok
    assert not judged(out.flip(1), exact, problem).ok
    out[3, 1] = 1
    assert "row 7" in words(judged(out, exact, problem))


def test_wrong_shape_and_dtype_are_both_named() -> None:
    exact = exact_TH()
    text = words(judged(exact[:, :95].float(), exact))
    assert "shape is (40, 95), should be (40, 96)" in text
    assert "dtype is float32, should be bfloat16" in text


def test_wrong_number_of_tokens() -> None:
    exact = exact_TH()
    assert "shape" in words(judged(good(exact)[:39], exact))


def test_float32_has_a_floor_of_eps() -> None:
    """Where the recipe is luckily exact, an error of float32's own size still passes."""
    problem = replace(PROBLEM, dtype=torch.float32)
    exact = exact_TH()
    near = noisy(exact, 9e-7, seed=5).float()
    far = noisy(exact, 1e-5, seed=5).float()
    assert compare(near, exact, exact, problem).ok
    assert not compare(far, exact, exact, problem).ok


def test_the_bound_follows_the_recipe_alone() -> None:
    """An output that is bad everywhere does not raise its own bound."""
    exact = exact_TH()
    bounds = {judged(noisy(exact, size, seed=6).bfloat16(), exact).bound for size in (0, 0.1, 1)}
    assert len(bounds) == 1
