"""Fault scenarios in which ranks make inconsistent calls, and the error expected on each rank.

A rank case may name a fault scenario (`cases.scenario_names`), in which rank 1 causes the fault.
Depending on the scenario, the group then recovers or stays unusable. The outcome of every call on
every rank is compared with the expected text, including layer, call and step numbers.
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
from modular_kernel.testing.cases.scenario_names import counts_calls, manager_class, shares_memory
from modular_kernel.testing.verify.call_scenarios import (
    rejects_meta_tokens,
    routing_on,
    too_many_in_flight,
    uses_nearest_copies,
)
from modular_kernel.testing.verify.host_scenarios import check_host_records, host_assignment
from modular_kernel.testing.verify.problem_scenarios import (
    ONE_CALL,
    PROBLEM_CHANGES,
    Outcomes,
    another_problem,
    another_problem_at_construction,
    text_before,
)
from modular_kernel.testing.verify.scenario_context import (
    RIGHT,
    VICTIM,
    ScenarioContext,
    manager_of,
    outcome_of,
)
from modular_kernel.testing.verify.wait_scenarios import absent_rank, late_rank

HISTORY = 1024  # exchanges that a manager records by default
NUM_NAMED_STEPS = 64  # steps for which errors still name layer and call
_FAILED_CALL = "broke off its call: RuntimeError"
_SECONDS = re.compile(r"\d+(\.\d+)? s")


def inconsistent_calls(context: ScenarioContext) -> Outcomes:
    """Have rank 1 refuse calls, call another layer, then change the problem. All ranks recover."""
    first = context.kernel()
    if not counts_calls(context.part):
        yield from _inconsistent_problems(context, first)
        return
    second = context.kernel_on_manager_of(first)
    yield context.call_succeeds(first)
    yield _claim_rank_0(context, first)
    yield _pass_meta(context, first)
    yield _raise_in_prepare(context, first)
    wrong_dtype = {"x_TH": context.sample.inputs.x_TH.double()}
    yield (
        outcome_of(lambda: context.compare(context.call(first, **wrong_dtype))),
        "DtypeError" if context.is_victim else context.counts_error(
            "rank 1 refused its call 2 of layer 1 with DtypeError",
            "calls that every rank accepts", layer=1, call=2, step=4,
        ),
    )  # fmt: skip
    yield context.call_succeeds(first)
    kernel, position = (second, (2, 1)) if context.is_victim else (first, (1, 3))
    got = f"{context.by_rank('layer', 1, 2)}; {context.by_rank('call', 3, 1)}"
    yield (
        outcome_of(lambda: context.compare(context.call(kernel))),
        context.counts_error(got, ONE_CALL, layer=position[0], call=position[1], step=6),
    )
    yield context.call_succeeds(second)
    yield from (
        another_problem_at_construction if shares_memory(context.part) else another_problem
    )(context, first)
    # Ranks that share memory report another problem when the part is made, not in a call.
    step = 8 if shares_memory(context.part) else 9 + len(context.other_problems(PROBLEM_CHANGES))
    if context.part.requires.replicated_input:
        yield _pass_fewer_tokens(context, first, step)
        step += 1
    yield context.call_succeeds(first)
    refused_steps = {2: "DeviceError", 3: "RuntimeError", 4: "DtypeError"}
    yield check_records(context, first, refused_steps=refused_steps, last=step), RIGHT
    yield from check_host_records(context, first)
    yield from _use_explicit_manager(context, first)
    first.prepare_finalize.destroy()
    yield outcome_of(lambda: context.compare(context.call(second))), "UnsupportedError"


def _claim_rank_0(context: ScenarioContext, kernel: FusedMoEModularKernel) -> tuple[str, str]:
    """Make a kernel for rank 0 on rank 1. Only rank 1 gets an error, before any exchange."""
    if not context.is_victim:
        return RIGHT, RIGHT
    as_rank_0 = replace(context.case.problem.parallel, rank=0)
    return outcome_of(
        lambda: str(context.kernel_on_manager_of(kernel, parallel=as_rank_0))
    ), "ConfigurationError"


def _pass_meta(context: ScenarioContext, kernel: FusedMoEModularKernel) -> tuple[str, str]:
    """Pass tensors on rank 1 that are on a device which the group does not support."""
    meta, i = torch.device("meta"), context.sample.inputs
    weights = {f.name: getattr(i.weights, f.name) for f in fields(i.weights)}
    meta_weights: dict[str, Any] = {
        n: None if t is None else t.to(meta) for n, t in weights.items()
    }
    inputs = {"x_TH": i.x_TH.to(meta), "routing": routing_on(meta, i.routing)}
    outcome = outcome_of(
        lambda: context.compare(
            context.call(kernel, **inputs, weights=ExpertWeights(**meta_weights))
        )
    )
    got = "rank 1 refused its call 2 of layer 1 with DeviceError"
    need = "calls that every rank accepts"
    return outcome, "DeviceError" if context.is_victim else context.counts_error(
        got, need, layer=1, call=2, step=2
    )


def _raise_in_prepare(context: ScenarioContext, kernel: FusedMoEModularKernel) -> tuple[str, str]:
    """Make the part of rank 1 raise an unexpected error before it has sent anything."""
    part: Any = kernel.prepare_finalize
    if context.is_victim:
        part.prepare = part.prepare_no_receive = _raise_error
    outcome = outcome_of(lambda: context.compare(context.call(kernel)))
    if context.is_victim:
        del part.prepare, part.prepare_no_receive
    got = "rank 1 refused its call 2 of layer 1 with an error"
    need = "calls that every rank accepts"
    return outcome, "RuntimeError" if context.is_victim else context.counts_error(
        got, need, layer=1, call=2, step=3
    )


def _pass_fewer_tokens(
    context: ScenarioContext, kernel: FusedMoEModularKernel, step: int
) -> tuple[str, str]:
    """Pass fewer tokens on rank 1, though the part needs the same number on all ranks."""
    i, tokens = context.sample.inputs, len(context.sample.inputs.x_TH)
    fewer = replace(
        i.routing,
        topk_weights_TK=i.routing.topk_weights_TK[1:],
        topk_ids_TK=i.routing.topk_ids_TK[1:],
    )
    counts = (tokens - 1 if rank == VICTIM else tokens for rank in range(context.world_size))
    got = f"T = {', '.join(map(str, counts))} by rank"
    expected = context.counts_error(got, "the same tokens on all", layer=1, call=3, step=step)
    return outcome_of(
        lambda: context.compare(context.call(kernel, x_TH=i.x_TH[1:], routing=fewer))
    ), expected


def _use_explicit_manager(context: ScenarioContext, kernel: FusedMoEModularKernel) -> Outcomes:
    """Use a manager that the caller makes, with options other than the defaults."""
    yield _count_records(kernel), str(HISTORY)
    deadline_s = manager_of(kernel.prepare_finalize).deadline_s
    options = {"deadline_s": deadline_s, "device": context.machine.device, "history": 3}
    manager = manager_class(context.part)(None, **options)
    kernel_on_manager = context.kernel_on(manager)
    yield context.call_succeeds(kernel_on_manager)
    yield outcome_of(partial(_check_gpu_machine, kernel_on_manager, context.machine)), "DeviceError"
    kernel_on_manager.prepare_finalize.destroy()  # does not destroy the caller's manager
    yield context.call_succeeds(kernel_on_manager)
    yield str(len(manager.last_calls.json_lines().splitlines())), "3"
    yield rejects_meta_tokens(context, kernel_on_manager)
    yield from too_many_in_flight(context, kernel_on_manager)
    yield from uses_nearest_copies(context, manager)
    manager.destroy()
    yield outcome_of(lambda: context.compare(context.call(kernel_on_manager))), "UnsupportedError"
    host_manager = getattr(manager, "host_memory", None)  # memory that the ranks of a host share
    if host_manager is not None:
        yield outcome_of(lambda: str(host_manager.check_open())), "UnsupportedError"
    yield from host_assignment(context)


def _count_records(kernel: FusedMoEModularKernel) -> str:
    """Record one exchange more than the default history holds; return how many were kept."""
    records = manager_of(kernel.prepare_finalize).last_calls
    for _ in range(HISTORY + 1):
        records.begin(0, "construct", 0)
    return str(len(records.json_lines().splitlines()))


def _check_gpu_machine(kernel: FusedMoEModularKernel, machine: Machine) -> str:
    kernel.prepare_finalize.check_machine(replace(machine, device="cuda", arch=(9, 0)))
    return "not refused"


def _inconsistent_problems(context: ScenarioContext, first: FusedMoEModularKernel) -> Outcomes:
    """Run the scenario on parts whose ranks exchange no call numbers.

    They share memory, and compare problems when the part is constructed.
    """
    yield context.call_succeeds(first)
    yield check_records(context, first, refused_steps={}, last=1), RIGHT
    yield from another_problem_at_construction(context, first)
    second = context.kernel_on_manager_of(first)
    yield context.call_succeeds(second)
    yield context.call_succeeds(first)
    yield from _use_explicit_manager(context, first)


def failing_experts(context: ScenarioContext) -> Outcomes:
    """Make the experts of rank 1 raise. The other ranks get an error at once and in later calls.

    A call of another layer that was in flight gets the same error.
    """
    kernel = context.kernel()
    other_layer = context.kernel_on_manager_of(kernel)
    yield context.call_succeeds(kernel)
    finished, pending = context.start(other_layer), context.start(other_layer)
    yield outcome_of(lambda: context.compare(finished.finish())), RIGHT
    yield _call_failing_experts(context, kernel, lambda: context.call(kernel), position=(1, 2, 4))
    yield _check_last_record(context, kernel), RIGHT
    got = f"a manager that failed before: {'this rank ' if context.is_victim else ''}{_FAILED_CALL}"
    peers = () if context.is_victim else (VICTIM,)
    expected = context.expected_error(
        "exchange between ranks", got, "a new one", (1, 2, 4), peers, "combine"
    )
    manager = manager_of(other_layer.prepare_finalize)

    def exchange() -> torch.Tensor:
        """Start an exchange that belongs to no layer, as another thread might."""
        manager.all_reduce(torch.ones(1), step=9, phase="combine").wait()
        return torch.empty(0)

    for call in (pending.finish, lambda: context.call(other_layer), exchange):
        outcome = outcome_of(lambda call=call: context.compare(call()))  # type: ignore[misc]
        yield re.sub(r"; after N s: .*, need", ", need", outcome), expected
    # Errors name layer and call of the last NUM_NAMED_STEPS steps only.
    for steps, layer in ((NUM_NAMED_STEPS - 1, 1), (NUM_NAMED_STEPS, 0)):
        kernel = context.kernel()
        pending = context.start(kernel)
        for _ in range(steps):
            manager_of(kernel.prepare_finalize).next_step()
        yield _call_failing_experts(context, kernel, pending.finish, position=(layer, layer, 1))
    yield _fail_without_message(context)
    yield context.call_succeeds(context.kernel())


def _fail_without_message(context: ScenarioContext) -> tuple[str, str]:
    """Make an exchange fail on every rank with a library error that has no message."""
    manager = manager_of(context.kernel().prepare_finalize)
    dist.barrier()  # all ranks must be connected first
    manager._communicator.group = _FailingCommunicator()

    def exchange() -> torch.Tensor:
        manager.all_reduce(torch.ones(1), step=manager.next_step(), phase="combine").wait()
        return torch.empty(0)

    got = "failed too; after N s: RuntimeError"
    need = f"every rank within {manager.deadline_s:g} s"
    outcome = outcome_of(lambda: context.compare(exchange()))
    expected = context.expected_error(
        "exchange between ranks", got, need, (0, 0, 1), context.peers, "combine"
    )
    return _SECONDS.sub("N s", outcome), _SECONDS.sub("N s", expected)


class _FailingCommunicator:
    """A communicator that raises an error without a message."""

    def allreduce(self, _tensors: list[torch.Tensor]) -> None:
        raise RuntimeError


def _call_failing_experts(
    context: ScenarioContext,
    kernel: FusedMoEModularKernel,
    call: Callable[[], torch.Tensor],
    *,
    position: tuple[int, int, int],
) -> tuple[str, str]:
    """Make a call in which rank 1's experts raise. position: layer, call and step."""
    if context.is_victim:
        kernel.experts.apply = _raise_error  # type: ignore[method-assign]
    start, deadline_s = time.monotonic(), manager_of(kernel.prepare_finalize).deadline_s
    outcome = outcome_of(lambda: context.compare(call()))
    if time.monotonic() - start > 0.9 * deadline_s:
        return "not at once", "at once"
    expected = context.expected_error(
        "exchange between ranks", _FAILED_CALL, "", position, (VICTIM,), "combine"
    )
    if context.is_victim:
        return outcome, "RuntimeError"
    return text_before(outcome, "; after"), text_before(expected, ", need")


def _check_last_record(context: ScenarioContext, kernel: FusedMoEModularKernel) -> str:
    """Return "right" if the last record is the exchange that failed in step 4, else the record."""
    lines = manager_of(kernel.prepare_finalize).last_calls.json_lines().splitlines()
    record = json.loads(lines[-1])
    actual = record["phase"], record["step"], record["bytes"], record["state"]
    if context.is_victim:
        return RIGHT if actual == ("combine", 4, 0, f"failed: {_FAILED_CALL}") else str(actual)
    return RIGHT if actual[1] == 4 and actual[3].startswith("failed: ") else str(actual)


def _raise_error(*_: object, **__: object) -> None:
    raise RuntimeError("these experts are broken")


def check_records(
    context: ScenarioContext,
    kernel: FusedMoEModularKernel,
    refused_steps: dict[int, str],
    *,
    last: int,
) -> str:
    """Return what is wrong with the manager's records of exchanges, or "right".

    refused_steps: step -> name of the error that rank 1 raised. last: the last step.
    """
    manager = manager_of(kernel.prepare_finalize)
    records = [json.loads(line) for line in manager.last_calls.json_lines().splitlines()]
    now, phases = time.time(), ["construct", "counts", "dispatch", "combine"]
    positions = [(record["step"], phases.index(record["phase"])) for record in records]
    # Step 0 is the construction, which may have several exchanges.
    calls = [position for position in positions if position[0]]
    max_records = max((calls.count(position) for position in calls), default=1)
    max_chunks = getattr(context.part, "max_chunks", 1)  # exchanges per call and phase
    if positions != sorted(positions) or max_records > max_chunks or positions[0] != (0, 0):
        return f"exchanges {positions}"
    missing = _expected_records(context, kernel, last) - {(r["step"], r["phase"]) for r in records}
    if missing or positions[-1][0] != last:
        return f"exchanges up to {positions[-1]}, none of {sorted(missing)}"
    for record in records:
        is_refused = context.is_victim and record["step"] in refused_steps
        done_state = "done" if counts_calls(context.part) or not record["step"] else "launched"
        state = f"refused: {refused_steps[record['step']]}" if is_refused else done_state
        if record["state"] != state or record["rank"] != context.rank:
            return f"not {state} on rank {context.rank}: {record}"
        if not now - 60 < record["started_s"] <= record["ended_s"] <= now:
            return f"not just now: {record}"
        if (record["phase"] == "counts") > (record["bytes"] > 0):
            return f"bytes: {record}"
    return RIGHT


def _expected_records(
    context: ScenarioContext, kernel: FusedMoEModularKernel, last: int
) -> set[tuple[int, str]]:
    """Return (step, phase) of the required records: counts of each step, rows of successful calls.

    The first and the last call succeed. Rows that are moved through the memory of a host have no
    record.
    """
    expected = {(step, "counts") for step in range(1, last + 1) if counts_calls(context.part)}
    one_host = context.case.problem.parallel.hosts == 1
    if one_host and hasattr(manager_of(kernel.prepare_finalize), "host_memory"):
        return expected
    phases = ("combine",) if context.part.requires.replicated_input else ("dispatch", "combine")
    return expected | {(step, phase) for step in (1, last) for phase in phases}


def finished_out_of_order(context: ScenarioContext) -> Outcomes:
    """Finish two calls in reverse order on rank 1. The next call reports it."""
    kernel = context.kernel()
    pending = [context.start(kernel) for _ in range(2)]
    for call in reversed(pending) if context.is_victim else pending:
        call.finish()
    outcome = outcome_of(lambda: context.compare(context.call(kernel)))
    got = "a different order of earlier exchanges"
    yield outcome, context.counts_error(got, ONE_CALL, layer=1, call=3, step=3)


_SCENARIOS: dict[str, Callable[[ScenarioContext], Outcomes]] = {
    "misunderstood": inconsistent_calls,
    "broken-off": failing_experts,
    "late": late_rank,
    "stays-out": absent_rank,
    "finished-by-turns": finished_out_of_order,
}


def run_scenario(fault: str, context: ScenarioContext) -> tuple[tuple[str, str], ...]:
    """Run a fault scenario; return (outcome, expected outcome) of every call.

    Runs to the end even after a mismatch, because other ranks wait for this one.
    """
    return tuple(_SCENARIOS[fault](context))
