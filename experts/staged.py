"""Assemble experts parts from registered stages, or from a registered fused operation.

    ToyExperts = make_experts("ToyExperts", "toy", "standard", dtypes=frozenset({torch.bfloat16}))
    FusedToyExperts = make_fused_experts("FusedToyExperts", "none", "toy")

The resulting classes are ordinary experts parts: they can be registered as entry points, checked,
tested, benchmarked and composed.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar

import torch

from modular_kernel.compatibility.support import ExpertsRequirements, Rejection
from modular_kernel.contracts import PermuteExpertsUnpermute, PickledByProblem, TopKWeightAndReduce
from modular_kernel.errors import ConfigurationError
from modular_kernel.replay import stages as stage_names
from modular_kernel.runner import (
    FORMATS,
    FusedFunction,
    RunnerCall,
    RunnerInput,
    RunnerOutput,
    Stages,
    check_stage_result,
    format_key,
    get_fused_op,
    get_stages,
    register_fused_part,
    register_part,
)
from modular_kernel.spec.problem import ActivationFormat, Combine, Machine, Problem, Reduce
from modular_kernel.tensors import (
    BatchedShape,
    Dispatched,
    DispatchShape,
    ExpertWeights,
    StandardShape,
)
from modular_kernel.utils.argument_checks import check_fields, expect
from modular_kernel.workspace import BufferSpec, Workspace, WorkspaceShapes
from topk_reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNaiveBatched,
    TopKWeightAndReduceNoOp,
    reducer_for,
)

_REDUCERS: Mapping[Reduce, type[TopKWeightAndReduce]] = {
    Reduce.NOOP: TopKWeightAndReduceNoOp,
    Reduce.CONTIGUOUS: TopKWeightAndReduceContiguous,
    Reduce.NAIVE_BATCHED: TopKWeightAndReduceNaiveBatched,
    Reduce.DELEGATE: TopKWeightAndReduceDelegate,
}
_REQUIREMENT_FIELDS = frozenset(field.name for field in fields(ExpertsRequirements)) - {
    "activation_format"
}


class AssembledExperts(PickledByProblem, PermuteExpertsUnpermute):
    """Experts that run the pre-permute, core and post-permute stages of one backend."""

    stages: ClassVar[Stages]

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._core = self.stages.core(problem)

    def workspace_shapes(self, shape: DispatchShape) -> WorkspaceShapes:
        """Return the buffers that the core declares, and an output shaped for `requires.reduce`."""
        problem = self.problem
        empty = BufferSpec((0,), problem.dtype)
        output = BufferSpec(_get_output_shape(shape, self.requires.reduce, problem), problem.dtype)
        return WorkspaceShapes(empty, empty, output, self._core.workspace_shapes(shape))

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return reducer_for(self.problem, _REDUCERS[self.requires.reduce]())

    def apply(
        self,
        tokens: Dispatched,
        *,
        weights: ExpertWeights,
        workspace: Workspace,
        output: torch.Tensor,
    ) -> None:
        state = self.stages.core.state()
        self.compute(RunnerCall(tokens, weights, self.problem, workspace, output, state))

    def compute(self, call: RunnerCall[Any]) -> None:
        """Run all stages, the last of which writes call.output.

        Raise ConfigurationError if a stage returns a type that does not belong to this backend.
        """
        stages = self.stages
        with stage_names.stage(stage_names.PERMUTE):
            runner_input = stages.pre(call)
        check_stage_result("pre-permute", runner_input, RunnerInput, stages)
        with stage_names.stage(_CORE_STAGE_NAME):
            result = self._core.run(runner_input, call)
        check_stage_result("core", result, RunnerOutput, stages)
        with stage_names.stage(stage_names.UNPERMUTE):
            stages.post(result, call)


_CORE_STAGE_NAME = stage_names.fuse(stage_names.GEMM1, stage_names.GEMM2)


class FusedExperts(AssembledExperts):
    """Experts that run one fused operation in place of the stages of the part `unfused`."""

    operation: ClassVar[FusedFunction]  # a staticmethod that takes only the call

    @classmethod
    def extra_rejections(cls, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
        """Return the rejections of `unfused`, which supports the same problems."""
        assert cls.unfused is not None
        return cls.unfused.extra_rejections(problem, machine)

    def compute(self, call: RunnerCall[Any]) -> None:
        with stage_names.stage(_FUSED_STAGE_NAME):
            type(self).operation(call)


_FUSED_STAGE_NAME = stage_names.fuse(
    stage_names.PERMUTE, stage_names.GEMM1, stage_names.GEMM2, stage_names.UNPERMUTE
)


def make_experts(
    name: str, backend: str, format: str, **requires: Any
) -> type[PermuteExpertsUnpermute]:
    """Return an experts part assembled from the stages of `backend` for tokens in `format`.

    name: the name of the class.
    backend: the name under which the stages are registered.
    format: the format of the dispatched tokens, a key of `runner.FORMATS`.
    requires: fields of ExpertsRequirements, except the activation format. `reduce` is the reduction
        that post-permute leaves to finalize. It defaults to NOOP for standard tokens, where
        post-permute writes weighted sums, and to DELEGATE for batched tokens, where it writes
        unweighted rows.

    The `__module__` of the class is the module of the core stage. To make instances picklable,
    assign the class to a variable called `name` in that module.

    Raise UnknownPartError if a stage is not registered, and ConfigurationError if `name` is not an
    identifier or `requires` has an unknown field.
    """
    stages = get_stages(backend, format)
    check_name(name)
    unknown_fields = sorted(requires.keys() - _REQUIREMENT_FIELDS)
    if unknown_fields:
        need = f"fields of ExpertsRequirements: {', '.join(sorted(_REQUIREMENT_FIELDS))}"
        raise ConfigurationError(f"requires of {name}", got=", ".join(unknown_fields), need=need)
    requirements = _make_requirements(name, FORMATS[format], requires)
    namespace = {"requires": requirements, "stages": stages, "__module__": stages.core.__module__}
    namespace["__doc__"] = f"Stages of backend {backend!r} for {format!r} tokens."
    part = type(name, (AssembledExperts,), namespace)
    register_part(part, stages)
    return part


def make_fused_experts(name: str, a2a_backend: str, backend: str) -> type[PermuteExpertsUnpermute]:
    """Return the experts part `name` that runs the fused function of (a2a_backend, backend).

    The part has the requirements of the staged part that the function replaces. Raise
    UnknownPartError if no fused operation is registered. Raise ConfigurationError if the registered
    operation is a part rather than a function, or if its staged part was not made by
    `make_experts`.
    """
    op = get_fused_op(a2a_backend, backend)
    check_name(name)
    subject = f"fused operation {format_key((a2a_backend, backend))}"
    if isinstance(op.implementation, type):
        raise ConfigurationError(
            subject, got=f"the part {op.implementation.__name__}", need="a function"
        )
    if not issubclass(op.unfused, AssembledExperts):
        need = "a staged part made by make_experts"
        raise ConfigurationError(subject, got=f"staged part {op.unfused.__name__}", need=need)
    namespace = {
        "requires": op.unfused.requires,
        "stages": op.unfused.stages,
        "operation": staticmethod(op.implementation),
        "unfused": op.unfused,
        "__module__": op.implementation.__module__,
        "__doc__": f"Fused operation equivalent to {op.unfused.__name__}.",
    }
    part = type(name, (FusedExperts,), namespace)
    register_fused_part(part, op)
    return part


def check_name(name: object) -> None:
    """Raise ConfigurationError unless `name` is a string that can name a class."""
    expect("name of a part", name, str)
    assert isinstance(name, str)
    if not name.isidentifier():
        raise ConfigurationError("name of a part", got=repr(name)[:80], need="an identifier")


def _make_requirements(
    name: str, activation_format: ActivationFormat, requires: Mapping[str, Any]
) -> ExpertsRequirements:
    is_batched = activation_format is ActivationFormat.BATCHED_EXPERTS
    default_reduce = Reduce.DELEGATE if is_batched else Reduce.NOOP
    requirements = ExpertsRequirements(
        **{"reduce": default_reduce, **requires, "activation_format": activation_format}
    )
    check_fields(requirements, f"{name}.requires.")
    standard_reduces = (Reduce.NOOP, Reduce.CONTIGUOUS, Reduce.DELEGATE)
    allowed_reduces = (Reduce.NAIVE_BATCHED, Reduce.DELEGATE) if is_batched else standard_reduces
    if requirements.reduce not in allowed_reduces:
        got, need = (
            requirements.reduce.value,
            " or ".join(reduce.value for reduce in allowed_reduces),
        )
        subject = f"{name}.requires.reduce for {activation_format.value} tokens"
        raise ConfigurationError(subject, got=got, need=need)
    return requirements


def _get_output_shape(shape: DispatchShape, reduce: Reduce, problem: Problem) -> tuple[int, ...]:
    if isinstance(shape, BatchedShape):
        return (shape.experts, shape.capacity, problem.hidden)
    assert isinstance(shape, StandardShape)
    if reduce is Reduce.NOOP and problem.combine is Combine.SUM:
        return (shape.tokens, problem.hidden)
    return (shape.tokens, shape.top_k, problem.hidden)
