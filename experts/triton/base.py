"""TritonExpertsBase, the base class of TritonExperts and BatchedTritonExperts."""

from experts.triton.configs import select
from experts.triton.operands import SCHEMES, weight_rejections
from experts.triton.tuning.space import ConfigSpace
from modular_kernel.compatibility.support import ExpertsRequirements, Rejection
from modular_kernel.contracts import PermuteExpertsUnpermute, PickledByProblem
from modular_kernel.spec.problem import ActivationFormat, Machine, Problem, Reduce


class TritonExpertsBase(PickledByProblem, PermuteExpertsUnpermute):
    """Base class of the experts that run the Triton GEMMs.

    requires: the layers that the experts support, for contiguous tokens. A subclass for the batched
        format overrides it.
    """

    requires = ExpertsRequirements(
        activation_format=ActivationFormat.STANDARD,
        packages=("triton",),
        triton=True,
        min_arch=(8, 0),
        graph_capturable=True,
        batch_invariant=True,
        reduce=Reduce.NOOP,
        keep_topk=True,
        expert_map=True,
        chunking=True,
        tf32=True,
        schemes=SCHEMES,
        lora=True,
    )

    # Whether an override of launch configurations is active.
    is_overridden = staticmethod(select.is_context_active)

    @classmethod
    def tunable(cls, problem: Problem) -> ConfigSpace | None:
        return ConfigSpace.for_problem(problem, cls.__name__)

    @classmethod
    def extra_rejections(cls, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
        return weight_rejections(cls.__name__, problem, machine)
