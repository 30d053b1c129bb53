"""What a pairing must do, one small function for each promise; each yields what it found wrong.

Numbers: right against the oracle, on three unlike calls. Promises: inputs stay as they are, `out`
is the tensor written, invalid ids are counted, programs do not race, equal calls give equal bits,
calls in flight and calls of a plan do not disturb each other, a plan can be captured and allocates
nothing.
Every kernel here is poisoned: from call to call unwritten memory holds NaN and a huge integer, or
large finite values and ids of real but wrong experts, slots and rows. An overrun is an error.
"""

from collections.abc import Callable, Iterator

import torch

from modular_kernel.catalog import load_catalog, make_kernel
from modular_kernel.testing.cases.hostile import apart
from modular_kernel.testing.verify.bitwise_reference import one_rounding
from modular_kernel.testing.verify.invariance import as_bytes, batch_invariant
from modular_kernel.testing.verify.prepared import prepared_weights
from modular_kernel.testing.verify.sample import Sample
from modular_kernel.testing.verify.trial import Trial, call, start
from modular_kernel.testing.verify.without_adapters import adapters_by_turns, without_adapters

Findings = Iterator[str]
Check = Callable[[Trial], Findings]


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
    """Check that the first call is right."""
    yield from trial.first.compare(trial.eager).problems


def invalid_ids(trial: Trial) -> Findings:
    """Ids outside [-1, E) are counted, each once, and nothing else is."""
    counted = trial.first_call.invalid_ids
    if counted != trial.first.invalid_ids:
        yield f"counted {counted}, there are {trial.first.invalid_ids}"


def races(trial: Trial) -> Findings:
    """Interpreted: no program of a launch touches what another one writes, unless in order."""
    yield from trial.first_call.races


def staged_twin(trial: Trial) -> Findings:
    """Compare a fused part with the stages that it replaces, as far as roundings let two be.

    Both may be as far from the oracle as `numeric` allows, so two right ones are not farther from
    each other than two independent errors of that size add up to.
    """
    experts = type(trial.kernel.experts)
    if experts.twin is None:
        return
    if experts.requires != experts.twin.requires:
        yield f"declares other things than {experts.twin.__name__}"
    kernel = make_kernel(
        trial.case.prepare_finalize,
        experts.twin,
        trial.case.problem,
        machine=trial.machine,
        poison=True,
    )
    staged = call(kernel, trial.first)
    by_stages = kernel.count_invalid_ids()
    if by_stages != trial.first_call.invalid_ids:
        yield f"counted {trial.first_call.invalid_ids} invalid ids, {by_stages} by stages"
    ordinary = apart(trial.case.manner.values, len(staged)) == 0
    if trial.case.manner.nan:
        ordinary &= staged.flatten(1).isfinite().all(1).cpu()
    if trial.eager.shape == staged.shape and bool(ordinary.any()):
        got, want = (rows[ordinary.to(rows.device)].double() for rows in (trial.eager, staged))
        most = 2**0.5 * trial.first.compare(staged).bound
        error, size = float((got - want).norm()), float(want.norm())
        if not error <= most * size:
            yield f"relative difference {error / (size or 1):.2e} from the stages > {most:.2e}"


def numeric_planned(trial: Trial) -> Findings:
    """Other values in a plan: right too."""
    yield from trial.second.compare(trial.planned_second).problems


def plan_reused(trial: Trial) -> Findings:
    """Check that a plan keeps nothing of its last call: it gives the kernel's bits."""
    yield from same(trial, trial.first, trial.planned.output, trial.eager)


def out_given(trial: Trial) -> Findings:
    """`out`, or x if inplace, is the tensor returned, and nothing around it was written."""
    if not trial.planned.same:
        yield "returned another tensor"
    if not trial.planned.intact:
        yield "memory around the output was written"


def interleaved(trial: Trial) -> Findings:
    """Check that no call in flight is disturbed by one that starts later and finishes first."""
    yield from same(trial, trial.first, trial.interleaved[0], trial.eager)


def by_turns(trial: Trial) -> Findings:
    """Kernels of two problems share nothing: each computes what it does alone."""
    if not trial.case.by_turns:
        return
    kernel, sample = trial.neighbor
    pending = start(trial.kernel, trial.first)
    got = call(kernel, sample)
    yield from same(trial, trial.first, pending.finish().clone(), trial.eager)
    yield from sample.compare(got).problems


def numeric_strided(trial: Trial) -> Findings:
    """Fewer tokens than the kernel was made for, transposed weights and spaced rows: right too."""
    yield from trial.other.compare(trial.interleaved[1]).problems


def plan_shrunk(trial: Trial) -> Findings:
    """Check that a plan serves fewer tokens than before as the kernel does, bit for bit."""
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
    """On a GPU: a call of a plan allocates nothing, unless a part says that its library does.

    Nor where weights lie as a library does not take them: its part copies them in every call.
    """
    catalog, case = load_catalog(), trial.case
    part, experts = catalog.prepare_finalize(case.prepare_finalize), catalog.experts(case.experts)
    allocates = part.requires.received_by_library or experts.requires.library_allocates
    copies = bool(experts.requires.providers) and case.manner.layout != "plain"
    if not trial.capturable or allocates or copies:
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
    staged_twin,
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
    without_adapters,
    adapters_by_turns,
    prepared_weights,
    inputs_unchanged,
)
