"""Requirements of a part, derived from those of its counterpart for the other activation format."""

from dataclasses import replace

from modular_kernel.compatibility.support import ExpertsRequirements
from modular_kernel.spec.problem import ActivationFormat, Reduce


def batched_requirements(requires: ExpertsRequirements) -> ExpertsRequirements:
    """Return the requirements of a batched part, given those of its contiguous counterpart.

    Only the activation format, the reduction (delegated), `expert_map` and `chunking` (both off)
    differ.
    """
    return replace(
        requires,
        activation_format=ActivationFormat.BATCHED_EXPERTS,
        reduce=Reduce.DELEGATE,
        expert_map=False,
        chunking=False,
    )
