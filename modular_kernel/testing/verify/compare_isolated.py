"""Compare calls in which some tokens are huge or not finite and must not affect the others.

- Ordinary tokens are compared by the rule of `compare`, without the others.
- Huge tokens with a finite recipe are compared by the same rule, within their group. Where the
  recipe overflows, a value must be correct or not finite. If the activation has a limit, they are
  not checked: the result then depends only on the sign of the gate, which any rounding may flip.
- The values of a NaN token must not be finite. Those of an infinite token are not checked.
"""

from dataclasses import dataclass, replace

import torch

from modular_kernel.spec.problem import Problem
from modular_kernel.testing.cases.hostile import token_groups
from modular_kernel.testing.verify.compare import (
    MAX_ERROR_RATIO,
    MAX_VALUE_ERROR_RATIO,
    Comparison,
    compare,
)


@dataclass(frozen=True)
class RecipeErrors:
    """Largest errors of the recipe over several calls with few tokens.

    recipe_error: of a call, relative. recipe_row_error: of a row, relative. recipe_value_error: of
    a value, relative to its row's root mean square.
    """

    recipe_error: float = 0.0
    recipe_row_error: float = 0.0
    recipe_value_error: float = 0.0

    @classmethod
    def measure(cls, exact: torch.Tensor, recipe: torch.Tensor, tokens: int) -> "RecipeErrors":
        """Measure the errors of many tokens, (T, H) or (T, K, H), split into calls of `tokens`."""
        worst = worst_row = worst_value = 0.0
        for start in range(0, len(exact), tokens):
            expected, actual = exact[start : start + tokens], recipe[start : start + tokens]
            if len(expected) == tokens and bool(expected.any()):
                worst = max(worst, float((actual - expected).norm() / expected.norm()))
                rows = expected.flatten(0, -2).norm(dim=1)
                errors = (actual - expected).flatten(0, -2).norm(dim=1)
                is_nonzero = rows > 0
                if bool(is_nonzero.any()):
                    worst_row = max(worst_row, float((errors / rows)[is_nonzero].amax()))
                    largest = (actual - expected).flatten(0, -2).abs().amax(1)
                    values = largest[is_nonzero] / rows[is_nonzero] * expected.shape[-1] ** 0.5
                    worst_value = max(worst_value, float(values.amax()))
        return cls(worst, worst_row, worst_value)


NO_RECIPE_ERRORS = RecipeErrors()


def compare_by_group(
    out: torch.Tensor,
    exact: torch.Tensor,
    recipe: torch.Tensor,
    problem: Problem,
    values: str,
    *,
    recipe_errors: RecipeErrors = NO_RECIPE_ERRORS,
) -> Comparison:
    """Compare `out` as `compare` does, but each group of `token_groups(values, ...)` separately."""
    groups = token_groups(values, len(exact))
    if out.shape != exact.shape or not bool((groups > 0).any()):
        return compare(out, exact, recipe, problem, **vars(recipe_errors))
    groups = groups.to(out.device)
    is_ordinary = groups == 0
    result = compare(
        out[is_ordinary], exact[is_ordinary], recipe[is_ordinary], problem, **vars(recipe_errors)
    )
    # `recipe_errors` is measured on ordinary tokens, so it also serves calls that have none.
    typical = max(
        result.bound,
        MAX_ERROR_RATIO * recipe_errors.recipe_error,
        float(torch.finfo(problem.dtype).eps),
    )
    problems = [*result.problems]
    for group in range(1, int(groups.max()) + 1):
        tokens = groups == group
        if not _is_unchecked(problem, values):
            args = out[tokens], exact[tokens], recipe[tokens], problem
            messages = _check_group(*args, recipe_errors, typical)
            problems += [f"tokens of values={values}: {message}" for message in messages]
    return replace(result, problems=tuple(problems))


def _is_unchecked(problem: Problem, values: str) -> bool:
    """Return whether the outputs of huge or infinite tokens are not checked."""
    if values == "nan_token":
        return False
    return values == "inf_token" or problem.act.limit is not None


def _check_group(
    out: torch.Tensor,
    exact: torch.Tensor,
    recipe: torch.Tensor,
    problem: Problem,
    recipe_errors: RecipeErrors,
    typical: float,
) -> tuple[str, ...]:
    """Return messages for the tokens of one group.

    typical: relative error of ordinary tokens.
    """
    is_finite = recipe.isfinite().flatten(1).all(1)
    args = out[is_finite], exact[is_finite], recipe[is_finite], problem
    messages = list(compare(*args, **vars(recipe_errors)).problems)
    output, expected = out[~is_finite].double().flatten(0, -2), exact[~is_finite].flatten(0, -2)
    token_rms = expected.square().mean(1, keepdim=True).sqrt()
    # If the oracle is NaN, the comparison is false, so a finite value is wrong.
    is_wrong = output.isfinite() & ~(
        (output - expected).abs() <= MAX_VALUE_ERROR_RATIO * typical * token_rms
    )
    if bool(is_wrong.any()):
        row, column = is_wrong.nonzero()[0].tolist()
        actual, expected_value = float(output[row, column]), float(expected[row, column])
        messages.append(
            f"{int(is_wrong.sum())} values are finite but wrong where the recipe overflows, "
            f"the first {actual:.4g} instead of {expected_value:.4g}"
        )
    return tuple(messages)
