"""Comparison for inputs in which some tokens are huge or not finite and must not affect the others.

Ordinary tokens are compared among themselves by the rule of `compare`. Special tokens with a finite
recipe are compared within their group. Where the recipe overflows, a value must be correct or not
finite; the values of a NaN token must not be finite. Not checked: infinite tokens, and large tokens
where the activation has a limit (the result then depends only on the sign of the gate, which any
rounding may flip).
"""

from dataclasses import dataclass, replace

import torch

from modular_kernel.spec.problem import Problem
from modular_kernel.testing.cases.hostile import token_groups
from modular_kernel.testing.verify.compare import FACTOR, VALUE_FACTOR, Comparison, compare


@dataclass(frozen=True)
class RecipeErrors:
    """Error of the recipe on calls with few rows.

    fair: largest relative error of a call of that size. fair_row: largest relative error of a row.
    fair_value: largest error of a value relative to its row's root mean square.
    """

    fair: float = 0.0
    fair_row: float = 0.0
    fair_value: float = 0.0

    @classmethod
    def of(cls, exact: torch.Tensor, recipe: torch.Tensor, tokens: int) -> "RecipeErrors":
        """Measure the errors of many tokens, (T, H) or (T, K, H), in calls of `tokens`."""
        worst = worst_row = worst_value = 0.0
        for start in range(0, len(exact), tokens):
            want, got = exact[start : start + tokens], recipe[start : start + tokens]
            if len(want) == tokens and bool(want.any()):
                worst = max(worst, float((got - want).norm() / want.norm()))
                rows = want.flatten(0, -2).norm(dim=1)
                errors = (got - want).flatten(0, -2).norm(dim=1)
                live = rows > 0
                if bool(live.any()):
                    worst_row = max(worst_row, float((errors / rows)[live].amax()))
                    largest = (got - want).flatten(0, -2).abs().amax(1)
                    values = largest[live] / rows[live] * want.shape[-1] ** 0.5
                    worst_value = max(worst_value, float(values.amax()))
        return cls(worst, worst_row, worst_value)


NONE_FAIR = RecipeErrors()


def compare_by_group(
    out: torch.Tensor,
    exact: torch.Tensor,
    recipe: torch.Tensor,
    problem: Problem,
    values: str,
    *,
    fair: RecipeErrors = NONE_FAIR,
) -> Comparison:
    """Compare `out` as `compare` does, but special tokens of `values` by group."""
    groups = token_groups(values, len(exact))
    if out.shape != exact.shape or not bool((groups > 0).any()):
        return compare(out, exact, recipe, problem, **vars(fair))
    groups = groups.to(out.device)
    ordinary = groups == 0
    result = compare(out[ordinary], exact[ordinary], recipe[ordinary], problem, **vars(fair))
    # `fair` is measured on ordinary tokens, so it also serves calls that have none.
    typical = max(result.bound, FACTOR * fair.fair, float(torch.finfo(problem.dtype).eps))
    problems = [*result.problems]
    for group in range(1, int(groups.max()) + 1):
        tokens = groups == group
        if not _is_unconstrained(problem, values):
            args = out[tokens], exact[tokens], recipe[tokens], problem
            messages = _check_group(*args, fair, typical)
            problems += [f"tokens of values={values}: {what}" for what in messages]
    return replace(result, problems=tuple(problems))


def _is_unconstrained(problem: Problem, values: str) -> bool:
    """Return whether the outputs of such tokens are not checked."""
    if values == "nan_token":
        return False
    return values == "inf_token" or problem.act.limit is not None


def _check_group(
    out: torch.Tensor,
    exact: torch.Tensor,
    recipe: torch.Tensor,
    problem: Problem,
    fair: RecipeErrors,
    typical: float,
) -> tuple[str, ...]:
    """Return messages for the tokens of one group.

    typical: relative error of ordinary tokens.
    """
    finite = recipe.isfinite().flatten(1).all(1)
    args = out[finite], exact[finite], recipe[finite], problem
    messages = list(compare(*args, **vars(fair)).problems)
    output, need = out[~finite].double().flatten(0, -2), exact[~finite].flatten(0, -2)
    unit = need.square().mean(1, keepdim=True).sqrt()
    # NaN compares false: a finite value where the oracle has none is wrong.
    bad = output.isfinite() & ~((output - need).abs() <= VALUE_FACTOR * typical * unit)
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        got, want = float(output[row, column]), float(need[row, column])
        messages.append(
            f"{int(bad.sum())} values are finite but wrong where the recipe overflows, "
            f"the first {got:.4g} instead of {want:.4g}"
        )
    return tuple(messages)
