"""Derive the requirements of a batched part from those of its contiguous counterpart."""

from dataclasses import replace

from modular_kernel.compatibility.support import ExpertsRequirements
from modular_kernel.spec.problem import ActivationFormat, Reduce


def to_batched_requirements(requires: ExpertsRequirements) -> ExpertsRequirements:
    """Return `requires`, the requirements of a contiguous part, changed for the batched format.

    The activation format becomes BATCHED_EXPERTS and the reduction is delegated. `expert_map` and
    `chunking` are turned off.
    """
    return replace(
        requires,
        activation_format=ActivationFormat.BATCHED_EXPERTS,
        reduce=Reduce.DELEGATE,
        expert_map=False,
        chunking=False,
    )
