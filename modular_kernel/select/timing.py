"""Times pairings beside the default one at one number of tokens.

Each is built, checked against the float64 oracle and called by turns with the default, so that what
changes with time (clocks, power) changes for both; what one round takes over what the default takes
in the same round is one sample of their ratio. What cannot be captured in a CUDA graph is timed as
eager calls. Over ranks the slowest rank counts.
"""

import gc
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median, quantiles
from typing import TypeVar

import torch

from modular_kernel.catalog import make_kernel
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.measure.timing import Call, capture, clock_of, samples_ms, wiper_of
from modular_kernel.select.budget import Budget
from modular_kernel.select.inputs import SelectSituation
from modular_kernel.select.memory import free_bytes, gigabytes
from modular_kernel.select.process_group import Team, any_failure, slowest
from modular_kernel.select.record import Bucket, Pair, TimedOutcome
from modular_kernel.spec.problem import Machine
from modular_kernel.tensors import Routing
from modular_kernel.workspace import workspace_bytes

_HOPELESS = 1.25  # times the default in two rounds: not timed again
_FEWEST_ROUNDS, _MOST_ROUNDS = 9, 41
_TARGET_S = 0.06  # of the device, for each pairing of a comparison
_OF_FREE = 0.9  # of the free memory may be a plan's
_LONGEST = 300

PlannedCall = Callable[[torch.Tensor, Routing], torch.Tensor]
T = TypeVar("T")


@dataclass
class _Ready:
    """A pairing that gave right numbers. runs: what one round runs in turn. trouble: why a later
    run failed here, if one did. seconds: of a call, in every round that it was timed in."""

    pair: Pair
    kernel: FusedMoEModularKernel
    runs: Sequence[Call]
    mode: str
    trouble: str = ""
    seconds: list[float] = field(default_factory=list)

    def close(self) -> None:
        """Let go of what its part holds of other ranks."""
        _close(self.kernel)


def _close(kernel: FusedMoEModularKernel) -> None:
    destroy = getattr(kernel.prepare_finalize, "destroy", None)
    if destroy is not None:
        destroy()


@dataclass
class Stopwatch:
    """Times pairings in one situation.

    order: the valid pairings, the default first. graph: those that can be captured. hopeless: how
    far behind the default, times its time, a pairing is timed no further. outcomes: begin with
    those that are known.
    """

    situation: SelectSituation
    order: Sequence[Pair]
    graph: frozenset[Pair]
    machine: Machine
    team: Team
    budget: Budget
    hopeless: float = _HOPELESS
    outcomes: dict[Pair, TimedOutcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._device = self.situation.weights.w1.device
        self._clock = clock_of(self._device)
        self._wipe = wiper_of(self._device) if self.situation.flush else None

    def bucket(self, challengers: Iterable[Pair]) -> Bucket:
        """Time the default and the challengers; where the budget ends before that, those so far.

        A default that fails gives way to the next pairing of the order.
        """
        challengers = tuple(challengers)
        for pair in self.order:
            if self._has_failed(pair):
                continue
            if not self.budget.allows(2):  # this one, and one to compare it with
                break
            with self.budget.step():
                default = self._default(pair)
            if default is None:
                continue
            try:
                self._time(challengers, default)
                why = any_failure(self.team, default.trouble)
                if not why:
                    us = median(default.seconds) * 1e6
                    self.outcomes[pair] = TimedOutcome(pair, us, 1.0, mode=default.mode)
                    break
                # Ratios to a pairing that failed mean nothing.
                self.outcomes = {p: o for p, o in self.outcomes.items() if o.us is None}
                self.outcomes[pair] = TimedOutcome(pair, why=why)
            finally:
                default.close()
                default = None
                self._free()
        if self._device.type == "cuda":
            gc.collect()  # a tenth of a second: not after each candidate
        working = (pair for pair in self.order if not self._has_failed(pair))
        first = next(working, self.order[0])
        outcomes = tuple(self.outcomes[pair] for pair in self.order if pair in self.outcomes)
        return Bucket(self.situation.problem.tokens, first, outcomes)

    def _has_failed(self, pair: Pair) -> bool:
        return pair in self.outcomes and self.outcomes[pair].us is None

    def _default(self, pair: Pair) -> _Ready | None:
        """Make ready what the others are compared with; note why that fails."""
        ready, why = self._ready(pair)
        if ready is not None:
            ready.seconds = slowest(self.team, [self._once(ready) for _ in range(2)])
            why = any_failure(self.team, ready.trouble)
            if not why:
                return ready
            ready.close()
        self.outcomes[pair] = TimedOutcome(pair, why=why)
        return None

    def _time(self, challengers: Sequence[Pair], default: _Ready) -> None:
        """Note the outcome of every challenger that there is time for."""
        for pair in challengers:
            if pair == default.pair or pair in self.outcomes:
                continue
            if not self.budget.allows():
                return
            with self.budget.step():
                outcome = self._against(pair, default)
            if outcome is None:
                return
            self.outcomes[pair] = outcome

    def _against(self, pair: Pair, default: _Ready) -> TimedOutcome | None:
        """Build a pairing, and time it by turns with the default; None if the default fails."""
        ready, why = self._ready(pair)
        if ready is None:
            return TimedOutcome(pair, why=why)
        try:
            times = self._rounds(ready, default, 2)
            rough = min(times) > self.hopeless * min(default.seconds[-2:])
            if not rough:
                longest = max(*times, *default.seconds[-2:]) * len(self.situation.timed)
                count = int(_TARGET_S / longest) if longest else _MOST_ROUNDS
                count = min(max(count, _FEWEST_ROUNDS), _MOST_ROUNDS)
                times = self._rounds(ready, default, count)
            if any_failure(self.team, default.trouble):
                return None
            why = any_failure(self.team, ready.trouble)
            if why:
                return TimedOutcome(pair, why=why)
            return _compared(ready, times, default.seconds[-len(times) :], rough=rough)
        finally:
            ready.close()
            ready = None
            self._free()

    def _rounds(self, ready: _Ready, default: _Ready, count: int) -> list[float]:
        """Time both in each round, the one that is first in turn; returns the seconds of `ready`.

        Those of the default are added to its own.
        """
        own: list[float] = []
        base: list[float] = []
        for number in range(count):
            pairings = ((ready, own), (default, base))
            for one, times in pairings if number % 2 else reversed(pairings):
                times.append(self._once(one))
        default.seconds += slowest(self.team, base)
        return slowest(self.team, own)

    def _once(self, ready: _Ready) -> float:
        """Seconds of a call in one run of all. Ranks start together, none after one has failed."""
        if any(self.team.all(bool(ready.trouble))):
            return math.inf
        try:
            return self._run(ready)
        # As in _guarded: whatever it is, it is this candidate's.
        except Exception as error:  # noqa: BLE001
            ready.trouble = _told(error)
            return math.inf

    def _run(self, ready: _Ready) -> float:
        times = samples_ms(ready.runs, self._clock, self._wipe)
        return sum(times) / len(self.situation.timed) / 1e3

    def _ready(self, pair: Pair) -> tuple[_Ready | None, str]:
        """Built, checked and captured; or why not."""
        kernel, why = self._guarded(lambda: self._built(pair))
        if kernel is None:
            return None, why
        ready, why = self._proved(kernel, pair)
        if ready is None:
            _close(kernel)
        return ready, why

    def _proved(self, kernel: FusedMoEModularKernel, pair: Pair) -> tuple[_Ready | None, str]:
        """Each step is decided by all: a rank that stopped halfway would leave others waiting."""
        call, why = self._guarded(lambda: self._planned(kernel))
        if call is None:
            return None, why
        outputs, why = self._guarded(lambda: self._outputs(call))
        if outputs is None:
            return None, why
        _, why = self._guarded(lambda: self._judge(outputs))
        return (None, why) if why else self._guarded(lambda: self._captured(kernel, call, pair))

    def _built(self, pair: Pair) -> FusedMoEModularKernel:
        problem = self.situation.problem
        kernel = make_kernel(*pair, problem, group=self.team.group, machine=self.machine)
        need = workspace_bytes(kernel.workspace_specs(problem.tokens))
        free = free_bytes(self._device)
        if free is not None and need > _OF_FREE * free:
            raise MemoryError(f"its plan takes {gigabytes(need)}, {gigabytes(free)} are free")
        return kernel

    def _planned(self, kernel: FusedMoEModularKernel) -> PlannedCall:
        plan, weights = kernel.plan(), self.situation.weights
        return lambda x_TH, routing: plan(x_TH, weights, routing)

    def _outputs(self, call: PlannedCall) -> list[torch.Tensor]:
        """For the truths' inputs. What a call does not write cannot pass by what was there."""
        call(*self.situation.truths[0].given).fill_(math.nan)
        outputs = []
        for truth in self.situation.truths:
            out = call(*truth.given)
            outputs.append(out.clone())
            out.fill_(math.nan)
        self._clock.wait()
        return outputs

    def _judge(self, outputs: Sequence[torch.Tensor]) -> None:
        why = self.situation.wrong(outputs)
        if why:
            raise ArithmeticError(why)

    def _captured(self, kernel: FusedMoEModularKernel, call: PlannedCall, pair: Pair) -> _Ready:
        """Return what one round runs: a graph of all calls, or of each alone; or the calls."""
        calls = [partial(call, *given) for given in self.situation.timed]
        for one in calls:
            one()
        groups = [[one] for one in calls] if self.situation.flush else [calls]
        if self._device.type == "cuda" and pair in self.graph:
            graphs = capture(groups)
            if graphs is not None:
                return _Ready(pair, kernel, graphs, "graph")
        mode = "eager" if self._device.type == "cuda" else "cpu"
        return _Ready(pair, kernel, [partial(_all, group) for group in groups], mode)

    def _guarded(self, work: Callable[[], T]) -> tuple[T | None, str]:
        """Run `work`; return its result, and why it has none on some rank, if so."""
        own, result = "", None
        try:
            result = work()
        # A candidate can fail in any way; that is its outcome, not the end of the choice.
        except Exception as error:  # noqa: BLE001
            own = _told(error)
        why = any_failure(self.team, own)
        if why and isinstance(result, FusedMoEModularKernel):
            _close(result)  # built here, and not on another rank
        return (None, why) if why else (result, "")

    def _free(self) -> None:
        if self._device.type == "cuda":  # elsewhere memory goes with its last owner
            torch.cuda.empty_cache()


def _compared(
    ready: _Ready, times: Sequence[float], default: Sequence[float], *, rough: bool
) -> TimedOutcome:
    """Return the outcome of a pairing timed in the same rounds as the default."""
    us = (min(times) if rough else median(times)) * 1e6
    if rough:
        ratio, noise = min(times) / min(default), 0.0
    else:
        ratios = [mine / other for mine, other in zip(times, default, strict=True)]
        quarters = quantiles(ratios, n=4)
        ratio, noise = median(ratios), (quarters[2] - quarters[0]) / len(ratios) ** 0.5
    return TimedOutcome(ready.pair, us, ratio, noise, rough, ready.mode)


def _told(error: Exception) -> str:
    """One line; this module's own findings without their type."""
    text = str(error).partition("\n")[0]
    plain = isinstance(error, ArithmeticError | MemoryError)
    return (text if plain else f"{type(error).__name__}: {text}")[:_LONGEST]


def _all(calls: Sequence[Call]) -> torch.Tensor:
    last = calls[0]()
    for call in calls[1:]:
        last = call()
    return last
