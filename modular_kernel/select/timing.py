"""Timing of pairings against the default at one number of tokens.

Each pairing is built and compared with the float64 reference. It is then timed in rounds that
alternate with the default, so that drift (clocks, power) affects both. The ratio of the two times
in one round is one sample. Calls that cannot be captured in a CUDA graph are timed eagerly. Over
several ranks, the time is that of the slowest rank.
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
from modular_kernel.measure.timing import Call, capture, clock_of, l2_flusher, samples_ms
from modular_kernel.select.budget import Budget, free_bytes, gigabytes, ranks_sharing_memory
from modular_kernel.select.inputs import SelectWorkload
from modular_kernel.select.process_group import Ranks, first_failure, max_over_ranks
from modular_kernel.select.record import Bucket, Pair, TimedOutcome
from modular_kernel.spec.problem import Machine
from modular_kernel.tensors import Routing
from modular_kernel.workspace import workspace_bytes

_MAX_RATIO = 1.25  # timing stops after two rounds if the ratio to the default is larger
_MIN_ROUNDS, _MAX_ROUNDS = 9, 41
_TARGET_S = 0.06  # seconds on the device for each of the two pairings
_MAX_FREE_FRACTION = 0.9  # of the free memory, for a plan
_MAX_CHARACTERS = 300

PlannedCall = Callable[[torch.Tensor, Routing], torch.Tensor]
T = TypeVar("T")


@dataclass
class _Prepared:
    """A pairing with correct results, ready to be timed.

    runs: the calls or graphs of one round. mode: see TimedOutcome. failure: message of a failure
    during timing, or "". seconds: time of one call, by round.
    """

    pair: Pair
    kernel: FusedMoEModularKernel
    runs: Sequence[Call]
    mode: str
    failure: str = ""
    seconds: list[float] = field(default_factory=list)

    def close(self) -> None:
        """Release the part's resources that span ranks."""
        _close(self.kernel)


def _close(kernel: FusedMoEModularKernel) -> None:
    destroy = getattr(kernel.prepare_finalize, "destroy", None)
    if destroy is not None:
        destroy()


@dataclass
class Stopwatch:
    """Timing of pairings on one workload.

    order: the valid pairings, the default first. graph: those that can be captured in a CUDA graph.
    max_ratio: see _MAX_RATIO. outcomes: those known before, to which timing adds.
    """

    workload: SelectWorkload
    order: Sequence[Pair]
    graph: frozenset[Pair]
    machine: Machine
    ranks: Ranks
    budget: Budget
    max_ratio: float = _MAX_RATIO
    outcomes: dict[Pair, TimedOutcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._device = self.workload.weights.w1.device
        self._clock = clock_of(self._device)
        self._sharing_ranks = ranks_sharing_memory(self.ranks, self._device)
        self._flush_l2 = l2_flusher(self._device) if self.workload.flush else None

    def bucket(self, challengers: Iterable[Pair]) -> Bucket:
        """Time the default and the challengers, as far as the budget allows.

        If the default fails, the next pairing of the order becomes the default.
        """
        challengers = tuple(challengers)
        for pair in self.order:
            if self._has_failed(pair):
                continue
            if not self.budget.allows(2):  # this one and one challenger
                break
            with self.budget.step():
                default = self._prepare_default(pair)
            if default is None:
                continue
            try:
                self._time_challengers(challengers, default)
                why = first_failure(self.ranks, default.failure)
                if not why:
                    us = median(default.seconds) * 1e6
                    self.outcomes[pair] = TimedOutcome(pair, us, 1.0, mode=default.mode)
                    break
                # Ratios to a pairing that failed are meaningless.
                self.outcomes = {p: o for p, o in self.outcomes.items() if o.us is None}
                self.outcomes[pair] = TimedOutcome(pair, why=why)
            finally:
                default.close()
                default = None
                self._release_memory()
        if self._device.type == "cuda":
            gc.collect()  # takes 0.1 s, so not after each candidate
        working = (pair for pair in self.order if not self._has_failed(pair))
        default_pair = next(working, self.order[0])
        outcomes = tuple(self.outcomes[pair] for pair in self.order if pair in self.outcomes)
        return Bucket(self.workload.problem.tokens, default_pair, outcomes)

    def _has_failed(self, pair: Pair) -> bool:
        return pair in self.outcomes and self.outcomes[pair].us is None

    def _prepare_default(self, pair: Pair) -> _Prepared | None:
        """Prepare the default pairing, or record why it failed."""
        prepared, why = self._prepare(pair)
        if prepared is not None:
            prepared.seconds = max_over_ranks(
                self.ranks, [self._time_once(prepared) for _ in range(2)]
            )
            why = first_failure(self.ranks, prepared.failure)
            if not why:
                return prepared
            prepared.close()
        self.outcomes[pair] = TimedOutcome(pair, why=why)
        return None

    def _time_challengers(self, challengers: Sequence[Pair], default: _Prepared) -> None:
        """Record the outcome of the challengers, as far as the budget allows."""
        for pair in challengers:
            if pair == default.pair or pair in self.outcomes:
                continue
            if not self.budget.allows():
                return
            with self.budget.step():
                outcome = self._time_challenger(pair, default)
            if outcome is None:
                return
            self.outcomes[pair] = outcome

    def _time_challenger(self, pair: Pair, default: _Prepared) -> TimedOutcome | None:
        """Build a pairing, and time it alternately with the default; None if the default fails."""
        prepared, why = self._prepare(pair)
        if prepared is None:
            return TimedOutcome(pair, why=why)
        try:
            times = self._time_rounds(prepared, default, 2)
            rough = min(times) > self.max_ratio * min(default.seconds[-2:])
            if not rough:
                longest = max(*times, *default.seconds[-2:]) * len(self.workload.inputs)
                count = int(_TARGET_S / longest) if longest else _MAX_ROUNDS
                count = min(max(count, _MIN_ROUNDS), _MAX_ROUNDS)
                times = self._time_rounds(prepared, default, count)
            if first_failure(self.ranks, default.failure):
                return None
            why = first_failure(self.ranks, prepared.failure)
            if why:
                return TimedOutcome(pair, why=why)
            return _compare(prepared, times, default.seconds[-len(times) :], rough=rough)
        finally:
            prepared.close()
            prepared = None
            self._release_memory()

    def _time_rounds(self, prepared: _Prepared, default: _Prepared, count: int) -> list[float]:
        """Time both pairings in each of `count` rounds, alternating the order.

        Returns the seconds of `prepared`; those of the default are appended to `default.seconds`.
        """
        prepared_times: list[float] = []
        default_times: list[float] = []
        for number in range(count):
            pairings = ((prepared, prepared_times), (default, default_times))
            for pairing, times in pairings if number % 2 else reversed(pairings):
                times.append(self._time_once(pairing))
        default.seconds += max_over_ranks(self.ranks, default_times)
        return max_over_ranks(self.ranks, prepared_times)

    def _time_once(self, prepared: _Prepared) -> float:
        """Return the seconds per call in one round; infinity if any rank has failed.

        Ranks start together.
        """
        if any(self.ranks.all_gather(bool(prepared.failure))):
            return math.inf
        try:
            return self._run(prepared)
        # As in _run_on_all_ranks, any exception is a failure of the candidate.
        except Exception as error:  # noqa: BLE001
            prepared.failure = _one_line(error)
            return math.inf

    def _run(self, prepared: _Prepared) -> float:
        times = samples_ms(prepared.runs, self._clock, self._flush_l2)
        return sum(times) / len(self.workload.inputs) / 1e3

    def _prepare(self, pair: Pair) -> tuple[_Prepared | None, str]:
        """Build, check and capture a pairing; or return None and the reason of a failure."""
        kernel, why = self._run_on_all_ranks(lambda: self._build(pair))
        if kernel is None:
            return None, why
        prepared, why = self._check_and_capture(kernel, pair)
        if prepared is None:
            _close(kernel)
        return prepared, why

    def _check_and_capture(
        self, kernel: FusedMoEModularKernel, pair: Pair
    ) -> tuple[_Prepared | None, str]:
        """Plan, check and capture a kernel; or return None and the reason of a failure.

        After each step, ranks exchange whether it succeeded, because a rank that stops alone would
        block the others.
        """
        call, why = self._run_on_all_ranks(lambda: self._plan(kernel))
        if call is None:
            return None, why
        outputs, why = self._run_on_all_ranks(lambda: self._run_for_check(call))
        if outputs is None:
            return None, why
        _, why = self._run_on_all_ranks(lambda: self._check_outputs(outputs))
        return (
            (None, why)
            if why
            else self._run_on_all_ranks(lambda: self._capture(kernel, call, pair))
        )

    def _build(self, pair: Pair) -> FusedMoEModularKernel:
        problem = self.workload.problem
        kernel = make_kernel(*pair, problem, group=self.ranks.group, machine=self.machine)
        need = workspace_bytes(kernel.workspace_specs(problem.tokens)) * self._sharing_ranks
        free = free_bytes(self._device)
        if free is not None and need > _MAX_FREE_FRACTION * free:
            plans = "its plan takes" if self._sharing_ranks == 1 else "its plans on all ranks take"
            raise MemoryError(f"{plans} {gigabytes(need)}, {gigabytes(free)} are free")
        return kernel

    def _plan(self, kernel: FusedMoEModularKernel) -> PlannedCall:
        plan, weights = kernel.plan(), self.workload.weights
        return lambda x_TH, routing: plan(x_TH, weights, routing)

    def _run_for_check(self, call: PlannedCall) -> list[torch.Tensor]:
        """Return the outputs for the inputs of `workload.expected`.

        The output is filled with NaN before each call, so that unwritten values fail the check.
        """
        call(*self.workload.expected[0].call_inputs).fill_(math.nan)
        outputs = []
        for expected_rows in self.workload.expected:
            out = call(*expected_rows.call_inputs)
            outputs.append(out.clone())
            out.fill_(math.nan)
        self._clock.wait()
        return outputs

    def _check_outputs(self, outputs: Sequence[torch.Tensor]) -> None:
        why = self.workload.find_error(outputs)
        if why:
            raise ArithmeticError(why)

    def _capture(self, kernel: FusedMoEModularKernel, call: PlannedCall, pair: Pair) -> _Prepared:
        """Capture the calls of a round.

        The runs are one graph of all calls; one graph per call if the L2 cache is overwritten
        between calls; or the calls themselves if they cannot be captured.
        """
        calls = [partial(call, *call_inputs) for call_inputs in self.workload.inputs]
        for planned_call in calls:
            planned_call()
        groups = [[planned_call] for planned_call in calls] if self.workload.flush else [calls]
        if self._device.type == "cuda" and pair in self.graph:
            graphs = capture(groups)
            if graphs is not None:
                return _Prepared(pair, kernel, graphs, "graph")
        mode = "eager" if self._device.type == "cuda" else "cpu"
        return _Prepared(pair, kernel, [partial(_call_all, group) for group in groups], mode)

    def _run_on_all_ranks(self, work: Callable[[], T]) -> tuple[T | None, str]:
        """Return the result of `work`, or None and the reason of a failure on any rank."""
        failure, result = "", None
        try:
            result = work()
        # Any exception counts as a failure of the candidate, and does not end the search.
        except Exception as error:  # noqa: BLE001
            failure = _one_line(error)
        why = first_failure(self.ranks, failure)
        if why and isinstance(result, FusedMoEModularKernel):
            _close(result)  # it was built here, but not on another rank
        return (None, why) if why else (result, "")

    def _release_memory(self) -> None:
        if self._device.type == "cuda":  # the CPU's allocator keeps nothing
            torch.cuda.empty_cache()


def _compare(
    prepared: _Prepared, times: Sequence[float], default: Sequence[float], *, rough: bool
) -> TimedOutcome:
    """Return the outcome of a pairing that was timed in the same rounds as the default."""
    us = (min(times) if rough else median(times)) * 1e6
    if rough:
        ratio, noise = min(times) / min(default), 0.0
    else:
        ratios = [time / default_time for time, default_time in zip(times, default, strict=True)]
        quartiles = quantiles(ratios, n=4)
        ratio, noise = median(ratios), (quartiles[2] - quartiles[0]) / len(ratios) ** 0.5
    return TimedOutcome(prepared.pair, us, ratio, noise, rough, prepared.mode)


def _one_line(error: Exception) -> str:
    """Format an exception as one line; errors raised by this module without their type."""
    text = str(error).partition("\n")[0]
    from_this_module = isinstance(error, ArithmeticError | MemoryError)
    return (text if from_this_module else f"{type(error).__name__}: {text}")[:_MAX_CHARACTERS]


def _call_all(calls: Sequence[Call]) -> torch.Tensor:
    last = calls[0]()
    for call in calls[1:]:
        last = call()
    return last
