"""Run the calls of one test case on one machine, and cache the results that its checks share.

A plan is a kernel with preallocated buffers for a maximum number of tokens. A kernel with `poison`
fills its buffers with invalid values before each call, so that reads of unwritten memory change the
output. "Red zones" are fences: memory around a tensor in which writes are detected.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from modular_kernel.catalog import check, load_catalog, make_kernel
from modular_kernel.kernel import FusedMoEModularKernel, Pending, Plan
from modular_kernel.replay import stages
from modular_kernel.replay.launch.runtime import record_races
from modular_kernel.spec.problem import Machine
from modular_kernel.tensors import ExpertRows
from modular_kernel.testing.cases.case import Case
from modular_kernel.testing.cases.inputs import ORDINARY, fences_intact
from modular_kernel.testing.verify.lowered_limits import lower_limits
from modular_kernel.testing.verify.sample import Sample

# Makes the kernel of a case on a machine. The last argument is `poison` of `make_kernel`.
Build = Callable[[Case, Machine, bool], FusedMoEModularKernel]


def build_kernel(case: Case, machine: Machine, poison: bool) -> FusedMoEModularKernel:
    """Make the kernel of a case. Weights are prepared only if the case requests it."""
    return make_kernel(
        case.prepare_finalize,
        case.experts,
        case.problem,
        machine=machine,
        poison=poison,
        auto_prepare=False,
    )


@dataclass(frozen=True)
class OutCallResult:
    """Result of a call with `out=`, or of an inplace call.

    Attributes:
        output: a copy of the output.
        is_out: whether the call returned the given tensor.
        is_intact: whether the red zones around the given tensor are unchanged.
    """

    output: torch.Tensor
    is_out: bool
    is_intact: bool


@dataclass(frozen=True)
class FirstCallResult:
    """Result of the first call.

    Attributes:
        output: a copy of the output.
        invalid_ids: number of invalid ids that the kernel counted.
        races: messages about races between programs of a launch, which only the interpreter
            detects. Empty for compiled kernels.
        unchecked_rows: number of `ExpertRows` without the mark that a reducer need not check them.
        stages: the stages that profiles show, as in `modular_kernel.replay.stages`.
    """

    output: torch.Tensor
    invalid_ids: int
    races: tuple[str, ...]
    unchecked_rows: int
    stages: frozenset[str] = frozenset()


@contextmanager
def _record_rows() -> Iterator[list[ExpertRows]]:
    """Inside the block, record the `ExpertRows` that are made."""
    rows, init = list[ExpertRows](), ExpertRows.__init__

    def record(self: ExpertRows, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        rows.append(self)

    ExpertRows.__init__ = record  # type: ignore[method-assign]
    try:
        yield rows
    finally:
        ExpertRows.__init__ = init  # type: ignore[method-assign]


def _enter_stage(names: set[str], name: str) -> AbstractContextManager[None]:
    names.update(stages.split_stages(name))
    return nullcontext()


class Trial:
    """One case on one machine. Results are computed on demand and cached.

    The interpreter is slow, so checks share calls. The calls use three samples:

    - first: the inputs of the case. Called without a plan, in a plan, and interleaved with `other`.
    - second: different values for the same number of tokens. Called in the plan.
    - other: different values for half as many tokens (rounded up), with transposed weights. Called
      in the plan after larger calls, and interleaved with `first`. On a CPU, its calls lower
      limits.
    """

    def __init__(self, case: Case, machine: Machine, build: Build = build_kernel) -> None:
        self.case, self.machine, self.build = case, machine, build
        device = torch.device(machine.device)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        tokens = case.problem.tokens
        half_tokens = (tokens + 1) // 2
        self.first = Sample(case, device, tokens=tokens, seed_offset=0)
        self.second = Sample(case, device, tokens=tokens, seed_offset=1)
        self.other = Sample(case, device, tokens=half_tokens, seed_offset=2, strided=True)

    @property
    def samples(self) -> tuple[Sample, ...]:
        return self.first, self.second, self.other

    @cached_property
    def is_deterministic(self) -> bool:
        """Whether both parts guarantee bitwise equal outputs for equal inputs."""
        catalog, case = load_catalog(), self.case
        pf, ex = catalog.prepare_finalize(case.prepare_finalize), catalog.experts(case.experts)
        return pf.requires.deterministic and ex.requires.deterministic

    @cached_property
    def is_capturable(self) -> bool:
        """Whether a call of the case can be captured in a CUDA graph on this machine."""
        case = self.case
        if self.machine.device != "cuda" or not case.problem.tokens:
            return False
        part = load_catalog().prepare_finalize(case.prepare_finalize)
        if not part.requires.captures(case.problem):
            return False
        graph_problem = replace(case.problem, graph=True)
        return check(case.prepare_finalize, case.experts, graph_problem, self.machine).ok

    def copy_first_sample(self) -> Sample:
        """Return a copy of the `first` sample, whose inputs the caller may overwrite."""
        case = self.case
        return Sample(case, self.first.device, tokens=case.problem.tokens, seed_offset=0)

    @property
    def expected_replays(self) -> tuple[tuple[Sample, torch.Tensor], ...]:
        """(sample, expected output) of each replay of a graph that was captured on `first`."""
        return (self.second, self.planned_second), (self.first, self.eager_output)

    @cached_property
    def kernel(self) -> FusedMoEModularKernel:
        """The kernel of all calls without a plan."""
        return self.build(self.case, self.machine, True)

    @cached_property
    def first_call(self) -> FirstCallResult:
        """The result of the first call, which runs with race detection."""
        num_before = self.kernel.count_invalid_ids()
        stage_names = set[str]()
        watch_stages = stages.watch_stages(partial(_enter_stage, stage_names))
        with record_races() as races, _record_rows() as rows, watch_stages:
            output = call(self.kernel, self.first)
        invalid_ids = self.kernel.count_invalid_ids() - num_before
        unchecked_rows = sum(not row.checked for row in rows)
        return FirstCallResult(
            output, invalid_ids, tuple(races), unchecked_rows, frozenset(stage_names)
        )

    @property
    def eager_output(self) -> torch.Tensor:
        """The output of the first call."""
        return self.first_call.output

    @cached_property
    def plan(self) -> Plan:
        """The plan of all planned calls."""
        return self.build(self.case, self.machine, True).plan()

    @cached_property
    def planned_second(self) -> torch.Tensor:
        """The output of `second` in the plan's first call."""
        return call(self.plan, self.second)

    @cached_property
    def planned(self) -> OutCallResult:
        """The result of `first` in the plan after `second`, called with `out=` or inplace."""
        _ = self.planned_second
        sample = self.first
        x_TH, inplace = sample.x_TH(), sample.problem.inplace
        target = x_TH if inplace else sample.make_empty_output()
        inputs = sample.inputs
        output = self.plan(x_TH, inputs.weights, inputs.routing, out=None if inplace else target)
        return OutCallResult(output.clone(), output is target, fences_intact(target))

    @cached_property
    def planned_other(self) -> torch.Tensor:
        """The output of `other` in the plan after calls with more tokens."""
        _ = self.planned
        return call(self.plan, self.other)

    @cached_property
    def neighbor(self) -> tuple[FusedMoEModularKernel, Sample]:
        """A kernel for another problem, and a sample for it.

        The problem has another number of tokens and twice the intermediate size. If the parts do
        not support that size, only the number of tokens differs.
        """
        case, problem = self.case, self.case.problem
        tokens = problem.tokens // 2 + 3
        wider = replace(problem, tokens=tokens, intermediate=2 * problem.intermediate)
        if not check(case.prepare_finalize, case.experts, wider, self.machine).ok:
            wider = replace(problem, tokens=tokens)
        other_case = replace(case, problem=wider, variation=ORDINARY)
        sample = Sample(other_case, self.first.device, tokens=tokens, seed_offset=3)
        return self.build(other_case, self.machine, True), sample

    @cached_property
    def interleaved(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The outputs of `first` and `other`. `first` starts earlier and finishes later."""
        first_pending, other_pending = (
            start(self.kernel, self.first),
            start(self.kernel, self.other),
        )
        other_output = other_pending.finish().clone()
        return first_pending.finish().clone(), other_output


def call(kernel: FusedMoEModularKernel | Plan, sample: Sample) -> torch.Tensor:
    """Call the kernel on a sample; return a copy of the output.

    The next call may overwrite the output. On a CPU, calls with strided tensors lower limits, so
    that they take the branches of large calls. On a GPU, this would compile most kernels twice.
    """
    inputs = sample.inputs
    with lower_limits(enabled=sample.strided and sample.device.type == "cpu"):
        return kernel(sample.x_TH(), inputs.weights, inputs.routing).clone()


def start(kernel: FusedMoEModularKernel, sample: Sample) -> Pending:
    """Start a call on a sample without finishing it."""
    return kernel.start(sample.x_TH(), sample.inputs.weights, sample.inputs.routing)
