"""Compare the outputs of calls with huge or non-finite tokens, which must not affect other tokens.

`assign_token_groups` divides the tokens of a call into groups: group 0 for ordinary tokens, and
further groups for tokens with extreme values. Each group is compared with the float64 reference
separately.

- Ordinary tokens are compared by the rule of `compare`.
- Huge tokens are compared by the same rule if their row in the rounded reference (plain torch with
  the roundings of the scheme) is finite. If the row overflows, each value must be correct or not
  finite.
- Huge tokens are not checked if the activation clamps its input to a limit. Their output then
  depends only on the sign of the gate, which any rounding may flip.
- The output of a NaN token must not be finite. The output of an infinite token is not checked.
"""

from dataclasses import dataclass, replace

import torch

from modular_kernel.spec.problem import Problem
from modular_kernel.testing.cases.value_kinds import assign_token_groups
from modular_kernel.testing.verify.compare import (
    MAX_ERROR_RATIO,
    MAX_VALUE_ERROR_RATIO,
    Comparison,
    compare,
)


@dataclass(frozen=True)
class RoundingErrors:
    """Largest errors of the rounded reference in several calls with few tokens.

    Attributes:
        rounding_error: largest relative error of a call.
        rounding_row_error: largest relative error of a row.
        rounding_value_error: largest error of a value, relative to the root mean square of its row.
    """

    rounding_error: float = 0.0
    rounding_row_error: float = 0.0
    rounding_value_error: float = 0.0

    @classmethod
    def measure(
        cls, exact: torch.Tensor, rounded_reference: torch.Tensor, tokens: int
    ) -> "RoundingErrors":
        """Measure the errors of many tokens, split into calls of `tokens` tokens.

        exact, rounded_reference: (T, H) or (T, K, H) float64.
        """
        worst = worst_row = worst_value = 0.0
        for start in range(0, len(exact), tokens):
            expected, actual = (
                exact[start : start + tokens],
                rounded_reference[start : start + tokens],
            )
            if len(expected) == tokens and bool(expected.any()):
                worst = max(worst, float((actual - expected).norm() / expected.norm()))
                row_norms = expected.flatten(0, -2).norm(dim=1)
                errors = (actual - expected).flatten(0, -2).norm(dim=1)
                is_nonzero = row_norms > 0
                if bool(is_nonzero.any()):
                    worst_row = max(worst_row, float((errors / row_norms)[is_nonzero].amax()))
                    max_errors = (actual - expected).flatten(0, -2).abs().amax(1)
                    value_errors = (
                        max_errors[is_nonzero] / row_norms[is_nonzero] * expected.shape[-1] ** 0.5
                    )
                    worst_value = max(worst_value, float(value_errors.amax()))
        return cls(worst, worst_row, worst_value)


NO_ROUNDING_ERRORS = RoundingErrors()


def compare_by_group(
    out: torch.Tensor,
    exact: torch.Tensor,
    rounded_reference: torch.Tensor,
    problem: Problem,
    values: str,
    *,
    rounding_errors: RoundingErrors = NO_ROUNDING_ERRORS,
) -> Comparison:
    """Compare `out` like `compare`, but each group of tokens separately.

    values: the kind of input values, which determines the groups (see `assign_token_groups`).
    """
    groups = assign_token_groups(values, len(exact))
    if out.shape != exact.shape or not bool((groups > 0).any()):
        return compare(out, exact, rounded_reference, problem, **vars(rounding_errors))
    groups = groups.to(out.device)
    is_ordinary = groups == 0
    result = compare(
        out[is_ordinary],
        exact[is_ordinary],
        rounded_reference[is_ordinary],
        problem,
        **vars(rounding_errors),
    )
    # `rounding_errors` is measured on ordinary tokens of other calls, so it also holds for calls
    # without ordinary tokens.
    typical_error = max(
        result.bound,
        MAX_ERROR_RATIO * rounding_errors.rounding_error,
        float(torch.finfo(problem.dtype).eps),
    )
    problems = [*result.problems]
    for group in range(1, int(groups.max()) + 1):
        tokens = groups == group
        if not _is_unchecked(problem, values):
            args = out[tokens], exact[tokens], rounded_reference[tokens], problem
            messages = _check_group(*args, rounding_errors, typical_error)
            problems += [f"tokens of values={values}: {message}" for message in messages]
    return replace(result, problems=tuple(problems))


def _is_unchecked(problem: Problem, values: str) -> bool:
    """Return whether the outputs of the huge or infinite tokens are not checked."""
    if values == "nan_token":
        return False
    return values == "inf_token" or problem.act.limit is not None


def _check_group(
    out: torch.Tensor,
    exact: torch.Tensor,
    rounded_reference: torch.Tensor,
    problem: Problem,
    rounding_errors: RoundingErrors,
    typical_error: float,
) -> tuple[str, ...]:
    """Return messages for the tokens of one group.

    typical_error: typical relative error of ordinary tokens.
    """
    is_finite = rounded_reference.isfinite().flatten(1).all(1)
    args = out[is_finite], exact[is_finite], rounded_reference[is_finite], problem
    messages = list(compare(*args, **vars(rounding_errors)).problems)
    output, expected = out[~is_finite].double().flatten(0, -2), exact[~is_finite].flatten(0, -2)
    token_rms = expected.square().mean(1, keepdim=True).sqrt()
    # If the float64 reference is NaN, the comparison is false, and a finite value counts as wrong.
    is_wrong = output.isfinite() & ~(
        (output - expected).abs() <= MAX_VALUE_ERROR_RATIO * typical_error * token_rms
    )
    if bool(is_wrong.any()):
        row, column = is_wrong.nonzero()[0].tolist()
        actual, expected_value = float(output[row, column]), float(expected[row, column])
        messages.append(
            f"{int(is_wrong.sum())} values are finite but wrong where the rounded reference "
            f"overflows, the first {actual:.4g} instead of {expected_value:.4g}"
        )
    return tuple(messages)
