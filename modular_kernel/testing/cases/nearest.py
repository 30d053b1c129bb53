"""Find supported cases that are near a refused case, for parts with restricted shapes.

Cases are as small as unrestricted parts allow. The kernels of a vendor may support only a few
hidden sizes, only 16-bit dtypes, or only equal numbers of experts on all ranks. For such kernels,
only these properties of a case are changed.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from modular_kernel.compatibility.rules import RULES
from modular_kernel.compatibility.support import Verdict
from modular_kernel.spec.problem import Problem


class HasPlacement(Protocol):
    """A dataclass with a problem and the name of a placement, such as `ranks.Variant`."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def problem(self) -> Problem: ...

    @property
    def placement(self) -> str: ...


Value = TypeVar("Value")
VariantT = TypeVar("VariantT", bound=HasPlacement)

HIDDEN_SIZES = (64, 128, 256, 512, 1024, 2048, 2560, 4096, 5120, 6144, 7168, 8192)
INTERMEDIATE_SIZES = (128, 256, 512)
DTYPES = (torch.bfloat16, torch.float16)
# For each property, the compatibility rules that a change of the property can satisfy. Rules of a
# part itself, which are not in RULES, can be about anything. For these, other hidden sizes are
# tried, because most vendors' kernels restrict the hidden size.
RULES_BY_AXIS = {
    "hidden": {"hidden", "quant_block"},
    "intermediate": {"intermediate", "quant_block"},
    "dtype": {"dtype"},
    "placement": {"placement"},
}


def list_neighbors(variant: VariantT, verdict: Verdict, world_size: int) -> Iterator[VariantT]:
    """Yield variants with other values of the properties that `verdict` rejects.

    Small changes come first. Yields nothing if `verdict` also rejects a property that is not
    in RULES_BY_AXIS.
    """
    rules = {rejection.rule for rejection in verdict.rejections}
    part_rules = rules - set(RULES)
    if not rules - part_rules <= set().union(*RULES_BY_AXIS.values()):
        return
    problem = variant.problem
    changed_axes = {axis for axis, axis_rules in RULES_BY_AXIS.items() if rules & axis_rules}
    if part_rules:
        changed_axes.add("hidden")
    placements: list[tuple[str, int]] = [(variant.placement, problem.experts)]
    if "placement" in changed_axes:
        num_divisible_experts = -(-problem.experts // world_size) * world_size
        placements.append(("linear", num_divisible_experts))
    dtypes = _prepend_distinct(problem.dtype, DTYPES if "dtype" in changed_axes else ())
    intermediate = _prepend_distinct(
        problem.intermediate, INTERMEDIATE_SIZES if "intermediate" in changed_axes else ()
    )
    hidden = _prepend_distinct(problem.hidden, HIDDEN_SIZES if "hidden" in changed_axes else ())
    for (placement, experts), dtype, i, h in product(placements, dtypes, intermediate, hidden):
        neighbor = replace(problem, experts=experts, dtype=dtype, intermediate=i, hidden=h)
        if (neighbor, placement) != (problem, variant.placement):
            yield replace(variant, problem=neighbor, placement=placement)


def describe_changes(before: Problem, after: Problem) -> str:
    """Describe the changes between two problems, such as "hidden 48 -> 2048, experts 5 -> 6"."""
    names = ("hidden", "intermediate", "experts", "dtype")
    fields = [(n, getattr(before, n), getattr(after, n)) for n in names]
    changes = [f"{n} {old} -> {new}" for n, old, new in fields if old != new]
    if before.placement.slots != after.placement.slots and before.experts == after.experts:
        changes.append("placement -> linear")
    return ", ".join(changes)


def _prepend_distinct(value: Value, alternatives: tuple[Value, ...]) -> tuple[Value, ...]:
    return (value, *(alternative for alternative in alternatives if alternative != value))
