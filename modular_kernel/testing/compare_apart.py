"""The comparison where some tokens are huge or broken: they must not reach the others.

Ordinary tokens are compared among themselves by the rule of `compare`. Of the others, those whose
recipe is finite are compared among their like; where the recipe overflows, a value is right or not
finite; a NaN token's values are not finite. What becomes of an infinite token is left open, and of
a NaN token where activations are quantised: eight bits may have no NaN.
"""

from dataclasses import replace

import torch

from modular_kernel.testing.compare import VALUE_FACTOR, Comparison, compare
from modular_kernel.testing.inputs_hostile import apart
from modular_kernel.types import Problem


def compare_apart(
    out: torch.Tensor, exact: torch.Tensor, recipe: torch.Tensor, problem: Problem, values: str
) -> Comparison:
    """Judge `out` as `compare` does, tokens that `values` makes unlike the others by themselves."""
    groups = apart(values, len(exact))
    if out.shape != exact.shape or not bool((groups > 0).any()):
        return compare(out, exact, recipe, problem)
    groups = groups.to(out.device)
    ordinary = groups == 0
    result = compare(out[ordinary], exact[ordinary], recipe[ordinary], problem)
    typical = max(result.bound, float(torch.finfo(problem.dtype).eps))
    problems = [*result.problems]
    for group in range(1, int(groups.max()) + 1):
        tokens = groups == group
        if not _open(problem, values):
            found = _judged(out[tokens], exact[tokens], recipe[tokens], problem, typical)
            problems += [f"tokens of values={values}: {what}" for what in found]
    return replace(result, problems=tuple(problems))


def _open(problem: Problem, values: str) -> bool:
    """Whether such tokens may become anything, as long as they reach no other."""
    return values == "inf_token" or (values == "nan_token" and problem.scheme.quantises_activations)


def _judged(
    out: torch.Tensor,
    exact: torch.Tensor,
    recipe: torch.Tensor,
    problem: Problem,
    typical: float,
) -> tuple[str, ...]:
    """What is wrong with tokens of one kind. typical: the relative error of ordinary ones."""
    finite = recipe.isfinite().flatten(1).all(1)
    found = list(compare(out[finite], exact[finite], recipe[finite], problem).problems)
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
