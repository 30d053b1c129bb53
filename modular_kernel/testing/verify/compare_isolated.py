"""The comparison where some tokens are huge or broken: they must not reach the others.

Ordinary tokens are compared among themselves by the rule of `compare`. Of the others, those whose
recipe is finite are compared among their like; where the recipe overflows, a value is right or not
finite; a NaN token's values are not finite. Left open is what becomes of an infinite token, and of
a large one where gates have a limit (then the sign of a gate is all that counts, and any rounding
may turn it).
"""

from dataclasses import dataclass, replace

import torch

from modular_kernel.spec.problem import Problem
from modular_kernel.testing.cases.hostile import apart
from modular_kernel.testing.verify.compare import FACTOR, VALUE_FACTOR, Comparison, compare


@dataclass(frozen=True)
class Fair:
    """What the recipe's own error may be where a call has few rows: that of the worst of several
    calls as small, of their worst row, and of their worst value beside its row's size."""

    fair: float = 0.0
    fair_row: float = 0.0
    fair_value: float = 0.0

    @classmethod
    def of(cls, exact: torch.Tensor, recipe: torch.Tensor, tokens: int) -> "Fair":
        """From many tokens' (T, H) or (T, K, H), in calls of `tokens`."""
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


NONE_FAIR = Fair()


def compare_apart(
    out: torch.Tensor,
    exact: torch.Tensor,
    recipe: torch.Tensor,
    problem: Problem,
    values: str,
    *,
    fair: Fair = NONE_FAIR,
) -> Comparison:
    """Judge `out` as `compare` does, tokens that `values` makes unlike the others by themselves."""
    groups = apart(values, len(exact))
    if out.shape != exact.shape or not bool((groups > 0).any()):
        return compare(out, exact, recipe, problem, **vars(fair))
    groups = groups.to(out.device)
    ordinary = groups == 0
    result = compare(out[ordinary], exact[ordinary], recipe[ordinary], problem, **vars(fair))
    # Where all tokens are apart, none of these calls has ordinary ones: `fair` is of such.
    typical = max(result.bound, FACTOR * fair.fair, float(torch.finfo(problem.dtype).eps))
    problems = [*result.problems]
    for group in range(1, int(groups.max()) + 1):
        tokens = groups == group
        if not _open(problem, values):
            given = out[tokens], exact[tokens], recipe[tokens], problem
            found = _judged(*given, fair, typical)
            problems += [f"tokens of values={values}: {what}" for what in found]
    return replace(result, problems=tuple(problems))


def _open(problem: Problem, values: str) -> bool:
    """Whether such tokens may become anything, as long as they reach no other."""
    if values == "nan_token":
        return False
    return values == "inf_token" or problem.act.limit is not None


def _judged(
    out: torch.Tensor,
    exact: torch.Tensor,
    recipe: torch.Tensor,
    problem: Problem,
    fair: Fair,
    typical: float,
) -> tuple[str, ...]:
    """Return what is wrong with tokens of one kind. typical: the relative error of ordinary
    ones.
    """
    finite = recipe.isfinite().flatten(1).all(1)
    given = out[finite], exact[finite], recipe[finite], problem
    found = list(compare(*given, **vars(fair)).problems)
    ours, need = out[~finite].double().flatten(0, -2), exact[~finite].flatten(0, -2)
    unit = need.square().mean(1, keepdim=True).sqrt()
    # NaN compares false: a finite value where the oracle has none is wrong.
    wrong = ours.isfinite() & ~((ours - need).abs() <= VALUE_FACTOR * typical * unit)
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        got, want = float(ours[row, column]), float(need[row, column])
        found.append(
            f"{int(wrong.sum())} values neither right nor not finite where the recipe overflows, "
            f"the first {got:.4g} instead of {want:.4g}"
        )
    return tuple(found)
