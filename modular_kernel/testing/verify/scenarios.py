"""Scenes in which ranks do not mean the same call, and what each rank must be told.

A case over ranks may have a fault, which names a scene. Rank 1 is at fault in it; then the group
goes on, or is of no more use, as the scene says. What every call says is compared word by word with
what is written here, as layer, call and step are counted here: a rank that is told something else,
or nothing, fails the check.
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
    elsewhere,
    nearest,
    routing_on,
    too_many,
)
from modular_kernel.testing.verify.host_scenarios import journal_of_a_host, on_hosts
from modular_kernel.testing.verify.problem_scenarios import (
    ONE_CALL,
    OTHERS,
    Lines,
    another_problem,
    before,
    meant_otherwise,
)
from modular_kernel.testing.verify.scenario_context import RIGHT, VICTIM, Stage, manager_of, said
from modular_kernel.testing.verify.wait_scenarios import late, stays_out

HISTORY = 1024  # exchanges that a manager remembers
REMEMBERED = 64  # steps of which errors name layer and call
_BROKE = "broke off its call: RuntimeError"
_SECONDS = re.compile(r"\d+(\.\d+)? s")


def misunderstood(on: Stage) -> Lines:
    """Play a call that rank 1 refuses, another layer, another problem: all are told, and go on."""
    first = on.kernel()
    if not counts_calls(on.part):
        yield from _other_memory(on, first)
        return
    second = on.beside(first)
    yield on.goes(first)
    yield _misplaced(on, first)
    yield _elsewhere(on, first)
    yield _raising(on, first)
    yield (
        said(lambda: on.judged(on.call(first, x_TH=on.sample.inputs.x_TH.double()))),
        "DtypeError" if on.at_fault else on.told(
            "rank 1 refused its call 2 of layer 1 with DtypeError",
            "calls that every rank takes", layer=1, call=2, step=4,
        ),
    )  # fmt: skip
    yield on.goes(first)
    mine, at = (second, (2, 1)) if on.at_fault else (first, (1, 3))
    got = f"{on.by_rank('layer', 1, 2)}; {on.by_rank('call', 3, 1)}"
    yield (
        said(lambda: on.judged(on.call(mine))),
        on.told(got, ONE_CALL, layer=at[0], call=at[1], step=6),
    )
    yield on.goes(second)
    yield from (meant_otherwise if shares_memory(on.part) else another_problem)(on, first)
    # Ranks that share memory were told as they made the part.
    step = 8 if shares_memory(on.part) else 9 + len(on.other_problems(OTHERS))
    if on.part.requires.replicated_input:
        yield _unequal(on, first, step)
        step += 1
    yield on.goes(first)
    refused = {2: "DeviceError", 3: "RuntimeError", 4: "DtypeError"}
    yield journal(on, first, refused=refused, last=step), RIGHT
    yield from journal_of_a_host(on, first)
    yield from _managed(on, first)
    first.prepare_finalize.destroy()
    yield said(lambda: on.judged(on.call(second))), "UnsupportedError"


def _misplaced(on: Stage, kernel: FusedMoEModularKernel) -> tuple[str, str]:
    """Rank 1 takes itself for rank 0: it alone is told, before ranks exchange anything."""
    if not on.at_fault:
        return RIGHT, RIGHT
    first = replace(on.case.problem.parallel, rank=0)
    return said(lambda: str(on.beside(kernel, parallel=first))), "ConfigurationError"


def _elsewhere(on: Stage, kernel: FusedMoEModularKernel) -> tuple[str, str]:
    """Rank 1 passes tensors that are on no device that the group serves."""
    meta, i = torch.device("meta"), on.sample.inputs
    weights = {f.name: getattr(i.weights, f.name) for f in fields(i.weights)}
    away: dict[str, Any] = {n: None if t is None else t.to(meta) for n, t in weights.items()}
    given = {"x_TH": i.x_TH.to(meta), "routing": routing_on(meta, i.routing)}
    told = said(lambda: on.judged(on.call(kernel, **given, weights=ExpertWeights(**away))))
    got, need = (
        "rank 1 refused its call 2 of layer 1 with DeviceError",
        "calls that every rank takes",
    )
    return told, "DeviceError" if on.at_fault else on.told(got, need, layer=1, call=2, step=2)


def _raising(on: Stage, kernel: FusedMoEModularKernel) -> tuple[str, str]:
    """Rank 1's part raises what no call is refused with, before it has told anything."""
    part: Any = kernel.prepare_finalize
    if on.at_fault:
        part.prepare = part.prepare_no_receive = _breaks
    told = said(lambda: on.judged(on.call(kernel)))
    if on.at_fault:
        del part.prepare, part.prepare_no_receive
    got, need = "rank 1 refused its call 2 of layer 1 with an error", "calls that every rank takes"
    return told, "RuntimeError" if on.at_fault else on.told(got, need, layer=1, call=2, step=3)


def _unequal(on: Stage, kernel: FusedMoEModularKernel, step: int) -> tuple[str, str]:
    """Rank 1 passes fewer tokens than the others, of which all must pass as many."""
    i, tokens = on.sample.inputs, len(on.sample.inputs.x_TH)
    fewer = replace(
        i.routing,
        topk_weights_TK=i.routing.topk_weights_TK[1:],
        topk_ids_TK=i.routing.topk_ids_TK[1:],
    )
    counts = (tokens - 1 if rank == VICTIM else tokens for rank in range(on.world_size))
    got = f"T = {', '.join(map(str, counts))} by rank"
    must = on.told(got, "the same tokens on all", layer=1, call=3, step=step)
    return said(lambda: on.judged(on.call(kernel, x_TH=i.x_TH[1:], routing=fewer))), must


def _managed(on: Stage, kernel: FusedMoEModularKernel) -> Lines:
    """Make a manager of the caller's own, told what it otherwise finds out."""
    yield _remembered(kernel), str(HISTORY)
    waits = manager_of(kernel.prepare_finalize).deadline_s
    options = {"deadline_s": waits, "device": on.machine.device, "history": 3}
    manager = manager_class(on.part)(None, **options)
    mine = on.over(manager)
    yield on.goes(mine)
    yield said(partial(_on_a_gpu, mine, on.machine)), "DeviceError"
    mine.prepare_finalize.destroy()  # the manager is not the part's
    yield on.goes(mine)
    yield str(len(manager.last_calls.json_lines().splitlines())), "3"
    yield elsewhere(on, mine)
    yield from too_many(on, mine)
    yield from nearest(on, manager)
    manager.destroy()
    yield said(lambda: on.judged(on.call(mine))), "UnsupportedError"
    inside = getattr(manager, "inside", None)  # memory that the ranks of a host share
    if inside is not None:
        yield said(lambda: str(inside.check_open())), "UnsupportedError"
    yield from on_hosts(on)


def _remembered(kernel: FusedMoEModularKernel) -> str:
    """Note one exchange more than are remembered where nobody says how many; returns how many."""
    notes = manager_of(kernel.prepare_finalize).last_calls
    for _ in range(HISTORY + 1):
        notes.begin(0, "construct", 0)
    return str(len(notes.json_lines().splitlines()))


def _on_a_gpu(kernel: FusedMoEModularKernel, machine: Machine) -> str:
    kernel.prepare_finalize.check_machine(replace(machine, device="cuda", arch=(9, 0)))
    return "not refused"


def _other_memory(on: Stage, first: FusedMoEModularKernel) -> Lines:
    """Ranks share memory as they make a part: one that means another layer is told then."""
    yield on.goes(first)
    yield journal(on, first, refused={}, last=1), RIGHT
    yield from meant_otherwise(on, first)
    second = on.beside(first)
    yield on.goes(second)
    yield on.goes(first)
    yield from _managed(on, first)


def broken_off(on: Stage) -> Lines:
    """Rank 1's experts raise: the others are told at once, and with every call after it.

    So is who has another layer's call in flight.
    """
    kernel = on.kernel()
    beside = on.beside(kernel)
    yield on.goes(kernel)
    finished, pending = on.begun(beside), on.begun(beside)
    yield said(lambda: on.judged(finished.finish())), RIGHT
    yield _broken(on, kernel, lambda: on.call(kernel), at=(1, 2, 4))
    yield _last_record(on, kernel), RIGHT
    got = f"a manager that failed before: {'this rank ' if on.at_fault else ''}{_BROKE}"
    peers = () if on.at_fault else (VICTIM,)
    must = on.error("exchange between ranks", got, "a new one", (1, 2, 4), peers, "combine")
    manager = manager_of(beside.prepare_finalize)

    def exchange() -> torch.Tensor:
        """By whoever was not told, such as another thread."""
        manager.all_reduce(torch.ones(1), step=9, phase="combine").wait()
        return torch.empty(0)

    for call in (pending.finish, lambda: on.call(beside), exchange):
        told = said(lambda call=call: on.judged(call()))  # type: ignore[misc]
        yield re.sub(r"; after N s: .*, need", ", need", told), must
    # What is too long ago has lost its name.
    for steps, layer in ((REMEMBERED - 1, 1), (REMEMBERED, 0)):
        kernel = on.kernel()
        pending = on.begun(kernel)
        for _ in range(steps):
            manager_of(kernel.prepare_finalize).next_step()
        yield _broken(on, kernel, pending.finish, at=(layer, layer, 1))
    yield _without_a_word(on)
    yield on.goes(on.kernel())


def _without_a_word(on: Stage) -> tuple[str, str]:
    """Every rank's library fails, and does not say why, in an exchange of no layer."""
    manager = manager_of(on.kernel().prepare_finalize)
    dist.barrier()  # nobody may still be connecting
    manager._communicator.group = _Silent()

    def exchange() -> torch.Tensor:
        manager.all_reduce(torch.ones(1), step=manager.next_step(), phase="combine").wait()
        return torch.empty(0)

    got = "failed too; after N s: RuntimeError"
    need = f"every rank within {manager.deadline_s:g} s"
    told = said(lambda: on.judged(exchange()))
    must = on.error("exchange between ranks", got, need, (0, 0, 1), on.others, "combine")
    return _SECONDS.sub("N s", told), _SECONDS.sub("N s", must)


class _Silent:
    """A communicator that fails without a word."""

    def allreduce(self, _tensors: list[torch.Tensor]) -> None:
        raise RuntimeError


def _broken(
    on: Stage,
    kernel: FusedMoEModularKernel,
    call: Callable[[], torch.Tensor],
    *,
    at: tuple[int, int, int],
) -> tuple[str, str]:
    """Make a call in which rank 1's experts raise. at: its layer, call and step."""
    if on.at_fault:
        kernel.experts.apply = _breaks  # type: ignore[method-assign]
    start, waits = time.monotonic(), manager_of(kernel.prepare_finalize).deadline_s
    told = said(lambda: on.judged(call()))
    if time.monotonic() - start > 0.9 * waits:
        return "not at once", "at once"
    must = on.error("exchange between ranks", _BROKE, "", at, (VICTIM,), "combine")
    return (
        (told, "RuntimeError") if on.at_fault else (before(told, "; after"), before(must, ", need"))
    )


def _last_record(on: Stage, kernel: FusedMoEModularKernel) -> str:
    """Say what is wrong with the record of the exchange that step 4 broke off; else "right"."""
    lines = manager_of(kernel.prepare_finalize).last_calls.json_lines().splitlines()
    record = json.loads(lines[-1])
    told = record["phase"], record["step"], record["bytes"], record["state"]
    if on.at_fault:
        return RIGHT if told == ("combine", 4, 0, f"failed: {_BROKE}") else str(told)
    return RIGHT if told[1] == 4 and told[3].startswith("failed: ") else str(told)


def _breaks(*_: object, **__: object) -> None:
    raise RuntimeError("these experts are broken")


def journal(on: Stage, kernel: FusedMoEModularKernel, refused: dict[int, str], *, last: int) -> str:
    """Return what is wrong with the records that a manager keeps of its exchanges; else "right".

    refused: in which steps rank 1 refused its call, and with what. last: the last step.
    """
    manager = manager_of(kernel.prepare_finalize)
    records = [json.loads(line) for line in manager.last_calls.json_lines().splitlines()]
    now, phases = time.time(), ["construct", "counts", "dispatch", "combine"]
    places = [(record["step"], phases.index(record["phase"])) for record in records]
    calls = [place for place in places if place[0]]  # making a part may take more than one
    often = max((calls.count(place) for place in calls), default=1)
    most = getattr(on.part, "most_chunks", 1)  # of a call's rows, each an exchange of its own
    if places != sorted(places) or often > most or places[0] != (0, 0):
        return f"exchanges {places}"
    missing = _of_calls(on, kernel, last) - {(r["step"], r["phase"]) for r in records}
    if missing or places[-1][0] != last:
        return f"exchanges up to {places[-1]}, none of {sorted(missing)}"
    for record in records:
        gone = on.at_fault and record["step"] in refused
        done = "done" if counts_calls(on.part) or not record["step"] else "launched"
        state = f"refused: {refused[record['step']]}" if gone else done
        if record["state"] != state or record["rank"] != on.rank:
            return f"not {state} on rank {on.rank}: {record}"
        if not now - 60 < record["started_s"] <= record["ended_s"] <= now:
            return f"not just now: {record}"
        if (record["phase"] == "counts") > (record["bytes"] > 0):
            return f"bytes: {record}"
    return RIGHT


def _of_calls(on: Stage, kernel: FusedMoEModularKernel, last: int) -> set[tuple[int, str]]:
    """Return steps and phases that have a record: of each step counts, of right calls rows, too.

    The first and the last are right. Rows that move in memory within a host have no record.
    """
    found = {(step, "counts") for step in range(1, last + 1) if counts_calls(on.part)}
    one_host = on.case.problem.parallel.hosts == 1
    if one_host and hasattr(manager_of(kernel.prepare_finalize), "inside"):
        return found
    phases = ("combine",) if on.part.requires.replicated_input else ("dispatch", "combine")
    return found | {(step, phase) for step in (1, last) for phase in phases}


def finished_by_turns(on: Stage) -> Lines:
    """Two calls in flight, which rank 1 finishes in another order: the next call tells it."""
    kernel = on.kernel()
    pending = [on.begun(kernel) for _ in range(2)]
    for each in reversed(pending) if on.at_fault else pending:
        each.finish()
    told = said(lambda: on.judged(on.call(kernel)))
    got, need = (
        "the exchanges before it in another order",
        "one layer, call, pairing, step and order",
    )
    yield told, on.told(got, need, layer=1, call=3, step=3)


_SCENES: dict[str, Callable[[Stage], Lines]] = {
    "misunderstood": misunderstood,
    "broken-off": broken_off,
    "late": late,
    "stays-out": stays_out,
    "finished-by-turns": finished_by_turns,
}


def play(fault: str, stage: Stage) -> tuple[tuple[str, str], ...]:
    """Play a scene to its end, as other ranks wait for this one; what calls said, and must say."""
    return tuple(_SCENES[fault](stage))
