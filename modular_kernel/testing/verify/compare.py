"""Compare an output with the float64 reference, with a tolerance derived from the case.

Two references, both in `modular_kernel.reference`, determine whether an output is correct. The
*float64 reference* computes the layer without rounding. The *rounded reference* computes it with
plain torch operations in the problem's dtype, and quantizes activations where the scheme does. The
error of the output, measured against the float64 reference, may be up to 1.25 times the error of
the rounded reference on the same inputs. `Sample.compare` calls this module, or `compare_isolated`
and `compare_nan` for inputs with huge or NaN values.
"""

import math
from dataclasses import dataclass

import torch

from modular_kernel.spec.problem import Combine, Problem, dtype_name

# Allowed RMS error, relative to the rounded reference's. Rounding errors depend on the order of
# summation, both in the rounded reference and in a part. A quarter more covers this difference, and
# every defect causes a larger error.
MAX_ERROR_RATIO = 1.25
# Allowed error of a row and of a value, relative to the median row. A defect in one place (a tail,
# one expert, one token) affects few rows or values, and an average over all rows would hide it.
MAX_ROW_ERROR_RATIO = 4.0
MAX_VALUE_ERROR_RATIO = 12.0
# Added to each bound. In float32, the error of the rounded reference comes from the order of sums
# alone, and may be small by chance. The unit roundoff of 6e-8 times sqrt(fan-in) stays below 1e-6
# after two GEMMs, for the shapes of the cases. The smallest defect to detect, gelu's tanh
# approximation instead of erf, causes an error of 2e-4.
FLOAT32_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Comparison:
    """Errors of an output relative to the float64 reference, and their bounds.

    Attributes:
        error: norm of the error of all values, relative to the norm of the output.
        bound: maximum allowed `error`.
        worst_row: error of the row with the largest ratio of error to bound, relative to the norm
            of that row.
        row_bound: maximum allowed `worst_row`.
        worst_value: largest error of one value, relative to the root mean square of its row.
        value_bound: maximum allowed `worst_value`.
        problems: messages; empty if the output is correct.
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
    rounded_reference: torch.Tensor,
    problem: Problem,
    *,
    rounding_error: float = 0.0,
    rounding_row_error: float = 0.0,
    rounding_value_error: float = 0.0,
) -> Comparison:
    """Compare `out`, (T, H) or (T, K, H), with the float64 tensors `exact` and `rounded_reference`.

    Rows that are zero in `exact`, because all of their pairs are skipped, must be exactly zero, of
    either sign.

    rounding_error: lower bound of the rounded reference's relative error. For outputs with few
        tokens, pass the error of the rounded reference on more tokens of the same layer.
    rounding_row_error: lower bound of the rounded reference's error of the worst row; used only for
        quantized problems.
    rounding_value_error: lower bound of the rounded reference's error of the worst value; used only
        for quantized problems.
    """
    mismatches = _check_shape(out, exact, problem)
    if mismatches:
        return Comparison(math.inf, 0.0, problems=mismatches)
    output = out.double().flatten(0, -2)
    exact, rounded_reference = (
        exact.double().flatten(0, -2),
        rounded_reference.double().flatten(0, -2),
    )
    is_zero = (exact == 0).all(1)
    problems = _check_finite_and_zero(output, is_zero)
    if problems:
        return Comparison(math.inf, 0.0, problems=problems)
    is_nonzero = ~is_zero
    if not bool(is_nonzero.any()):
        return Comparison(0.0, FLOAT32_TOLERANCE)
    index = is_nonzero.nonzero().flatten()
    min_row_error = rounding_row_error if problem.scheme.quantized else None
    args = output[is_nonzero], exact[is_nonzero], rounded_reference[is_nonzero], index
    return _compare_rows(*args, rounding_error, min_row_error, rounding_value_error)


def _check_shape(out: torch.Tensor, exact: torch.Tensor, problem: Problem) -> tuple[str, ...]:
    tokens = out.shape[0] if out.dim() else 0
    pair_dims = () if problem.combine is Combine.SUM else (problem.top_k,)
    need = (tokens, *pair_dims, problem.hidden)
    problems = []
    if tuple(out.shape) != need or out.shape != exact.shape:
        problems.append(f"shape is {tuple(out.shape)}, should be {tuple(exact.shape)}")
    if out.dtype != problem.dtype:
        names = dtype_name(out.dtype), dtype_name(problem.dtype)
        problems.append(f"dtype is {names[0]}, should be {names[1]}")
    return tuple(problems)


def _check_finite_and_zero(output: torch.Tensor, is_zero: torch.Tensor) -> tuple[str, ...]:
    """Return messages for values that are not finite, and for rows that should be zero.

    is_zero: (rows,) bool, the rows that should be zero.
    """
    problems = []
    is_invalid = ~output.isfinite()
    if bool(is_invalid.any()):
        row, column = is_invalid.nonzero()[0].tolist()
        problems.append(
            f"{int(is_invalid.sum())} values are not finite, the first at row {row} column {column}"
        )
    is_nonzero = (output[is_zero] != 0).any(1)
    if bool(is_nonzero.any()):
        row = int(is_zero.nonzero()[is_nonzero][0])
        problems.append(
            f"{int(is_nonzero.sum())} rows are not zero although all of their pairs are skipped, "
            f"the first is row {row}"
        )
    return tuple(problems)


def _compare_rows(
    output: torch.Tensor,
    exact: torch.Tensor,
    rounded_reference: torch.Tensor,
    index: torch.Tensor,
    min_rounding_error: float,
    min_row_error: float | None,
    min_value_error: float,
) -> Comparison:
    """Compare the rows that are not zero.

    index: indices of these rows in the output.
    min_rounding_error, min_row_error, min_value_error: lower bounds of the rounded reference's
        errors, as in `compare`. min_row_error is None unless the problem is quantized.

    One large activation makes the quantization step of its whole group coarse, and a value beyond
    the range of a static scale is clipped, both in the rounded reference and in a part. Therefore,
    in quantized problems, the error of a row may also be up to 1.25 times the rounded reference's
    error in that row, and the error of a value up to twice the rounded reference's largest error of
    a value.
    """
    exact_norm = exact.norm()
    error = float((output - exact).norm() / exact_norm)
    rounding_error = max(min_rounding_error, float((rounded_reference - exact).norm() / exact_norm))
    row_norms = exact.norm(dim=1)
    row_errors, rounding_row_errors = (
        (x - exact).norm(dim=1) / row_norms for x in (output, rounded_reference)
    )
    median_row_error = float(torch.maximum(row_errors.median(), rounding_row_errors.median()))
    row_rms = row_norms / exact.shape[1] ** 0.5
    value_errors, rounding_value_errors = (
        (x - exact).abs().amax(1) / row_rms for x in (output, rounded_reference)
    )
    bound = MAX_ERROR_RATIO * rounding_error + FLOAT32_TOLERANCE
    row_bounds = torch.full_like(
        row_errors, MAX_ROW_ERROR_RATIO * (median_row_error + FLOAT32_TOLERANCE)
    )
    value_bound = MAX_VALUE_ERROR_RATIO * (median_row_error + FLOAT32_TOLERANCE)
    if min_row_error is not None:
        row_bounds = torch.maximum(
            row_bounds, MAX_ERROR_RATIO * rounding_row_errors.clamp(min=min_row_error)
        )
        value_bound = max(value_bound, 2 * max(min_value_error, float(rounding_value_errors.max())))
    worst_index = int((row_errors / row_bounds).argmax())
    worst_row, row_bound = float(row_errors[worst_index]), float(row_bounds[worst_index])
    worst_value = float(value_errors.max())
    problems = []
    if not error <= bound:
        problems.append(f"relative RMS error {error:.2e} > {bound:.2e}")
    if not worst_row <= row_bound:
        problems.append(f"error {worst_row:.2e} of row {int(index[worst_index])} > {row_bound:.2e}")
    if not worst_value <= value_bound:
        row = int(index[value_errors.argmax()])
        column = int((output - exact)[value_errors.argmax()].abs().argmax())
        problems.append(f"error {worst_value:.2e} of row {row} column {column} > {value_bound:.2e}")
    return Comparison(error, bound, worst_row, row_bound, worst_value, value_bound, tuple(problems))
