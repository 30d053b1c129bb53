"""Trial: one case on one machine, and the calls that its checks read."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from modular_kernel.catalog import check, load_catalog, make_kernel
from modular_kernel.kernel import FusedMoEModularKernel, Pending, Plan
from modular_kernel.replay.launch.runtime import watched_races
from modular_kernel.spec.problem import Machine
from modular_kernel.testing.cases.case import Case
from modular_kernel.testing.cases.inputs import ORDINARY, fences_intact
from modular_kernel.testing.verify.sample import Sample

Build = Callable[[Case, Machine, bool], FusedMoEModularKernel]  # (..., poison)


def build_kernel(case: Case, machine: Machine, poison: bool) -> FusedMoEModularKernel:
    """Return the kernel that a case names."""
    return make_kernel(
        case.prepare_finalize, case.experts, case.problem, machine=machine, poison=poison
    )


@dataclass(frozen=True)
class Into:
    """A call with `out=` (or inplace): its output, the same tensor or not, and its fences."""

    output: torch.Tensor
    same: bool
    intact: bool


@dataclass(frozen=True)
class First:
    """The first call. invalid_ids: how many the kernel counted in it. races: between programs of
    one launch; none are seen where kernels are compiled."""

    output: torch.Tensor
    invalid_ids: int
    races: tuple[str, ...]


class Trial:
    """One case on one machine. Results that several checks read are computed once, on demand.

    first: the case's inputs. second: as many tokens, other values. other: about half the tokens,
    other values, transposed weights. A call serves several promises, because the interpreter is
    slow: `first` is run eagerly, in a plan and in flight, the others twice and once.
    """

    def __init__(self, case: Case, machine: Machine, build: Build = build_kernel) -> None:
        self.case, self.machine, self.build = case, machine, build
        device = torch.device(machine.device)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        tokens = case.problem.tokens
        half = (tokens + 1) // 2
        self.first = Sample(case, device, tokens=tokens, salt=0)
        self.second = Sample(case, device, tokens=tokens, salt=1)
        self.other = Sample(case, device, tokens=half, salt=2, strided=True)

    @property
    def samples(self) -> tuple[Sample, ...]:
        return self.first, self.second, self.other

    @cached_property
    def deterministic(self) -> bool:
        """Whether both parts promise equal bits for equal inputs."""
        catalog, case = load_catalog(), self.case
        pf, ex = catalog.prepare_finalize(case.prepare_finalize), catalog.experts(case.experts)
        return pf.requires.deterministic and ex.requires.deterministic

    @cached_property
    def capturable(self) -> bool:
        """Whether the pairing must work inside a CUDA graph here."""
        case = self.case
        graph = replace(case.problem, graph=True)
        on_gpu = self.machine.device == "cuda" and case.problem.tokens > 0
        return on_gpu and check(case.prepare_finalize, case.experts, graph, self.machine).ok

    def first_again(self) -> Sample:
        """Return the first call's inputs, to be overwritten."""
        case = self.case
        return Sample(case, self.first.device, tokens=case.problem.tokens, salt=0)

    @property
    def replayed(self) -> tuple[tuple[Sample, torch.Tensor], ...]:
        """Calls of as many tokens as the first, with their outputs, to replay a graph on."""
        return (self.second, self.planned_second), (self.first, self.eager)

    @cached_property
    def kernel(self) -> FusedMoEModularKernel:
        """The poisoned kernel of all calls without a plan."""
        return self.build(self.case, self.machine, True)

    @cached_property
    def first_call(self) -> First:
        """The first call, watched."""
        before = self.kernel.count_invalid_ids()
        with watched_races() as races:
            output = call(self.kernel, self.first)
        return First(output, self.kernel.count_invalid_ids() - before, tuple(races))

    @property
    def eager(self) -> torch.Tensor:
        """The first call's output."""
        return self.first_call.output

    @cached_property
    def plan(self) -> Plan:
        """The poisoned plan of all planned calls."""
        return self.build(self.case, self.machine, True).plan()

    @cached_property
    def planned_second(self) -> torch.Tensor:
        """The plan's first call, as large as a call may be."""
        return call(self.plan, self.second)

    @cached_property
    def planned(self) -> Into:
        """The first call again, in a plan that served another one, with `out=` (or inplace)."""
        _ = self.planned_second
        sample = self.first
        x_TH, inplace = sample.x_TH(), sample.problem.inplace
        given = x_TH if inplace else sample.empty_output()
        i = sample.inputs
        got = self.plan(x_TH, i.weights, i.routing, out=None if inplace else given)
        return Into(got.clone(), got is given, fences_intact(given))

    @cached_property
    def planned_other(self) -> torch.Tensor:
        """Fewer tokens in a plan that served larger calls."""
        _ = self.planned
        return call(self.plan, self.other)

    @cached_property
    def neighbor(self) -> tuple[FusedMoEModularKernel, Sample]:
        """A kernel of another problem, if the parts take it, and a call of it."""
        case, problem = self.case, self.case.problem
        tokens = problem.tokens // 2 + 3
        wider = replace(problem, tokens=tokens, intermediate=2 * problem.intermediate)
        if not check(case.prepare_finalize, case.experts, wider, self.machine).ok:
            wider = replace(problem, tokens=tokens)
        other = replace(case, problem=wider, manner=ORDINARY)
        sample = Sample(other, self.first.device, tokens=tokens, salt=3)
        return self.build(other, self.machine, True), sample

    @cached_property
    def interleaved(self) -> tuple[torch.Tensor, torch.Tensor]:
        """First and other call, both in flight, the first finished last."""
        first, other = start(self.kernel, self.first), start(self.kernel, self.other)
        later = other.finish().clone()
        return first.finish().clone(), later


def call(kernel: FusedMoEModularKernel | Plan, sample: Sample) -> torch.Tensor:
    """Return the output of one call, copied out of memory that the next call may use."""
    i = sample.inputs
    return kernel(sample.x_TH(), i.weights, i.routing).clone()


def start(kernel: FusedMoEModularKernel, sample: Sample) -> Pending:
    """Return a call up to its dispatch."""
    return kernel.start(sample.x_TH(), sample.inputs.weights, sample.inputs.routing)
