"""What a pairing must do, one small function for each promise; each yields what it found wrong.

Numbers: right against the oracle, on three unlike calls. Promises: inputs stay as they are, `out`
is the tensor written, invalid ids are counted, programs do not race, equal calls give equal bits,
calls in flight and calls of a plan do not disturb each other, a plan can be captured and allocates
nothing.
Every kernel here is poisoned, so stale or unwritten memory is NaN and an overrun is an error.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from modular_kernel.catalog import check, load_catalog, make_kernel
from modular_kernel.kernel import FusedMoEModularKernel, Pending, Plan
from modular_kernel.ops.launch.runtime import watched_races
from modular_kernel.testing.cases.case import Case
from modular_kernel.testing.cases.inputs import (
    ORDINARY,
    fences_intact,
)
from modular_kernel.testing.verify.invariance import as_bytes, batch_invariant
from modular_kernel.testing.verify.sample import Sample
from modular_kernel.testing.verify.twins import one_rounding
from modular_kernel.types import Machine

Build = Callable[[Case, Machine, bool], FusedMoEModularKernel]  # (..., poison)
Findings = Iterator[str]
Check = Callable[["Trial"], Findings]


def build_kernel(case: Case, machine: Machine, poison: bool) -> FusedMoEModularKernel:
    """The kernel that a case names."""
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
        """The first call's inputs, to be overwritten."""
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
        before = self.kernel.invalid_ids
        with watched_races() as races:
            output = call(self.kernel, self.first)
        return First(output, self.kernel.invalid_ids - before, tuple(races))

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
    def neighbour(self) -> tuple[FusedMoEModularKernel, Sample]:
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
    """The output of one call, copied out of memory that the next call may use."""
    i = sample.inputs
    return kernel(sample.x_TH(), i.weights, i.routing).clone()


def start(kernel: FusedMoEModularKernel, sample: Sample) -> Pending:
    """A call up to its dispatch."""
    return kernel.start(sample.x_TH(), sample.inputs.weights, sample.inputs.routing)


def same(trial: Trial, sample: Sample, got: torch.Tensor, want: torch.Tensor) -> Findings:
    """Equal bits, where the pairing is deterministic; else both merely right."""
    if not trial.deterministic:
        yield from sample.compare(got).problems
    elif got.shape != want.shape:
        yield f"shape {tuple(got.shape)} is not {tuple(want.shape)}"
    else:
        differ = as_bytes(got) != as_bytes(want)
        if bool(differ.any()):
            row = int(differ.flatten(1).any(1).nonzero()[0])
            yield f"bits differ, first in row {row} of {len(differ)}"


def numeric(trial: Trial) -> Findings:
    """The first call is right."""
    yield from trial.first.compare(trial.eager).problems


def invalid_ids(trial: Trial) -> Findings:
    """Ids outside [-1, E) are counted, each once, and nothing else is."""
    counted = trial.first_call.invalid_ids
    if counted != trial.first.invalid_ids:
        yield f"counted {counted}, there are {trial.first.invalid_ids}"


def races(trial: Trial) -> Findings:
    """Interpreted: no program of a launch touches what another one writes, unless in order."""
    yield from trial.first_call.races


def numeric_planned(trial: Trial) -> Findings:
    """Other values in a plan: right too."""
    yield from trial.second.compare(trial.planned_second).problems


def plan_reused(trial: Trial) -> Findings:
    """A plan keeps nothing of its last call: it computes, bit for bit, what the kernel does."""
    yield from same(trial, trial.first, trial.planned.output, trial.eager)


def out_given(trial: Trial) -> Findings:
    """`out`, or x if inplace, is the tensor returned, and nothing around it was written."""
    if not trial.planned.same:
        yield "returned another tensor"
    if not trial.planned.intact:
        yield "memory around the output was written"


def interleaved(trial: Trial) -> Findings:
    """A call in flight is not disturbed by one that starts later and finishes first."""
    yield from same(trial, trial.first, trial.interleaved[0], trial.eager)


def by_turns(trial: Trial) -> Findings:
    """Kernels of two problems share nothing: each computes what it does alone."""
    if not trial.case.by_turns:
        return
    kernel, sample = trial.neighbour
    pending = start(trial.kernel, trial.first)
    got = call(kernel, sample)
    yield from same(trial, trial.first, pending.finish().clone(), trial.eager)
    yield from sample.compare(got).problems


def numeric_strided(trial: Trial) -> Findings:
    """Fewer tokens than the kernel was made for, transposed weights and spaced rows: right too."""
    yield from trial.other.compare(trial.interleaved[1]).problems


def plan_shrunk(trial: Trial) -> Findings:
    """A plan serves fewer tokens than it did before as the kernel does, bit for bit."""
    yield from same(trial, trial.other, trial.planned_other, trial.interleaved[1])


def inputs_unchanged(trial: Trial) -> Findings:
    """Every argument of all the calls before is as it was, bit for bit."""
    for sample in trial.samples:
        pristine = sample.pristine.tensors()
        for name, tensor in sample.inputs.tensors().items():
            if bool((_bits(tensor) != _bits(pristine[name])).any()):
                yield f"{name} was written"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # A copy: any stride is contiguous along an extent of 1, but bytes are seen where it is 1 alone.
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def graph_replay(trial: Trial) -> Findings:
    """On a GPU: a plan captured once, replayed on new values, equals a call on those values."""
    if not trial.capturable:
        return
    plan = trial.build(trial.case, trial.machine, False).plan()
    static = trial.first_again()
    i, x_TH = static.inputs, static.x_TH()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # compiles and loads whatever has to be
            plan(x_TH, i.weights, i.routing)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = plan(x_TH, i.weights, i.routing)
    for sample, want in trial.replayed:
        pristine = sample.pristine
        for old, new in zip(i.tensors().values(), pristine.tensors().values(), strict=True):
            old.copy_(new)
        x_TH.copy_(pristine.x_TH)
        graph.replay()
        yield from same(trial, sample, output.clone(), want)


def no_allocation(trial: Trial) -> Findings:
    """On a GPU: a call of a plan allocates nothing, unless a library receives its rows."""
    part = load_catalog().prepare_finalize(trial.case.prepare_finalize)
    if not trial.capturable or part.requires.received_by_library:
        return
    plan = trial.build(trial.case, trial.machine, False).plan()
    i, x_TH = trial.first.inputs, trial.first.x_TH()
    plan(x_TH, i.weights, i.routing)
    before = _allocations()
    plan(x_TH, i.weights, i.routing)
    count = _allocations() - before
    if count:
        yield f"{count} allocations"


def _allocations() -> int:
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


CHECKS: tuple[Check, ...] = (
    numeric,
    one_rounding,
    invalid_ids,
    races,
    numeric_planned,
    plan_reused,
    out_given,
    interleaved,
    by_turns,
    numeric_strided,
    plan_shrunk,
    graph_replay,
    no_allocation,
    batch_invariant,
    inputs_unchanged,
)
