"""The tolerance, which is a rule and not a number.

A part may be as inexact as plain torch that runs the same declared recipe in the same dtype, and
a quarter more. Both errors are measured against the float64 oracle, on the case at hand.
"""

import math
from dataclasses import dataclass

import torch

from modular_kernel.spec.problem import Combine, Problem, dtype_name

# Rounding differs from one order of summation to the next, the recipe's own included: a quarter
# more of its root mean square covers that, and no defect is that small.
FACTOR = 1.25
# A row, or a value, that stands out from the typical one of its kind is a defect in one place
# (a tail, one expert, one token) that an average over all rows would hide.
ROW_FACTOR = 4.0
VALUE_FACTOR = 12.0
# Where the recipe is float32 its error is the order of its sums alone, and torch's may be luckier
# than ours: u = 6e-8 for each of some sqrt(fan-in), on two products, stays below 1e-6 for the
# shapes of a case. The nearest defect, gelu's tanh approximation, is 2e-4 away.
EPS = 1e-6


@dataclass(frozen=True)
class Comparison:
    """How far an output is from the oracle, and how far it may be; all relative.

    error: root mean square over everything. worst_row: the error, relative to that row, of the one
    row that comes nearest to its bound, or past it. worst_value: the largest error of one value,
    relative to its row's root mean square.
    problems: what is wrong in words; empty if all is well.
    """

    error: float
    bound: float
    worst_row: float = 0.0
    row_bound: float = 0.0
    worst_value: float = 0.0
    value_bound: float = 0.0
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems


def compare(
    out: torch.Tensor,
    exact: torch.Tensor,
    recipe: torch.Tensor,
    problem: Problem,
    *,
    fair: float = 0.0,
    fair_row: float = 0.0,
    fair_value: float = 0.0,
) -> Comparison:
    """Judge `out`, (T, H) or (T, K, H), by the float64 tensors `exact` and `recipe`.

    Rows that are zero in `exact` (every pair skipped) must be zero bit for bit, but for the sign.
    fair: the recipe's relative error over more tokens of the same layer, where `out` is of a few;
    the larger one counts. fair_row, fair_value: of its worst row and value among those, for
    quantized problems.
    """
    wrong = _wrong_kind(out, exact, problem)
    if wrong:
        return Comparison(math.inf, 0.0, problems=wrong)
    ours = out.double().flatten(0, -2)
    exact, recipe = exact.double().flatten(0, -2), recipe.double().flatten(0, -2)
    zero = (exact == 0).all(1)
    problems = _wrong_values(ours, zero)
    if problems:
        return Comparison(math.inf, 0.0, problems=problems)
    live = ~zero
    if not bool(live.any()):
        return Comparison(0.0, EPS)
    index = live.nonzero().flatten()
    least = fair_row if problem.scheme.quantized else None
    given = ours[live], exact[live], recipe[live], index
    return _compare_rows(*given, fair, least, fair_value)


def _wrong_kind(out: torch.Tensor, exact: torch.Tensor, problem: Problem) -> tuple[str, ...]:
    """Return what no number can make up for: shape and dtype."""
    tokens = out.shape[0] if out.dim() else 0
    middle = () if problem.combine is Combine.SUM else (problem.top_k,)
    need = (tokens, *middle, problem.hidden)
    problems = []
    if tuple(out.shape) != need or out.shape != exact.shape:
        got, want = tuple(out.shape), tuple(exact.shape)
        problems.append(f"shape is {got}, should be {want}")
    if out.dtype != problem.dtype:
        names = dtype_name(out.dtype), dtype_name(problem.dtype)
        problems.append(f"dtype is {names[0]}, should be {names[1]}")
    return tuple(problems)


def _wrong_values(ours: torch.Tensor, zero: torch.Tensor) -> tuple[str, ...]:
    problems = []
    bad = ~ours.isfinite()
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        problems.append(f"{int(bad.sum())} values not finite, first at row {row} column {column}")
    full = (ours[zero] != 0).any(1)
    if bool(full.any()):
        row = int(zero.nonzero()[full][0])
        problems.append(f"{int(full.sum())} rows not zero though every pair is skipped: row {row}")
    return tuple(problems)


def _compare_rows(
    ours: torch.Tensor,
    exact: torch.Tensor,
    recipe: torch.Tensor,
    index: torch.Tensor,
    fair_of_more: float,
    fair_row: float | None,
    fair_value: float,
) -> Comparison:
    """Rows that are nowhere all zero; `index` is where each stood. fair_row: None unless quantized.

    One large activation makes the steps of its whole group coarse, and one beyond a static scale
    is cut off, in the recipe as in a part: where activations or weights are quantized, a row may be
    a quarter farther off than the recipe's own, and a value twice as far as the recipe's worst one.
    """
    size = exact.norm()
    error = float((ours - exact).norm() / size)
    fair = max(fair_of_more, float((recipe - exact).norm() / size))
    row_size = exact.norm(dim=1)
    rows, fair_rows = (ours - exact).norm(dim=1) / row_size, (recipe - exact).norm(dim=1) / row_size
    typical = float(torch.maximum(rows.median(), fair_rows.median()))
    unit = row_size / exact.shape[1] ** 0.5
    values, fair_values = ((x - exact).abs().amax(1) / unit for x in (ours, recipe))
    bound = FACTOR * fair + EPS
    row_bounds = torch.full_like(rows, ROW_FACTOR * (typical + EPS))
    value_bound = VALUE_FACTOR * (typical + EPS)
    if fair_row is not None:
        row_bounds = torch.maximum(row_bounds, FACTOR * fair_rows.clamp(min=fair_row))
        value_bound = max(value_bound, 2 * max(fair_value, float(fair_values.max())))
    worst = int((rows / row_bounds).argmax())
    worst_row, row_bound, worst_value = (
        float(rows[worst]),
        float(row_bounds[worst]),
        float(values.max()),
    )
    problems = []
    if not error <= bound:
        problems.append(f"relative RMS error {error:.2e} > {bound:.2e}")
    if not worst_row <= row_bound:
        problems.append(f"error {worst_row:.2e} of row {int(index[worst])} > {row_bound:.2e}")
    if not worst_value <= value_bound:
        row = int(index[values.argmax()])
        column = int((ours - exact)[values.argmax()].abs().argmax())
        problems.append(f"error {worst_value:.2e} of row {row} column {column} > {value_bound:.2e}")
    return Comparison(error, bound, worst_row, row_bound, worst_value, value_bound, tuple(problems))
