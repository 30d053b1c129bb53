"""Checks of a test case: one generator per property, which yields a message for each violation.

Each check takes a `Trial`, which makes the calls of the case and caches their results. Reports call
a check by the name of its function without "check_". `CHECKS` lists all checks in order.

The buffers of every kernel are poisoned before each call, so that a read of unwritten memory causes
an error. The fill alternates between calls. One fill consists of NaN and huge integers. The other
consists of large finite values, and of ids of experts, slots and rows that are valid but wrong.
"""

from collections.abc import Callable, Iterator

import torch

from modular_kernel.catalog import load_catalog, make_kernel
from modular_kernel.errors import InputError
from modular_kernel.replay import stages
from modular_kernel.spec.problem import Reduce
from modular_kernel.tensors import ExpertRows
from modular_kernel.testing.cases.scenario_names import is_builtin
from modular_kernel.testing.cases.value_kinds import assign_token_groups
from modular_kernel.testing.verify.bitwise_reference import check_one_rounding
from modular_kernel.testing.verify.invariance import check_batch_invariant, view_output_bytes
from modular_kernel.testing.verify.launch_plans import find_changed_plans
from modular_kernel.testing.verify.prepared import check_prepared_weights
from modular_kernel.testing.verify.reducer_results import check_reducer_results
from modular_kernel.testing.verify.sample import Sample
from modular_kernel.testing.verify.shared_operations import find_wrong_operations
from modular_kernel.testing.verify.trial import Trial, call, start
from modular_kernel.testing.verify.without_adapters import (
    check_alternating_adapters,
    check_without_adapters,
)
from modular_kernel.utils.optional_imports import DISTRIBUTION_PACKAGES

Findings = Iterator[str]  # messages about violations
Check = Callable[[Trial], Findings]


def compare_outputs(
    trial: Trial, sample: Sample, actual: torch.Tensor, expected: torch.Tensor
) -> Findings:
    """Compare two outputs of `sample` bitwise if the pairing is deterministic.

    Otherwise, compare `actual` with the float64 reference.
    """
    if not trial.is_deterministic:
        yield from sample.compare(actual).problems
    elif actual.shape != expected.shape:
        yield f"shape {tuple(actual.shape)} is not {tuple(expected.shape)}"
    else:
        differs = view_output_bytes(actual) != view_output_bytes(expected)
        if bool(differs.any()):
            row = int(differs.flatten(1).any(1).nonzero()[0])
            yield f"bits differ, first in row {row} of {len(differs)}"


def check_numeric(trial: Trial) -> Findings:
    """Check that the first call is correct."""
    yield from trial.first.compare(trial.eager_output).problems


def check_invalid_ids(trial: Trial) -> Findings:
    """Check that each id outside [-1, E) is counted once, and that nothing else is counted."""
    counted = trial.first_call.invalid_ids
    if counted != trial.first.invalid_ids:
        yield f"counted {counted} invalid ids, expected {trial.first.invalid_ids}"


def check_races(trial: Trial) -> Findings:
    """Check that the programs of a launch do not race. Only the interpreter detects races."""
    yield from trial.first_call.races


def check_stages(trial: Trial) -> Findings:
    """Check that a profile of the call shows quantization only if activations are quantized."""
    scheme = trial.first.problem.scheme
    for name in (stages.QUANTIZE_INPUT, stages.QUANTIZE):
        if name in trial.first_call.stages and not scheme.quantizes_activations:
            yield f"entered {name}, but {scheme} quantizes no activations"


def check_staged_reference(trial: Trial) -> Findings:
    """Compare a fused experts component ("part") with the staged part that it replaces.

    A staged part runs the two GEMMs and the activation as separate kernels.

    Each part may differ from the float64 reference by the bound of `check_numeric`. Two independent
    errors of that size add up to sqrt(2) times the bound, which is the tolerance between the parts.
    """
    experts = type(trial.kernel.experts)
    if experts.unfused is None:
        return
    if experts.requires != experts.unfused.requires:
        yield f"its requirements differ from those of {experts.unfused.__name__}"
    kernel = make_kernel(
        trial.case.prepare_finalize,
        experts.unfused,
        trial.case.problem,
        machine=trial.machine,
        poison=True,
        auto_prepare=False,
    )
    staged = call(kernel, trial.first)
    staged_invalid_ids = kernel.count_invalid_ids()
    if staged_invalid_ids != trial.first_call.invalid_ids:
        counted = trial.first_call.invalid_ids
        yield f"counted {counted} invalid ids, but the staged part counted {staged_invalid_ids}"
    is_ordinary = assign_token_groups(trial.case.variation.values, len(staged)) == 0
    if trial.case.variation.nan:
        is_ordinary &= staged.flatten(1).isfinite().all(1).cpu()
    if trial.eager_output.shape == staged.shape and bool(is_ordinary.any()):
        actual, expected = (
            rows[is_ordinary.to(rows.device)].double() for rows in (trial.eager_output, staged)
        )
        max_error = 2**0.5 * trial.first.compare(staged).bound
        error, expected_norm = float((actual - expected).norm()), float(expected.norm())
        if not error <= max_error * expected_norm:
            relative = error / (expected_norm or 1)
            yield f"relative difference {relative:.2e} from the staged part > {max_error:.2e}"


def check_numeric_planned(trial: Trial) -> Findings:
    """Check that a planned call on values other than those of the first call is correct."""
    yield from trial.second.compare(trial.planned_second).problems


def check_plan_reused(trial: Trial) -> Findings:
    """Check that a plan keeps no state of its last call, by comparing it with the kernel.

    A plan is a kernel with preallocated buffers that are reused by all of its calls.
    """
    yield from compare_outputs(trial, trial.first, trial.planned.output, trial.eager_output)


def check_out_given(trial: Trial) -> Findings:
    """Check that `out` (x if inplace) is returned, and that memory around it is unchanged."""
    if not trial.planned.is_out:
        yield "did not return the tensor that was passed as the output"
    if not trial.planned.is_intact:
        yield "memory around the output was written"


def check_interleaved(trial: Trial) -> Findings:
    """Check that a call in flight is not affected by a call that starts later and ends first."""
    yield from compare_outputs(trial, trial.first, trial.interleaved[0], trial.eager_output)


def check_interleaved_kernels(trial: Trial) -> Findings:
    """Check that interleaved calls of two kernels, for different problems, are independent."""
    if not trial.case.interleaved_calls:
        return
    kernel, sample = trial.neighbor
    pending = start(trial.kernel, trial.first)
    output = call(kernel, sample)
    yield from compare_outputs(trial, trial.first, pending.finish().clone(), trial.eager_output)
    yield from sample.compare(output).problems


def check_numeric_strided(trial: Trial) -> Findings:
    """Check a call with fewer tokens, transposed weights, and gaps between rows of x."""
    yield from trial.other.compare(trial.interleaved[1]).problems


def check_plan_shrunk(trial: Trial) -> Findings:
    """Check that a planned call with fewer tokens than the previous one equals an eager call."""
    yield from compare_outputs(trial, trial.other, trial.planned_other, trial.interleaved[1])


def check_inputs_unchanged(trial: Trial) -> Findings:
    """Check that the arguments of all earlier calls kept their bits."""
    for sample in trial.samples:
        original_inputs = sample.original_inputs.tensors()
        for name, tensor in sample.inputs.tensors().items():
            if bool((_view_bytes(tensor) != _view_bytes(original_inputs[name])).any()):
                yield f"{name} was written"


def _view_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # view(uint8) needs a last stride of 1. A dimension of size 1 counts as contiguous with any
    # stride, so .contiguous() would not copy there.
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def check_graph_replay(trial: Trial) -> Findings:
    """On a GPU, check that a captured plan, replayed on new values, equals an eager call."""
    if not trial.is_capturable:
        return
    plan = trial.build(trial.case, trial.machine, False).plan()
    static_sample = trial.copy_first_sample()
    inputs, x_TH = static_sample.inputs, static_sample.x_TH()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # compile and load all kernels before the capture
            plan(x_TH, inputs.weights, inputs.routing)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = plan(x_TH, inputs.weights, inputs.routing)
    for sample, expected in trial.expected_replays:
        original_inputs = sample.original_inputs
        for tensor, new_value in zip(
            inputs.tensors().values(), original_inputs.tensors().values(), strict=True
        ):
            tensor.copy_(new_value)
        x_TH.copy_(original_inputs.x_TH)
        graph.replay()
        yield from compare_outputs(trial, sample, output.clone(), expected)


def check_no_allocation(trial: Trial) -> Findings:
    """On a GPU, check that a planned call allocates nothing.

    Skipped if a part declares that its library allocates. Also skipped for parts that wrap a
    library if the weights have a layout other than "plain", because these parts then copy the
    weights in every call.
    """
    catalog, case = load_catalog(), trial.case
    pf, experts = catalog.prepare_finalize(case.prepare_finalize), catalog.experts(case.experts)
    allocates = pf.requires.received_by_library or experts.requires.library_allocates
    copies_weights = bool(experts.requires.providers) and case.variation.layout != "plain"
    if not trial.is_capturable or allocates or copies_weights:
        return
    plan = trial.build(trial.case, trial.machine, False).plan()
    inputs, x_TH = trial.first.inputs, trial.first.x_TH()
    plan(x_TH, inputs.weights, inputs.routing)
    num_before = _count_allocations()
    plan(x_TH, inputs.weights, inputs.routing)
    count = _count_allocations() - num_before
    if count:
        yield f"a planned call made {count} allocations"


def _count_allocations() -> int:
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


def check_reducer_arguments(trial: Trial) -> Findings:
    """Check that a reducer of this project refuses outputs that do not match the rows.

    Reducers of other packages may rely on the kernel to pass valid arguments.
    """
    reduce, problem = trial.kernel.experts.finalize_weight_and_reduce_impl(), trial.first.problem
    is_own = type(reduce).__module__.partition(".")[0] in DISTRIBUTION_PACKAGES
    if reduce.kind is Reduce.DELEGATE or not is_own:
        return
    tokens, top_k, hidden = trial.first.x_TH().shape[0], problem.top_k, problem.hidden
    row_of_pair_TK: torch.Tensor | None = None
    shape: tuple[int, ...] = (tokens, top_k, hidden)
    out_shape = shape if reduce.kind is None else (tokens, hidden)
    if reduce.kind is Reduce.NOOP:
        shape = out_shape
    elif reduce.kind is Reduce.NAIVE_BATCHED:
        shape = (1, max(1, tokens), hidden)
        row_of_pair_TK = torch.zeros((tokens, top_k), dtype=torch.int32, device=trial.first.device)
    rows = torch.zeros(shape, dtype=problem.dtype, device=trial.first.device)
    other_dtype = torch.float32 if problem.dtype is torch.float16 else torch.float16
    outputs = {
        "another dtype": rows.new_zeros(out_shape, dtype=other_dtype),
        "another number of tokens": rows.new_zeros((tokens + 1, *out_shape[1:])),
    }
    for difference, out in outputs.items():
        try:
            reduce.apply(ExpertRows(rows, row_of_pair_TK, None, 1.0), out)
        except InputError:
            continue
        # A reducer that does not check its arguments may raise anything.
        except Exception as error:  # noqa: BLE001
            yield f"raised {type(error).__name__} for an output of {difference} than the rows"
        else:
            yield f"accepted an output of {difference} than the rows"


def check_marked_rows(trial: Trial) -> Findings:
    """Check that a part marks the rows that it reduces as checked.

    Otherwise, the reducer checks all of its arguments in every call.
    """
    count = trial.first_call.unchecked_rows
    if count and is_builtin(load_catalog().prepare_finalize(trial.case.prepare_finalize)):
        yield f"{count} ExpertRows of a call are not marked as checked"


def check_launch_plans(trial: Trial) -> Findings:
    """Check that large calls are divided among programs as recorded; see `launch_plans`."""
    if is_builtin(load_catalog().prepare_finalize(trial.case.prepare_finalize)):
        yield from find_changed_plans()[:1]


def check_shared_operations(trial: Trial) -> Findings:
    """Check the operations that parts share on further inputs; see `shared_operations`.

    Of several ranks, only the first one checks them.
    """
    part, parallel = trial.case.prepare_finalize, trial.case.problem.parallel
    if parallel.rank == 0 and is_builtin(load_catalog().prepare_finalize(part)):
        yield from find_wrong_operations()[:1]


CHECKS: tuple[Check, ...] = (
    check_numeric,
    check_one_rounding,
    check_staged_reference,
    check_invalid_ids,
    check_races,
    check_stages,
    check_numeric_planned,
    check_plan_reused,
    check_out_given,
    check_interleaved,
    check_interleaved_kernels,
    check_numeric_strided,
    check_plan_shrunk,
    check_graph_replay,
    check_no_allocation,
    check_batch_invariant,
    check_without_adapters,
    check_alternating_adapters,
    check_prepared_weights,
    check_inputs_unchanged,
    check_reducer_arguments,
    check_reducer_results,
    check_marked_rows,
    check_launch_plans,
    check_shared_operations,
)
