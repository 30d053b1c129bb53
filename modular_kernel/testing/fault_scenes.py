"""Scenes in which ranks do not mean the same call, and what each rank must be told.

A case over ranks may have a fault, which names a scene. Rank 1 is at fault in it; then the group
goes on, or is of no more use, as the scene says. What every call says is compared word by word with
what is written here, as layer, call and step are counted here: a rank that is told something else,
or nothing, fails the check.
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from modular_kernel.catalog import load_catalog, make_kernel
from modular_kernel.contracts import PrepareAndFinalize
from modular_kernel.errors import CommunicationError
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.settings import deadline
from modular_kernel.testing.case import Case
from modular_kernel.types import Machine

if TYPE_CHECKING:
    from modular_kernel.testing.sample import Sample

VICTIM = 1
DEADLINE_S = 1.5  # of a scene in which a rank stays away
_PATIENCE_S = 2.0  # beyond it, until nobody waits any more
_RIGHT = "right"
_ONE_CALL = "one layer, call, pairing, step and order"
_SECONDS = re.compile(r"\d+\.\d+ s")
_DIGITS = re.compile(r"[0-9a-f]{8,}")

# What one call said, and what it must say.
Lines = Iterator[tuple[str, str]]


@dataclass(frozen=True)
class Stage:
    """One rank's place in a scene. sample: its share of a call that is right.

    build: makes a kernel of a case over the group.
    """

    case: Case
    machine: Machine
    sample: "Sample"
    build: Callable[[Case, Machine, bool], FusedMoEModularKernel]

    @property
    def rank(self) -> int:
        return self.case.problem.parallel.rank

    @property
    def world_size(self) -> int:
        return self.case.problem.parallel.world_size

    @property
    def at_fault(self) -> bool:
        return self.rank == VICTIM

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.world_size) if rank != self.rank)

    @cached_property
    def replicated(self) -> bool:
        part = load_catalog().prepare_finalize(self.case.prepare_finalize)
        return part.requires.replicated_input

    def kernel(self) -> FusedMoEModularKernel:
        """Make a kernel with a manager of its own."""
        return self.build(self.case, self.machine, True)

    def beside(self, kernel: FusedMoEModularKernel, **changes: Any) -> FusedMoEModularKernel:
        """Make another layer on the manager of `kernel`; with changes, rank 1 means another one."""
        problem, part = self.case.problem, kernel.prepare_finalize
        if changes and self.at_fault:
            problem = replace(problem, **changes)
        names, manager = (self.case.prepare_finalize, self.case.experts), manager_of(part)
        return make_kernel(*names, problem, group=manager, machine=self.machine)

    def call(self, kernel: FusedMoEModularKernel, **changes: Any) -> torch.Tensor:
        """Call it; rank 1 with other tensors than its own."""
        given: dict[str, Any] = {"x_TH": self.sample.x_TH(), "routing": self.sample.inputs.routing}
        if self.at_fault:
            given |= changes
        out = kernel(given["x_TH"], self.sample.inputs.weights, given["routing"]).clone()
        # A part whose errors come late raises them here.
        getattr(kernel.prepare_finalize, "check", lambda: None)()
        return out

    def goes(self, kernel: FusedMoEModularKernel) -> tuple[str, str]:
        """All mean the same: the call is right."""
        return said(lambda: self.judged(self.call(kernel))), _RIGHT

    def judged(self, out: torch.Tensor) -> str:
        return "; ".join(self.sample.compare(out).problems) or _RIGHT

    def told(self, got: str, need: str, *, layer: int, call: int, step: int) -> str:
        """What counts tell every rank: those that are not rank 1 are to look at it."""
        peers = self.others if self.at_fault else (VICTIM,)
        return self.error("ranks of one call", got, need, (layer, call, step), peers, "counts")

    def error(
        self,
        what: str,
        got: str,
        need: str,
        at: tuple[int, int, int],
        peers: tuple[int, ...],
        phase: str,
    ) -> str:
        """at: layer, call and step; no layer is named where it is 0."""
        layer, call, step = at
        named = f"{what}, call {call} of layer {layer}" if layer else what
        error = CommunicationError(
            named, got=got, need=need, rank=self.rank, phase=phase, step=step, peers=peers
        )
        error.layer, error.call = layer, call
        return in_words(error)

    def by_rank(self, name: str, all_but_one: object, of_one: object) -> str:
        """`name` of every rank, where rank 1 has another."""
        ranks = range(self.world_size)
        values = ", ".join(str(of_one if rank == VICTIM else all_but_one) for rank in ranks)
        return f"{name} {values} by rank"


def said(call: Callable[[], str]) -> str:
    """What a call says, or raises."""
    try:
        return call()
    except CommunicationError as error:
        return in_words(error)
    # A faulty part may raise anything.
    except Exception as error:  # noqa: BLE001
        return type(error).__name__


def in_words(error: CommunicationError) -> str:
    """An error as text, layer and call too; without times and digests."""
    facts = error.rank, error.phase, error.step, error.layer, error.call, error.peers
    return _DIGITS.sub("#", _SECONDS.sub("N s", f"{facts} {error}"))


def misunderstood(on: Stage) -> Lines:
    """A call that rank 1 refuses, another layer, another problem: all are told, and go on."""
    first = on.kernel()
    if not counts_calls(type(first.prepare_finalize)):
        yield from _other_memory(on, first)
        return
    second = on.beside(first)
    yield on.goes(first)
    yield (
        said(lambda: on.judged(on.call(first, x_TH=on.sample.inputs.x_TH.double()))),
        "DtypeError" if on.at_fault else on.told(
            "rank 1 refused its call 2 of layer 1 with DtypeError",
            "calls that every rank takes", layer=1, call=2, step=2,
        ),
    )  # fmt: skip
    yield on.goes(first)
    mine, at = (second, (2, 1)) if on.at_fault else (first, (1, 3))
    got = f"{on.by_rank('layer', 1, 2)}; {on.by_rank('call', 3, 1)}"
    yield (
        said(lambda: on.judged(on.call(mine))),
        on.told(got, _ONE_CALL, layer=at[0], call=at[1], step=4),
    )
    yield on.goes(second)
    scaled = on.beside(first, routed_scaling_factor=2.0)
    got = "another dtype, scheme, placement, activation or pairing"
    yield said(lambda: on.judged(on.call(scaled))), on.told(got, _ONE_CALL, layer=3, call=1, step=6)
    smaller = on.beside(first, tokens=on.case.problem.tokens + 1)
    tokens = on.case.problem.tokens
    got = on.by_rank("tokens", tokens, tokens + 1)
    yield (
        said(lambda: on.judged(on.call(smaller))),
        on.told(got, _ONE_CALL, layer=4, call=1, step=7),
    )
    if on.replicated:
        yield _unequal(on, first)
    yield on.goes(first)
    yield journal(on, first, refused=2), _RIGHT
    first.prepare_finalize.destroy()
    yield said(lambda: on.judged(on.call(second))), "UnsupportedError"


def _unequal(on: Stage, kernel: FusedMoEModularKernel) -> tuple[str, str]:
    """Rank 1 passes fewer tokens than the others, of which all must pass as many."""
    i, tokens = on.sample.inputs, len(on.sample.inputs.x_TH)
    fewer = replace(
        i.routing,
        topk_weights_TK=i.routing.topk_weights_TK[1:],
        topk_ids_TK=i.routing.topk_ids_TK[1:],
    )
    counts = (tokens - 1 if rank == VICTIM else tokens for rank in range(on.world_size))
    got = f"T = {', '.join(map(str, counts))} by rank"
    must = on.told(got, "the same tokens on all", layer=1, call=3, step=8)
    return said(lambda: on.judged(on.call(kernel, x_TH=i.x_TH[1:], routing=fewer))), must


def _other_memory(on: Stage, first: FusedMoEModularKernel) -> Lines:
    """Ranks share memory as they make a part: one that means another layer is told then."""
    yield on.goes(first)
    peers = on.others if on.at_fault else (VICTIM,)
    must = on.error("ranks that share buffers", "meaning", "", (0, 0, 0), peers, "construct")
    told = said(lambda: str(on.beside(first, routed_scaling_factor=2.0)))
    yield _before(told, " T"), _before(must, ", need")
    second = on.beside(first)
    yield on.goes(second)
    yield on.goes(first)


def broken_off(on: Stage) -> Lines:
    """Rank 1's experts raise: the others are told at once, and with every call after it."""
    kernel = on.kernel()
    beside = on.beside(kernel)
    yield on.goes(kernel)
    if on.at_fault:
        kernel.experts.apply = _breaks  # type: ignore[method-assign]
    why = "broke off its call: RuntimeError"
    need = "every rank within N s"
    told = said(lambda: on.judged(on.call(kernel)))
    if on.at_fault:
        yield told, "RuntimeError"
    else:
        yield (
            told.partition("; after")[0],
            on.error("exchange between ranks", why, need, (1, 2, 2), (VICTIM,), "combine")
            .partition(", need")[0],
        )  # fmt: skip
    told = said(lambda: on.judged(on.call(beside)))
    got = f"a manager that failed before: {'this rank ' if on.at_fault else ''}{why}"
    peers = () if on.at_fault else (VICTIM,)
    must = on.error("exchange between ranks", got, "a new one", (1, 2, 2), peers, "combine")
    yield re.sub(r"; after N s: .*, need", ", need", told), must
    yield on.goes(on.kernel())


def _breaks(*_: object, **__: object) -> None:
    raise RuntimeError("these experts are broken")


def late(on: Stage) -> Lines:
    """Rank 1 stays away for longer than the deadline: the others name it, and so does it them."""
    with deadline(DEADLINE_S):
        kernel = on.kernel()
    counts = counts_calls(type(kernel.prepare_finalize))
    yield on.goes(kernel)
    dist.barrier()
    if on.at_fault:
        time.sleep(DEADLINE_S + _PATIENCE_S)
    start = time.monotonic()
    told = said(lambda: on.judged(on.call(kernel)))
    seconds = time.monotonic() - start
    if counts:
        why = "gave up: this rank came N s late" if on.at_fault else "no sign of life"
        layer, phase = (1, 2, 2), "counts"
    else:
        why = f"no flag of call 2 from rank(s) {VICTIM}"
        layer, phase = (0, 0, 2), "dispatch"
    peers = on.others if on.at_fault else (VICTIM,)
    if counts or not on.at_fault:
        must = on.error("exchange between ranks", why, "", layer, peers, phase)
        yield _before(told, "; after", ", need"), _before(must, ", need")
        least = 0.0 if on.at_fault else DEADLINE_S - 0.1
        in_time = least <= seconds < 2 * _PATIENCE_S
        yield ("in time" if in_time else f"{seconds:.1f} s"), "in time"
        again = said(lambda: on.judged(on.call(kernel)))
        before = "a manager that failed before: " if counts else ""
        must = on.error("exchange between ranks", before + why, "", layer, peers, phase)
        yield _before(again, "; after", ", need"), _before(must, ", need")
    dist.barrier()
    yield on.goes(on.kernel())


def _before(text: str, *ends: str) -> str:
    """`text` up to the first of `ends` that is in it."""
    for end in ends:
        text = text.partition(end)[0]
    return text


def journal(on: Stage, kernel: FusedMoEModularKernel, refused: int) -> str:
    """What is wrong with the records that a manager keeps of its exchanges; else "right".

    refused: the step in which rank 1 refused its call.
    """
    manager = manager_of(kernel.prepare_finalize)
    records = [json.loads(line) for line in manager.last_calls.json_lines().splitlines()]
    now, phases = time.time(), ["construct", "counts", "dispatch", "combine"]
    places = [(record["step"], phases.index(record["phase"])) for record in records]
    if places != sorted(set(places)) or places[0] != (0, 0):
        return f"exchanges {places}"
    for record in records:
        gone = on.at_fault and record["step"] == refused
        state = "refused: DtypeError" if gone else "done"
        if record["state"] != state or record["rank"] != on.rank:
            return f"not {state} on rank {on.rank}: {record}"
        if not now - 60 < record["started_s"] <= record["ended_s"] <= now:
            return f"not just now: {record}"
        if (record["phase"] == "counts") > (record["bytes"] > 0):
            return f"bytes: {record}"
    return _RIGHT


def finished_by_turns(on: Stage) -> Lines:
    """Two calls in flight, which rank 1 finishes in another order: the next call tells it."""
    kernel = on.kernel()
    i = on.sample.inputs
    pending = [kernel.start(on.sample.x_TH(), i.weights, i.routing) for _ in range(2)]
    for each in reversed(pending) if on.at_fault else pending:
        each.finish()
    told = said(lambda: on.judged(on.call(kernel)))
    got, need = (
        "the exchanges before it in another order",
        "one layer, call, pairing, step and order",
    )
    yield told, on.told(got, need, layer=1, call=3, step=3)


def manager_of(part: PrepareAndFinalize) -> Any:
    """What a part exchanges through."""
    return part.manager  # type: ignore[attr-defined]


def counts_calls(part: type[PrepareAndFinalize]) -> bool:
    """Whether ranks tell each other layer and call before they exchange anything."""
    return hasattr(getattr(part, "manager_class", None), "next_layer")


def has_scenes(part: type[PrepareAndFinalize], machine: Machine) -> tuple[str, ...]:
    """Names of the scenes that are played with a part; of a library's none, nor on a GPU.

    There the matrix of faults is what tells whether ranks end in time.
    """
    if machine.device != "cpu" or not hasattr(part, "manager_class"):
        return ()
    if part.requires.packages not in ((), ("triton",)):
        return ()
    return tuple(name for name in SCENES if counts_calls(part) or name in _WITHOUT_COUNTS)


SCENES: dict[str, Callable[[Stage], Lines]] = {
    "misunderstood": misunderstood,
    "broken-off": broken_off,
    "late": late,
    "finished-by-turns": finished_by_turns,
}
# Where nothing is told before rows are sent, these are noticed by it.
_WITHOUT_COUNTS = ("misunderstood", "late")


def play(fault: str, stage: Stage) -> tuple[tuple[str, str], ...]:
    """Play a scene; what its calls said, and must say. It ends with the first that differs."""
    lines = list[tuple[str, str]]()
    for said_now, must in SCENES[fault](stage):
        lines.append((said_now, must))
        if said_now != must:
            break
    return tuple(lines)
