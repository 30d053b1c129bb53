"""Times the valid pairings at one number of tokens.

Each is built, checked against the float64 oracle and timed once, alone. Those that come near the
fastest are then timed by turns, so that what changes with time (clocks, power) changes for all.
What cannot be captured in a CUDA graph is timed as eager calls. Over ranks the slowest rank counts.
"""

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TypeVar

import torch

from modular_kernel.catalog import make_kernel
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.measure.timing import Call, capture, clock_of, samples_ms, wiper_of
from modular_kernel.select.candidates import Candidates
from modular_kernel.select.inputs import SelectSituation
from modular_kernel.select.memory import free_bytes, gigabytes
from modular_kernel.select.record import WORTH, Bucket, Pair, TimedOutcome
from modular_kernel.select.team import Team, any_failure, slowest
from modular_kernel.tensors import Routing
from modular_kernel.types import Machine
from modular_kernel.workspace import workspace_bytes

_NEAR = 1.25  # times the fastest when timed alone: timed by turns too
_HOPELESS = 3.0  # times the fastest in one run: not timed again
_SAMPLES = 3  # more, of what is timed alone and not hopeless
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 25
_TARGET_S = 0.02  # of the device, for each candidate of a comparison
_OF_FREE = 0.9  # of the free memory may be a plan's
_LONGEST = 300

Late = Callable[[], bool]
PlannedCall = Callable[[torch.Tensor, Routing], torch.Tensor]
T = TypeVar("T")


@dataclass
class _Ready:
    """A candidate that gave right numbers. runs: what one round runs in turn. trouble: why a later
    run failed here, if one did."""

    kernel: FusedMoEModularKernel
    runs: Sequence[Call]
    mode: str
    trouble: str = ""

    def close(self) -> None:
        """Let go of what its part holds of other ranks."""
        destroy = getattr(self.kernel.prepare_finalize, "destroy", None)
        if destroy is not None:
            destroy()


@dataclass
class Stopwatch:
    """Times the candidates of one situation. late: whether the budget is spent, alike on all ranks;
    asked before each candidate. near: how far from the fastest one may be, times the fastest, to be
    timed by turns; infinity times all of them so. outcomes: begin with those that are known."""

    situation: SelectSituation
    candidates: Candidates
    machine: Machine
    team: Team
    late: Late
    near: float = _NEAR
    outcomes: dict[Pair, TimedOutcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._device = self.situation.weights.w1.device
        self._clock = clock_of(self._device)
        self._wipe = wiper_of(self._device) if self.situation.flush else None

    def bucket(self) -> Bucket:
        """Every valid pairing's outcome; where the budget ends before that, those so far."""
        tokens = self.situation.problem.tokens
        for pair in self.candidates.order:
            if pair not in self.candidates.valid[tokens] or pair in self.outcomes:
                continue
            if pair in self.candidates.silent:
                self.outcomes[pair] = TimedOutcome(pair, why=self.candidates.silent[pair])
                continue
            if self.late():
                return Bucket(tokens, tuple(self.outcomes.values()))
            self.outcomes[pair] = self._alone(pair)
        self._by_turns()
        # By turns what was fastest alone may take longer, and leave another in front, or so close
        # that it is chosen where the bucket before chose it.
        while any(o.rough and self._is_close(o) for o in self.outcomes.values()):
            self._by_turns()
        if self._device.type == "cuda":
            gc.collect()  # a tenth of a second: not after each candidate
        return Bucket(tokens, tuple(self.outcomes.values()))

    @property
    def _fastest(self) -> float:
        return min((o.us for o in self.outcomes.values() if o.us is not None), default=math.inf)

    def _is_close(self, outcome: TimedOutcome) -> bool:
        return outcome.us is not None and outcome.us <= WORTH * self._fastest

    def _alone(self, pair: Pair) -> TimedOutcome:
        ready, why = self._ready(pair)
        if ready is None:
            return TimedOutcome(pair, why=why)
        try:
            samples = self._samples(ready)
            why = any_failure(self.team, ready.trouble)
            if why:
                return TimedOutcome(pair, why=why)
            return TimedOutcome(pair, min(samples) * 1e6, True, ready.mode)
        finally:
            ready.close()
            ready = None
            self._free()

    def _samples(self, ready: _Ready) -> list[float]:
        """Seconds of a call, the slowest rank's; fewer of one that is hopeless."""
        times = slowest(self.team, [self._once(ready) for _ in range(2)])
        if min(times) * 1e6 > _HOPELESS * self._fastest:
            return times
        return times + slowest(self.team, [self._once(ready) for _ in range(_SAMPLES)])

    def _by_turns(self) -> None:
        """Time again, by turns, what came near the fastest."""
        limit, timed = self.near * self._fastest, self.outcomes.items()
        near = [pair for pair, o in timed if o.us is not None and o.us <= limit]
        ready: dict[Pair, _Ready] = {}
        try:
            for pair in near:
                made, why = self._ready(pair)
                if made is None:
                    self.outcomes[pair] = TimedOutcome(pair, why=why)
                else:
                    ready[pair] = made
            if ready:
                self._compare(ready)
        finally:
            for made in ready.values():
                made.close()
            ready.clear()
            self._free()

    def _compare(self, ready: Mapping[Pair, _Ready]) -> None:
        longest = max(self.outcomes[pair].us or 1.0 for pair in ready) * 1e-6
        calls = len(self.situation.timed)
        rounds = int(_TARGET_S / (longest * calls))
        rounds = min(max(rounds, _LEAST_ROUNDS), _MOST_ROUNDS)
        times: dict[Pair, list[float]] = {pair: [] for pair in ready}
        for _ in range(rounds):
            for pair, made in ready.items():
                times[pair].append(self._once(made))
        for pair, own in times.items():
            us = median(slowest(self.team, own)) * 1e6
            why = any_failure(self.team, ready[pair].trouble)
            timed = TimedOutcome(pair, us, False, ready[pair].mode)
            self.outcomes[pair] = TimedOutcome(pair, why=why) if why else timed

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
            _Ready(kernel, (), "").close()
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
        if self._device.type == "cuda" and pair in self.candidates.graph:
            graphs = capture(groups)
            if graphs is not None:
                return _Ready(kernel, graphs, "graph")
        mode = "eager" if self._device.type == "cuda" else "cpu"
        return _Ready(kernel, [partial(_all, group) for group in groups], mode)

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
            _Ready(result, (), "").close()  # built here, and not on another rank
        return (None, why) if why else (result, "")

    def _free(self) -> None:
        if self._device.type == "cuda":  # elsewhere memory goes with its last owner
            torch.cuda.empty_cache()


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
