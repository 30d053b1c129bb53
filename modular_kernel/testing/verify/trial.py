"""Run one case on one machine, and cache the calls that its checks share."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from modular_kernel.catalog import check, load_catalog, make_kernel
from modular_kernel.kernel import FusedMoEModularKernel, Pending, Plan
from modular_kernel.replay.launch.runtime import record_races
from modular_kernel.spec.problem import Machine
from modular_kernel.testing.cases.case import Case
from modular_kernel.testing.cases.inputs import ORDINARY, fences_intact
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
    """Result of a call with `out=` or inplace.

    is_out: whether the call returned the given tensor. is_intact: whether the red zones around it
    are unchanged.
    """

    output: torch.Tensor
    is_out: bool
    is_intact: bool


@dataclass(frozen=True)
class FirstCallResult:
    """Result of the first call.

    invalid_ids: number of invalid ids that the kernel counted. races: races between programs of a
    launch, which only the interpreter detects; empty for compiled kernels.
    """

    output: torch.Tensor
    invalid_ids: int
    races: tuple[str, ...]


class Trial:
    """One case on one machine. Results are computed on demand and cached.

    The interpreter is slow, so checks share calls. There are three samples:

    - first: the inputs of the case. Run without a plan, in a plan, and interleaved with `other`.
    - second: the same number of tokens, other values. Run in the plan.
    - other: half the tokens (rounded up), other values, transposed weights. Run in the plan, after
      larger calls, and interleaved with `first`.
    """

    def __init__(self, case: Case, machine: Machine, build: Build = build_kernel) -> None:
        self.case, self.machine, self.build = case, machine, build
        device = torch.device(machine.device)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        tokens = case.problem.tokens
        half = (tokens + 1) // 2
        self.first = Sample(case, device, tokens=tokens, seed_offset=0)
        self.second = Sample(case, device, tokens=tokens, seed_offset=1)
        self.other = Sample(case, device, tokens=half, seed_offset=2, strided=True)

    @property
    def samples(self) -> tuple[Sample, ...]:
        return self.first, self.second, self.other

    @cached_property
    def is_deterministic(self) -> bool:
        """Whether both parts guarantee equal bits for equal inputs."""
        catalog, case = load_catalog(), self.case
        pf, ex = catalog.prepare_finalize(case.prepare_finalize), catalog.experts(case.experts)
        return pf.requires.deterministic and ex.requires.deterministic

    @cached_property
    def capturable(self) -> bool:
        """Whether calls of the case must support CUDA graphs on this machine."""
        case = self.case
        if self.machine.device != "cuda" or not case.problem.tokens:
            return False
        part = load_catalog().prepare_finalize(case.prepare_finalize)
        if not part.requires.captures(case.problem):
            return False
        graph = replace(case.problem, graph=True)
        return check(case.prepare_finalize, case.experts, graph, self.machine).ok

    def copy_first_sample(self) -> Sample:
        """Return a copy of the inputs of the first call, which the caller may overwrite."""
        case = self.case
        return Sample(case, self.first.device, tokens=case.problem.tokens, seed_offset=0)

    @property
    def expected_replays(self) -> tuple[tuple[Sample, torch.Tensor], ...]:
        """(sample, expected output) of each replay of a graph captured with `first`'s tokens."""
        return (self.second, self.planned_second), (self.first, self.eager_output)

    @cached_property
    def kernel(self) -> FusedMoEModularKernel:
        """The kernel of all calls without a plan; its buffers are poisoned with NaN."""
        return self.build(self.case, self.machine, True)

    @cached_property
    def first_call(self) -> FirstCallResult:
        """The result of the first call, which runs with race detection."""
        before = self.kernel.count_invalid_ids()
        with record_races() as races:
            output = call(self.kernel, self.first)
        return FirstCallResult(output, self.kernel.count_invalid_ids() - before, tuple(races))

    @property
    def eager_output(self) -> torch.Tensor:
        """The output of the first call."""
        return self.first_call.output

    @cached_property
    def plan(self) -> Plan:
        """The plan of all planned calls; its buffers are poisoned with NaN."""
        return self.build(self.case, self.machine, True).plan()

    @cached_property
    def planned_second(self) -> torch.Tensor:
        """The output of `second` in the plan's first call, with the maximum number of tokens."""
        return call(self.plan, self.second)

    @cached_property
    def planned(self) -> OutCallResult:
        """The result of `first` with `out=` or inplace, in a plan that has run `second` before."""
        _ = self.planned_second
        sample = self.first
        x_TH, inplace = sample.x_TH(), sample.problem.inplace
        target = x_TH if inplace else sample.empty_output()
        inputs = sample.inputs
        output = self.plan(x_TH, inputs.weights, inputs.routing, out=None if inplace else target)
        return OutCallResult(output.clone(), output is target, fences_intact(target))

    @cached_property
    def planned_other(self) -> torch.Tensor:
        """The output of `other`, which has fewer tokens, in a plan that has run larger calls."""
        _ = self.planned
        return call(self.plan, self.other)

    @cached_property
    def neighbor(self) -> tuple[FusedMoEModularKernel, Sample]:
        """A kernel of another problem and its inputs; twice as wide if the parts support it."""
        case, problem = self.case, self.case.problem
        tokens = problem.tokens // 2 + 3
        wider = replace(problem, tokens=tokens, intermediate=2 * problem.intermediate)
        if not check(case.prepare_finalize, case.experts, wider, self.machine).ok:
            wider = replace(problem, tokens=tokens)
        other = replace(case, problem=wider, variation=ORDINARY)
        sample = Sample(other, self.first.device, tokens=tokens, seed_offset=3)
        return self.build(other, self.machine, True), sample

    @cached_property
    def interleaved(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The outputs of `first` and `other`, started in this order and finished in reverse."""
        first, other = start(self.kernel, self.first), start(self.kernel, self.other)
        other_output = other.finish().clone()
        return first.finish().clone(), other_output


def call(kernel: FusedMoEModularKernel | Plan, sample: Sample) -> torch.Tensor:
    """Call with a sample. Returns a copy, because the next call may reuse the output's memory."""
    inputs = sample.inputs
    return kernel(sample.x_TH(), inputs.weights, inputs.routing).clone()


def start(kernel: FusedMoEModularKernel, sample: Sample) -> Pending:
    """Start a call with a sample without finishing it."""
    return kernel.start(sample.x_TH(), sample.inputs.weights, sample.inputs.routing)
