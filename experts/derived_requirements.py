"""What some parts declare follows from what others do."""

from dataclasses import replace

from modular_kernel.compatibility.support import ExpertsRequirements
from modular_kernel.spec.problem import ActivationFormat, Reduce


def of_batched_rows(requires: ExpertsRequirements) -> ExpertsRequirements:
    """Return what a part requires for batched rows, from what it does for contiguous tokens."""
    return replace(
        requires,
        activation_format=ActivationFormat.BATCHED_EXPERTS,
        reduce=Reduce.DELEGATE,
        expert_map=False,
        chunking=False,
    )
