"""Fault scenarios in which ranks make inconsistent calls, and the error expected on each rank.

A rank case may name a fault scenario (`cases.scenario_names`), in which rank 1 causes the fault.
Depending on the scenario, the group then recovers or stays unusable. Each scenario is a generator
that makes calls and yields (outcome, expected outcome) pairs. An outcome is "right" for a correct
output, or the text of the error.
"""

import json
import re
import time
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.spec.problem import Machine
from modular_kernel.tensors import ExpertWeights
from modular_kernel.testing.cases.scenario_names import (
    exchanges_call_numbers,
    find_manager_class,
    shares_memory,
)
from modular_kernel.testing.verify.call_scenarios import (
    check_in_flight_limit,
    check_meta_tokens_rejected,
    check_nearest_copies,
    check_same_on_ranks,
    check_synchronous_prepare,
    move_routing,
)
from modular_kernel.testing.verify.failure_scenarios import check_simulated_failures
from modular_kernel.testing.verify.handshake_scenarios import check_calls_without_agreement
from modular_kernel.testing.verify.host_scenarios import check_host_assignment, check_host_records
from modular_kernel.testing.verify.manager_scenarios import (
    check_destroyed_manager,
    check_dropped_manager,
    check_manager_arguments,
    check_max_received,
    check_too_many_tokens,
    check_undeclared_hosts,
    has_builtin_classes,
)
from modular_kernel.testing.verify.memory_scenarios import check_shared_memory
from modular_kernel.testing.verify.problem_scenarios import (
    NEED_SAME_CALL,
    PROBLEM_CHANGES,
    Outcomes,
    check_problem_mismatch,
    check_problem_mismatch_at_construction,
    cut_before,
)
from modular_kernel.testing.verify.scenario_context import (
    CORRECT,
    FAULTY_RANK,
    ScenarioContext,
    capture_outcome,
    get_manager,
)
from modular_kernel.testing.verify.simulated_host_scenarios import check_simulated_hosts
from modular_kernel.testing.verify.wait_scenarios import run_absent_rank, run_late_rank

DEFAULT_HISTORY = 1024  # exchanges that a manager records by default
MAX_QUOTED_CHARS = 200  # errors quote this many characters of a library's message
NUM_NAMED_STEPS = 64  # errors name the layer and call only for this many of the last steps
_FAILED_CALL = "aborted its call: RuntimeError"
_SECONDS = re.compile(r"\d+(\.\d+)? s")


def run_inconsistent_calls(context: ScenarioContext) -> Outcomes:
    """Make rank 1 refuse calls, then call another layer, then use another Problem.

    After each fault, all ranks must make correct calls again.
    """
    first_kernel = context.make_kernel()
    if not exchanges_call_numbers(context.part):
        yield from _check_inconsistent_problems(context, first_kernel)
        return
    second_kernel = context.make_kernel_on_manager_of(first_kernel)
    yield context.make_correct_call(first_kernel)
    yield _claim_rank_0(context, first_kernel)
    yield _pass_meta_tensors(context, first_kernel)
    yield _raise_in_prepare(context, first_kernel)
    wrong_dtype = {"x_TH": context.sample.inputs.x_TH.double()}
    yield (
        capture_outcome(lambda: context.compare(context.call(first_kernel, **wrong_dtype))),
        "DtypeError" if context.is_faulty_rank else context.format_call_number_error(
            "rank 1 refused its call 2 of layer 1 with DtypeError",
            "calls that every rank accepts", layer=1, call=2, step=4,
        ),
    )  # fmt: skip
    yield context.make_correct_call(first_kernel)
    kernel, position = (second_kernel, (2, 1)) if context.is_faulty_rank else (first_kernel, (1, 3))
    got = f"{context.format_by_rank('layer', 1, 2)}; {context.format_by_rank('call', 3, 1)}"
    yield (
        capture_outcome(lambda: context.compare(context.call(kernel))),
        context.format_call_number_error(
            got, NEED_SAME_CALL, layer=position[0], call=position[1], step=6
        ),
    )
    yield context.make_correct_call(second_kernel)
    yield from (
        check_problem_mismatch_at_construction
        if shares_memory(context.part)
        else check_problem_mismatch
    )(context, first_kernel)
    # Ranks that share memory report a mismatched problem when the part is constructed, not in a
    # call, so the mismatches take no steps.
    step = (
        8
        if shares_memory(context.part)
        else 9 + len(context.list_supported_changes(PROBLEM_CHANGES))
    )
    if context.part.requires.replicated_input:
        yield _pass_fewer_tokens(context, first_kernel, step)
        step += 1
    yield context.make_correct_call(first_kernel)
    refused_steps = {2: "DeviceError", 3: "RuntimeError", 4: "DtypeError"}
    yield check_records(context, first_kernel, refused_steps=refused_steps, last=step), CORRECT
    yield from check_host_records(context, first_kernel)
    yield from _use_explicit_manager(context, first_kernel)
    first_kernel.prepare_finalize.destroy()
    yield capture_outcome(lambda: context.compare(context.call(second_kernel))), "UnsupportedError"


def _claim_rank_0(context: ScenarioContext, kernel: FusedMoEModularKernel) -> tuple[str, str]:
    """On rank 1, make a kernel for rank 0. Only rank 1 raises an error, before any exchange."""
    if not context.is_faulty_rank:
        return CORRECT, CORRECT
    as_rank_0 = replace(context.case.problem.parallel, rank=0)
    return capture_outcome(
        lambda: str(context.make_kernel_on_manager_of(kernel, parallel=as_rank_0))
    ), "ConfigurationError"


def _pass_meta_tensors(context: ScenarioContext, kernel: FusedMoEModularKernel) -> tuple[str, str]:
    """On rank 1, pass tensors on a device that the group does not support."""
    meta, inputs = torch.device("meta"), context.sample.inputs
    weights = {f.name: getattr(inputs.weights, f.name) for f in fields(inputs.weights)}
    meta_weights: dict[str, Any] = {
        name: None if tensor is None else tensor.to(meta) for name, tensor in weights.items()
    }
    meta_inputs = {"x_TH": inputs.x_TH.to(meta), "routing": move_routing(meta, inputs.routing)}
    outcome = capture_outcome(
        lambda: context.compare(
            context.call(kernel, **meta_inputs, weights=ExpertWeights(**meta_weights))
        )
    )
    got = "rank 1 refused its call 2 of layer 1 with DeviceError"
    need = "calls that every rank accepts"
    return outcome, "DeviceError" if context.is_faulty_rank else context.format_call_number_error(
        got, need, layer=1, call=2, step=2
    )


def _raise_in_prepare(context: ScenarioContext, kernel: FusedMoEModularKernel) -> tuple[str, str]:
    """Make the part of rank 1 raise an unexpected error before it sends anything."""
    part: Any = kernel.prepare_finalize
    if context.is_faulty_rank:
        part.prepare = part.prepare_no_receive = _raise_error
    outcome = capture_outcome(lambda: context.compare(context.call(kernel)))
    if context.is_faulty_rank:
        del part.prepare, part.prepare_no_receive
    got = "rank 1 refused its call 2 of layer 1 with an error"
    need = "calls that every rank accepts"
    return (
        outcome,
        "RuntimeError"
        if context.is_faulty_rank
        else context.format_call_number_error(got, need, layer=1, call=2, step=3),
    )


def _pass_fewer_tokens(
    context: ScenarioContext, kernel: FusedMoEModularKernel, step: int
) -> tuple[str, str]:
    """On rank 1, pass fewer tokens to a part that needs the same number on all ranks."""
    inputs, tokens = context.sample.inputs, len(context.sample.inputs.x_TH)
    shorter_routing = replace(
        inputs.routing,
        topk_weights_TK=inputs.routing.topk_weights_TK[1:],
        topk_ids_TK=inputs.routing.topk_ids_TK[1:],
    )
    counts = (tokens - 1 if rank == FAULTY_RANK else tokens for rank in range(context.world_size))
    got = f"T = {', '.join(map(str, counts))} by rank"
    expected = context.format_call_number_error(
        got, "the same tokens on all", layer=1, call=3, step=step
    )
    return capture_outcome(
        lambda: context.compare(context.call(kernel, x_TH=inputs.x_TH[1:], routing=shorter_routing))
    ), expected


def _use_explicit_manager(context: ScenarioContext, kernel: FusedMoEModularKernel) -> Outcomes:
    """Check a manager that the caller creates, with options that differ from the defaults."""
    yield _count_records(kernel), str(DEFAULT_HISTORY)
    timeout_s = get_manager(kernel.prepare_finalize).timeout_s
    options = {"timeout_s": timeout_s, "device": context.machine.device, "history": 3}
    manager = find_manager_class(context.part)(None, **options)
    kernel_on_manager = context.make_kernel_on(manager)
    yield context.make_correct_call(kernel_on_manager)
    yield (
        capture_outcome(partial(_check_gpu_machine, kernel_on_manager, context.machine)),
        "DeviceError",
    )
    kernel_on_manager.prepare_finalize.destroy()  # does not destroy the caller's manager
    yield context.make_correct_call(kernel_on_manager)
    yield str(len(manager.last_calls.json_lines().splitlines())), "3"
    yield check_meta_tokens_rejected(context, kernel_on_manager)
    yield check_synchronous_prepare(context, kernel_on_manager)
    yield from check_same_on_ranks(context, kernel_on_manager)
    yield from check_in_flight_limit(context, kernel_on_manager)
    yield from check_nearest_copies(context, manager)
    yield from check_max_received(context, manager)
    yield from check_too_many_tokens(context, kernel_on_manager)
    manager.destroy()
    yield (
        capture_outcome(lambda: context.compare(context.call(kernel_on_manager))),
        "UnsupportedError",
    )
    yield from check_destroyed_manager(context, manager)
    host_manager = getattr(manager, "host_memory", None)  # memory that the ranks of a host share
    if host_manager is not None:
        yield capture_outcome(lambda: str(host_manager.check_open())), "UnsupportedError"
    yield from check_manager_arguments(context)
    yield from check_calls_without_agreement(context)
    yield from check_dropped_manager(context)
    yield from check_undeclared_hosts(context)
    yield from check_host_assignment(context)
    yield from check_simulated_hosts(context, kernel)
    yield from check_shared_memory(context)


def _count_records(kernel: FusedMoEModularKernel) -> str:
    """Record one exchange more than the default history holds; return how many records are kept."""
    records = get_manager(kernel.prepare_finalize).last_calls
    for _ in range(DEFAULT_HISTORY + 1):
        records.begin(0, "construct", 0)
    return str(len(records.json_lines().splitlines()))


def _check_gpu_machine(kernel: FusedMoEModularKernel, machine: Machine) -> str:
    kernel.prepare_finalize.check_machine(replace(machine, device="cuda", arch=(9, 0)))
    return "not refused"


def _check_inconsistent_problems(
    context: ScenarioContext, first_kernel: FusedMoEModularKernel
) -> Outcomes:
    """Check inconsistent problems, for parts whose ranks do not exchange call numbers.

    The ranks of these parts share memory, and compare their problems when the part is constructed.
    """
    yield context.make_correct_call(first_kernel)
    yield check_records(context, first_kernel, refused_steps={}, last=1), CORRECT
    yield from check_problem_mismatch_at_construction(context, first_kernel)
    second_kernel = context.make_kernel_on_manager_of(first_kernel)
    yield context.make_correct_call(second_kernel)
    yield context.make_correct_call(first_kernel)
    yield from _use_explicit_manager(context, first_kernel)


def run_failing_experts(context: ScenarioContext) -> Outcomes:
    """Make the experts of rank 1 raise an error.

    The other ranks must raise an error at once, and again in every later call. A call of another
    layer that is in flight at that time must raise the same error.
    """
    kernel = context.make_kernel()
    other_layer = context.make_kernel_on_manager_of(kernel)
    yield context.make_correct_call(kernel)
    finished, pending = context.start(other_layer), context.start(other_layer)
    yield capture_outcome(lambda: context.compare(finished.finish())), CORRECT
    yield _call_failing_experts(context, kernel, lambda: context.call(kernel), position=(1, 2, 4))
    yield _check_last_record(context, kernel), CORRECT
    failed_rank = "this rank " if context.is_faulty_rank else ""
    got = f"a manager that failed before: {failed_rank}{_FAILED_CALL}"
    peers = () if context.is_faulty_rank else (FAULTY_RANK,)
    expected = context.format_expected_error(
        "exchange between ranks", got, "a new one", (1, 2, 4), peers, "combine"
    )
    manager = get_manager(other_layer.prepare_finalize)

    def exchange() -> torch.Tensor:
        """Start an exchange that belongs to no layer, as another thread might."""
        manager.all_reduce(torch.ones(1), step=9, phase="combine").wait()
        return torch.empty(0)

    for call in (pending.finish, lambda: context.call(other_layer), exchange):
        outcome = capture_outcome(lambda call=call: context.compare(call()))  # type: ignore[misc]
        yield re.sub(r"; after N s: .*, need", ", need", outcome), expected
    # Errors name layer and call of the last NUM_NAMED_STEPS steps only.
    for steps, layer in ((NUM_NAMED_STEPS - 1, 1), (NUM_NAMED_STEPS, 0)):
        kernel = context.make_kernel()
        pending = context.start(kernel)
        for _ in range(steps):
            get_manager(kernel.prepare_finalize).next_step()
        yield _call_failing_experts(context, kernel, pending.finish, position=(layer, layer, 1))
    for message in ("", "x" * (MAX_QUOTED_CHARS + 50)):
        yield _fail_in_library(context, message)
    last_kernel = context.make_kernel()
    yield from check_simulated_failures(context, get_manager(last_kernel.prepare_finalize))
    yield context.make_correct_call(last_kernel)


def _fail_in_library(context: ScenarioContext, message: str) -> tuple[str, str]:
    """Make an exchange fail on every rank with a library error, and check how it is quoted.

    message: the message of the library error.
    """
    manager = get_manager(context.make_kernel().prepare_finalize)
    dist.barrier()  # all ranks must be connected first
    manager._communicator.group = _FailingCommunicator(message)

    def exchange() -> torch.Tensor:
        manager.all_reduce(torch.ones(1), step=manager.next_step(), phase="combine").wait()
        return torch.empty(0)

    quoted = message[:MAX_QUOTED_CHARS] or "RuntimeError"
    got = f"failed too; after N s: {quoted}"
    need = f"every rank within {manager.timeout_s:g} s"
    outcome = capture_outcome(lambda: context.compare(exchange()))
    expected = context.format_expected_error(
        "exchange between ranks", got, need, (0, 0, 1), context.peers, "combine"
    )
    return _SECONDS.sub("N s", outcome), _SECONDS.sub("N s", expected)


class _FailingCommunicator:
    """A communicator whose exchanges raise a RuntimeError."""

    def __init__(self, message: str) -> None:
        self._error = RuntimeError(message) if message else RuntimeError()

    def allreduce(self, _tensors: list[torch.Tensor]) -> None:
        raise self._error


def _call_failing_experts(
    context: ScenarioContext,
    kernel: FusedMoEModularKernel,
    call: Callable[[], torch.Tensor],
    *,
    position: tuple[int, int, int],
) -> tuple[str, str]:
    """Make a call in which the experts of rank 1 raise an error.

    position: layer, call and step numbers that the error must name.
    """
    if context.is_faulty_rank:
        kernel.experts.apply = _raise_error  # type: ignore[method-assign]
    start, timeout_s = time.monotonic(), get_manager(kernel.prepare_finalize).timeout_s
    outcome = capture_outcome(lambda: context.compare(call()))
    if time.monotonic() - start > 0.9 * timeout_s:
        return "the error came late", "the error came at once"
    expected = context.format_expected_error(
        "exchange between ranks", _FAILED_CALL, "", position, (FAULTY_RANK,), "combine"
    )
    if context.is_faulty_rank:
        return outcome, "RuntimeError"
    return cut_before(outcome, "; after"), cut_before(expected, ", need")


def _check_last_record(context: ScenarioContext, kernel: FusedMoEModularKernel) -> str:
    """Return "right" if the last record is the failed exchange of step 4, or the record."""
    lines = get_manager(kernel.prepare_finalize).last_calls.json_lines().splitlines()
    record = json.loads(lines[-1])
    actual = record["phase"], record["step"], record["bytes"], record["state"]
    if context.is_faulty_rank:
        return CORRECT if actual == ("combine", 4, 0, f"failed: {_FAILED_CALL}") else str(actual)
    return CORRECT if actual[1] == 4 and actual[3].startswith("failed: ") else str(actual)


def _raise_error(*_: object, **__: object) -> None:
    raise RuntimeError("these experts are broken")


def check_records(
    context: ScenarioContext,
    kernel: FusedMoEModularKernel,
    refused_steps: dict[int, str],
    *,
    last: int,
) -> str:
    """Return "right" if the manager recorded the exchanges correctly, or what is wrong.

    refused_steps: maps each step that rank 1 refused to the name of the error that it raised.
    last: number of the last step.
    """
    manager = get_manager(kernel.prepare_finalize)
    records = [json.loads(line) for line in manager.last_calls.json_lines().splitlines()]
    now, phases = time.time(), ["construct", "counts", "dispatch", "combine"]
    positions = [(record["step"], phases.index(record["phase"])) for record in records]
    # Step 0 is the construction of the part, which may have several exchanges.
    calls = [position for position in positions if position[0]]
    max_records = max((calls.count(position) for position in calls), default=1)
    max_chunks = getattr(context.part, "max_chunks", 1)  # exchanges per call and phase
    if positions != sorted(positions) or max_records > max_chunks or positions[0] != (0, 0):
        return f"the recorded exchanges are repeated or out of order: {positions}"
    missing_records = _list_required_records(context, kernel, last) - {
        (r["step"], r["phase"]) for r in records
    }
    if missing_records or positions[-1][0] != last:
        return f"the last recorded exchange is {positions[-1]}; missing {sorted(missing_records)}"
    for record in records:
        is_refused = context.is_faulty_rank and record["step"] in refused_steps
        done_state = (
            "done" if exchanges_call_numbers(context.part) or not record["step"] else "launched"
        )
        state = f"refused: {refused_steps[record['step']]}" if is_refused else done_state
        if record["state"] != state or record["rank"] != context.rank:
            return f"expected the state {state!r} on rank {context.rank}: {record}"
        if not now - 60 < record["started_s"] <= record["ended_s"] <= now:
            return f"implausible timestamps: {record}"
        if (record["phase"] == "counts") > (record["bytes"] > 0):
            return f"implausible number of bytes: {record}"
    return _check_record_bytes(context, records) if has_builtin_classes(context) else CORRECT


def _check_record_bytes(context: ScenarioContext, records: list[dict[str, Any]]) -> str:
    """Return "right" if our own manager recorded the bytes that it sends, or what is wrong.

    If the ranks exchange counts, connecting sends no bytes, every exchange of counts sends the same
    number of int64 values, and sums are sent in whole rows. Otherwise the ranks share memory. They
    send all tokens and padded sums, and the construction records the allocated bytes.
    """
    problem, tokens = context.case.problem, len(context.sample.inputs.x_TH)
    row_bytes = problem.hidden * problem.dtype.itemsize
    sizes = {
        phase: {record["bytes"] for record in records if record["phase"] == phase}
        for phase in ("construct", "counts", "dispatch", "combine")
    }
    if exchanges_call_numbers(context.part):
        is_right = sizes["construct"] == {0} and len(sizes["counts"]) == 1
        is_right &= all(size % 8 == 0 and size > 8 * context.world_size for size in sizes["counts"])
        is_right &= all(size % row_bytes == 0 for size in sizes["combine"])
    else:
        rows = context.world_size * problem.tokens
        is_right = sizes["dispatch"] == {tokens * row_bytes}
        is_right &= sizes["combine"] == {rows * row_bytes} and min(sizes["construct"]) == 0
        is_right &= all(size % 256 == 0 and size != 256 for size in sizes["construct"])
    return CORRECT if is_right else f"implausible numbers of bytes: {sizes}"


def _list_required_records(
    context: ScenarioContext, kernel: FusedMoEModularKernel, last: int
) -> set[tuple[int, str]]:
    """Return the (step, phase) of every required record.

    Each step must record its exchange of counts. The first and the last call succeed, and must
    record their exchanges of rows, unless the rows move through host shared memory.
    """
    expected = {
        (step, "counts") for step in range(1, last + 1) if exchanges_call_numbers(context.part)
    }
    one_host = context.case.problem.parallel.hosts == 1
    if one_host and hasattr(get_manager(kernel.prepare_finalize), "host_memory"):
        return expected
    phases = ("combine",) if context.part.requires.replicated_input else ("dispatch", "combine")
    return expected | {(step, phase) for step in (1, last) for phase in phases}


def run_finished_out_of_order(context: ScenarioContext) -> Outcomes:
    """On rank 1, make exchanges in another order. The next call must report the difference.

    First, rank 1 finishes two calls in reverse order. Then it reverses two exchanges that belong to
    no layer.
    """
    kernel = context.make_kernel()
    pending = [context.start(kernel) for _ in range(2)]
    for call in reversed(pending) if context.is_faulty_rank else pending:
        call.finish()
    outcome = capture_outcome(lambda: context.compare(context.call(kernel)))
    got = "a different order of earlier exchanges"
    yield outcome, context.format_call_number_error(got, NEED_SAME_CALL, layer=1, call=3, step=3)
    kernel = context.make_kernel()
    manager, phases = get_manager(kernel.prepare_finalize), ["dispatch", "combine"]
    step = manager.next_step()
    for phase in reversed(phases) if context.is_faulty_rank else phases:
        manager.all_reduce(torch.ones(1), step=step, phase=phase).wait()
    outcome = capture_outcome(lambda: context.compare(context.call(kernel)))
    yield outcome, context.format_call_number_error(got, NEED_SAME_CALL, layer=1, call=1, step=2)


_SCENARIOS: dict[str, Callable[[ScenarioContext], Outcomes]] = {
    "misunderstood": run_inconsistent_calls,
    "broken-off": run_failing_experts,
    "late": run_late_rank,
    "stays-out": run_absent_rank,
    "finished-by-turns": run_finished_out_of_order,
}


def run_scenario(fault: str, context: ScenarioContext) -> tuple[tuple[str, str], ...]:
    """Run the fault scenario named `fault`; return (outcome, expected outcome) of every call.

    The scenario runs to the end even after a mismatch, because other ranks wait for this one.
    """
    return tuple(_SCENARIOS[fault](context))
