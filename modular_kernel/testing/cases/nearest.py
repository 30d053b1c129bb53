"""Shapes for parts that take only some: the nearest case to a refused one that the rules allow.

Cases are as small as the parts without constraints allow. A vendor's kernels may know a few hidden
sizes, 16-bit types or blocks of experts alone; their cases get those, and only those changes.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from modular_kernel.compatibility.rules import RULES
from modular_kernel.compatibility.support import Verdict
from modular_kernel.spec.problem import Problem


class Placed(Protocol):
    """A dataclass with a problem and the name of a placement: what a case over ranks is made of."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def problem(self) -> Problem: ...

    @property
    def placement(self) -> str: ...


V = TypeVar("V")
Case = TypeVar("Case", bound=Placed)

HIDDEN = (64, 128, 256, 512, 1024, 2048, 2560, 4096, 5120, 6144, 7168, 8192)
INTERMEDIATE = (128, 256, 512)
DTYPES = (torch.bfloat16, torch.float16)
# What another value of an axis can mend. A rule of a part's own, which RULES does not list, can
# speak of anything: the hidden size is what most vendors' kernels are made for.
AXES = {
    "hidden": {"hidden", "quant_block"},
    "intermediate": {"intermediate", "quant_block"},
    "dtype": {"dtype"},
    "placement": {"placement"},
}


def neighbors(variant: Case, verdict: Verdict, world_size: int) -> Iterator[Case]:
    """Variants that differ where `verdict` objects, small changes first; none if it objects to
    anything that is no matter of shape."""
    rules = {rejection.rule for rejection in verdict.rejections}
    own = rules - set(RULES)
    if not rules - own <= set().union(*AXES.values()):
        return
    problem, moved = variant.problem, {axis for axis, mends in AXES.items() if rules & mends}
    if own:
        moved.add("hidden")
    placed: list[tuple[str, int]] = [(variant.placement, problem.experts)]
    if "placement" in moved:
        even = -(-problem.experts // world_size) * world_size
        placed.append(("linear", even))
    dtypes = _first(problem.dtype, DTYPES if "dtype" in moved else ())
    inner = _first(problem.intermediate, INTERMEDIATE if "intermediate" in moved else ())
    hidden = _first(problem.hidden, HIDDEN if "hidden" in moved else ())
    for (placement, experts), dtype, i, h in product(placed, dtypes, inner, hidden):
        changed = replace(problem, experts=experts, dtype=dtype, intermediate=i, hidden=h)
        if (changed, placement) != (problem, variant.placement):
            yield replace(variant, problem=changed, placement=placement)


def difference(before: Problem, after: Problem) -> str:
    """Return what of the layer a fitted case changed: "hidden 48 -> 2048, experts 5 -> 6"."""
    names = ("hidden", "intermediate", "experts", "dtype")
    changed = [(n, getattr(before, n), getattr(after, n)) for n in names]
    shown = [f"{n} {old} -> {new}" for n, old, new in changed if old != new]
    if before.placement.slots != after.placement.slots and before.experts == after.experts:
        shown.append("placement -> linear")
    return ", ".join(shown)


def _first(value: V, others: tuple[V, ...]) -> tuple[V, ...]:
    return (value, *(other for other in others if other != value))
