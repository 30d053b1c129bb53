"""Compare the outputs of calls with a NaN in their arguments.

The NaN must reach every output value that depends on it, and no other. The rounded reference, which
computes the layer with plain torch operations, shows which values these are.
"""

from dataclasses import replace

import torch

from modular_kernel.spec.problem import Problem
from modular_kernel.testing.verify.compare import Comparison, compare
from modular_kernel.testing.verify.compare_isolated import NO_ROUNDING_ERRORS, RoundingErrors


def compare_with_nan(
    out: torch.Tensor,
    exact: torch.Tensor,
    rounded_reference: torch.Tensor,
    problem: Problem,
    *,
    rounding_errors: RoundingErrors = NO_ROUNDING_ERRORS,
) -> Comparison:
    """Check that `out` is NaN where the rounded reference is, and correct elsewhere.

    out, exact, rounded_reference: (T, H) or (T, K, H). The other arguments are as in `compare`.
    """
    if out.shape != exact.shape:
        return compare(out, exact, rounded_reference, problem, **vars(rounding_errors))
    is_nan_expected = rounded_reference.isnan()
    actual, expected, finite_rounded_reference = (
        torch.where(is_nan_expected, 0, values) for values in (out, exact, rounded_reference)
    )
    result = compare(actual, expected, finite_rounded_reference, problem, **vars(rounding_errors))
    return replace(result, problems=(*result.problems, *_find_lost_nan(out, is_nan_expected)))


def _find_lost_nan(out: torch.Tensor, is_expected: torch.Tensor) -> tuple[str, ...]:
    is_lost = (is_expected & ~out.isnan()).flatten(0, -2)
    if not bool(is_lost.any()):
        return ()
    rows, row = int(is_lost.any(1).sum()), int(is_lost.any(1).nonzero()[0])
    return (f"{int(is_lost.sum())} values in {rows} rows lost a NaN, the first in row {row}",)
