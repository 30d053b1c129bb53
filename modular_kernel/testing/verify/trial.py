"""`Trial`: one case on one machine, with the calls that its checks share."""

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

Build = Callable[[Case, Machine, bool], FusedMoEModularKernel]  # (..., poison)


def build_kernel(case: Case, machine: Machine, poison: bool) -> FusedMoEModularKernel:
    """Make the kernel of a case; weights are prepared only where a case asks for it."""
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
    """Result of a call with `out=` (or inplace).

    is_out: whether it returned the given tensor. is_intact: whether the memory around it is
    unchanged.
    """

    output: torch.Tensor
    is_out: bool
    is_intact: bool


@dataclass(frozen=True)
class FirstCallResult:
    """Result of the first call.

    invalid_ids: number of invalid ids that the kernel counted. races: between programs of one
    launch; always empty for compiled kernels.
    """

    output: torch.Tensor
    invalid_ids: int
    races: tuple[str, ...]


class Trial:
    """One case on one machine. Results that several checks use are computed once, on demand.

    first: the inputs of the case. second: as many tokens, other values. other: half the tokens,
    rounded up, other values, transposed weights. Checks share calls because the interpreter is
    slow: `first` runs eagerly, in a plan and in flight, `second` once and `other` twice.
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
    def deterministic(self) -> bool:
        """Whether both parts guarantee equal bits for equal inputs."""
        catalog, case = load_catalog(), self.case
        pf, ex = catalog.prepare_finalize(case.prepare_finalize), catalog.experts(case.experts)
        return pf.requires.deterministic and ex.requires.deterministic

    @cached_property
    def capturable(self) -> bool:
        """Whether the pairing must support CUDA graphs on this machine."""
        case = self.case
        graph = replace(case.problem, graph=True)
        on_gpu = self.machine.device == "cuda" and case.problem.tokens > 0
        return on_gpu and check(case.prepare_finalize, case.experts, graph, self.machine).ok

    def first_again(self) -> Sample:
        """Return new inputs of the first call, which may be overwritten."""
        case = self.case
        return Sample(case, self.first.device, tokens=case.problem.tokens, seed_offset=0)

    @property
    def replayed(self) -> tuple[tuple[Sample, torch.Tensor], ...]:
        """Calls with as many tokens as the first, with their outputs, for graph replay."""
        return (self.second, self.planned_second), (self.first, self.eager)

    @cached_property
    def kernel(self) -> FusedMoEModularKernel:
        """The poisoned kernel of all unplanned calls."""
        return self.build(self.case, self.machine, True)

    @cached_property
    def first_call(self) -> FirstCallResult:
        """The first call, with race detection."""
        before = self.kernel.count_invalid_ids()
        with record_races() as races:
            output = call(self.kernel, self.first)
        return FirstCallResult(output, self.kernel.count_invalid_ids() - before, tuple(races))

    @property
    def eager(self) -> torch.Tensor:
        """The output of the first call."""
        return self.first_call.output

    @cached_property
    def plan(self) -> Plan:
        """The poisoned plan of all planned calls."""
        return self.build(self.case, self.machine, True).plan()

    @cached_property
    def planned_second(self) -> torch.Tensor:
        """The output of the plan's first call, which has the maximum number of tokens."""
        return call(self.plan, self.second)

    @cached_property
    def planned(self) -> OutCallResult:
        """The first call again, with `out=` (or inplace), in a plan that ran another before."""
        _ = self.planned_second
        sample = self.first
        x_TH, inplace = sample.x_TH(), sample.problem.inplace
        target = x_TH if inplace else sample.empty_output()
        i = sample.inputs
        output = self.plan(x_TH, i.weights, i.routing, out=None if inplace else target)
        return OutCallResult(output.clone(), output is target, fences_intact(target))

    @cached_property
    def planned_other(self) -> torch.Tensor:
        """The output of a call with fewer tokens in a plan that ran larger calls before."""
        _ = self.planned
        return call(self.plan, self.other)

    @cached_property
    def neighbor(self) -> tuple[FusedMoEModularKernel, Sample]:
        """A kernel and a call of another problem: twice as wide if the parts support it."""
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
        """The outputs of the first and the other call; both in flight, the first finished last."""
        first, other = start(self.kernel, self.first), start(self.kernel, self.other)
        other_output = other.finish().clone()
        return first.finish().clone(), other_output


def call(kernel: FusedMoEModularKernel | Plan, sample: Sample) -> torch.Tensor:
    """Call on a sample; return a copy of the output, whose memory the next call may reuse."""
    i = sample.inputs
    return kernel(sample.x_TH(), i.weights, i.routing).clone()


def start(kernel: FusedMoEModularKernel, sample: Sample) -> Pending:
    """Start a call on a sample and leave it in flight."""
    return kernel.start(sample.x_TH(), sample.inputs.weights, sample.inputs.routing)
