"""Time pairings against the default pairing at one number of tokens, for `select.search`.

A pairing consists of a PrepareAndFinalize and an experts class. Each pairing is built, its outputs
are compared with the float64 reference, and its calls are captured in a CUDA graph if possible. It
is then timed in rounds. A round times all calls of the workload with this pairing and with the
default pairing, so that a drift of clock rates or power affects both. A sample is the ratio of the
two times in a round. Over several ranks, the time of a round is the time of the slowest rank.
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
from modular_kernel.measure.timing import (
    Call,
    call_all,
    capture_graphs,
    make_clock,
    make_l2_flush,
    time_runs_ms,
)
from modular_kernel.select.budget import (
    Budget,
    BudgetSpentError,
    count_ranks_sharing_memory,
    format_gigabytes,
    free_bytes,
)
from modular_kernel.select.inputs import TimingWorkload
from modular_kernel.select.process_group import Ranks, first_failure, reduce_max_over_ranks
from modular_kernel.select.selection import Bucket, Pair, TimedOutcome
from modular_kernel.spec.problem import Machine
from modular_kernel.tensors import Routing
from modular_kernel.workspace import workspace_bytes

_MAX_RATIO = 1.25  # timing stops after two rounds if the ratio to the default is larger
_MIN_ROUNDS, _MAX_ROUNDS = 9, 41
_TARGET_SECONDS = 0.06  # device time for all rounds of one pairing
_MAX_FREE_FRACTION = 0.9  # maximum fraction of the free memory for a plan
_MAX_CHARACTERS = 300  # maximum length of an error message

PlannedCall = Callable[[torch.Tensor, Routing], torch.Tensor]
T = TypeVar("T")


@dataclass
class _PreparedPair:
    """A pairing with correct outputs, ready to be timed.

    runs: functions that together make all calls of a round.
    mode: see TimedOutcome.
    failure: message of an error during timing, or "".
    seconds: time per call in each round.
    """

    pair: Pair
    kernel: FusedMoEModularKernel
    runs: Sequence[Call]
    mode: str
    failure: str = ""
    seconds: list[float] = field(default_factory=list)

    def close(self) -> None:
        """Release resources that the parts share with other ranks."""
        _destroy_kernel(self.kernel)


def _destroy_kernel(kernel: FusedMoEModularKernel) -> None:
    destroy = getattr(kernel.prepare_finalize, "destroy", None)
    if destroy is not None:
        destroy()


@dataclass
class PairingTimer:
    """Times pairings on one workload. All ranks must call the methods.

    order: the valid pairings, with the default first.
    capturable: the pairings that can be captured in a CUDA graph.
    max_ratio: ratio to the time of the default above which timing stops after two rounds.
    outcomes: the outcomes of pairings so far, which are not timed again.
    prepared_pairs: the pairings that were prepared in this search, also for other token counts.
    """

    workload: TimingWorkload
    order: Sequence[Pair]
    capturable: frozenset[Pair]
    machine: Machine
    ranks: Ranks
    budget: Budget
    max_ratio: float = _MAX_RATIO
    outcomes: dict[Pair, TimedOutcome] = field(default_factory=dict)
    prepared_pairs: set[Pair] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._device = self.workload.weights.w1.device
        self._clock = make_clock(self._device)
        self._sharing_ranks = count_ranks_sharing_memory(self.ranks, self._device)
        self._flush_l2 = make_l2_flush(self._device) if self.workload.flush else None

    def time_bucket(self, pairs_to_time: Iterable[Pair]) -> Bucket:
        """Time the default and `pairs_to_time`, as far as the budget allows.

        If the default fails, the next pairing of `order` becomes the default.
        """
        pairs_to_time = tuple(pairs_to_time)
        for pair in self.order:
            if self._has_failed(pair):
                continue
            other_pairs = [p for p in pairs_to_time if p != pair and p not in self.outcomes]
            new_pairs = self._count_new_pairs((pair, *other_pairs[:1]))
            if not self.budget.allows(2, new_pairs=new_pairs):  # the default and another pairing
                break
            try:
                with self.budget.step():
                    default = self._prepare_default(pair)
            except BudgetSpentError:
                break
            if default is None:
                continue
            try:
                self._time_pairs(pairs_to_time, default)
                failure = first_failure(self.ranks, default.failure)
                if not failure:
                    us = median(default.seconds) * 1e6
                    self.outcomes[pair] = TimedOutcome(pair, us, 1.0, mode=default.mode)
                    break
                # Ratios to a default that failed are meaningless, so keep only failures.
                self.outcomes = {p: o for p, o in self.outcomes.items() if o.us is None}
                self.outcomes[pair] = TimedOutcome(pair, why=failure)
            finally:
                default.close()
                default = None
                self._release_memory()
        if self._device.type == "cuda":
            gc.collect()  # takes 0.1 s, which is too slow after each pairing
        working_pairs = (pair for pair in self.order if not self._has_failed(pair))
        default_pair = next(working_pairs, self.order[0])
        outcomes = tuple(self.outcomes[pair] for pair in self.order if pair in self.outcomes)
        return Bucket(self.workload.problem.tokens, default_pair, outcomes)

    def _count_new_pairs(self, pairs: Iterable[Pair]) -> int:
        """Return how many of `pairs` have not been prepared in this search."""
        return sum(pair not in self.prepared_pairs for pair in pairs)

    def _has_failed(self, pair: Pair) -> bool:
        return pair in self.outcomes and self.outcomes[pair].us is None

    def _prepare_default(self, pair: Pair) -> _PreparedPair | None:
        """Prepare the default and time two rounds. Returns None after a failure."""
        prepared, failure = self._prepare(pair)
        if prepared is not None:
            prepared.seconds = reduce_max_over_ranks(
                self.ranks, [self._time_once(prepared) for _ in range(2)]
            )
            failure = first_failure(self.ranks, prepared.failure)
            if not failure:
                return prepared
            prepared.close()
        self.outcomes[pair] = TimedOutcome(pair, why=failure)
        return None

    def _time_pairs(self, pairs_to_time: Sequence[Pair], default: _PreparedPair) -> None:
        """Time `pairs_to_time` as far as the budget allows, and record the outcomes."""
        for pair in pairs_to_time:
            if pair == default.pair or pair in self.outcomes:
                continue
            if not self.budget.allows(new_pairs=self._count_new_pairs((pair,))):
                return
            try:
                with self.budget.step():
                    outcome = self._time_against_default(pair, default)
            except BudgetSpentError:
                return
            if outcome is None:  # the default failed
                return
            self.outcomes[pair] = outcome

    def _time_against_default(self, pair: Pair, default: _PreparedPair) -> TimedOutcome | None:
        """Build a pairing, and time it alternately with the default.

        Returns None if the default fails.
        """
        prepared, failure = self._prepare(pair)
        if prepared is None:
            return TimedOutcome(pair, why=failure)
        try:
            times = self._time_rounds(prepared, default, 2)
            is_much_slower = min(times) > self.max_ratio * min(default.seconds[-2:])
            if not is_much_slower:
                longest_round_seconds = max(*times, *default.seconds[-2:]) * len(
                    self.workload.inputs
                )
                rounds = (
                    int(_TARGET_SECONDS / longest_round_seconds)
                    if longest_round_seconds
                    else _MAX_ROUNDS
                )
                rounds = min(max(rounds, _MIN_ROUNDS), _MAX_ROUNDS)
                times = self._time_rounds(prepared, default, rounds)
            if first_failure(self.ranks, default.failure):
                return None
            failure = first_failure(self.ranks, prepared.failure)
            if failure:
                return TimedOutcome(pair, why=failure)
            default_times = default.seconds[-len(times) :]
            return _make_outcome(prepared, times, default_times, rough=is_much_slower)
        finally:
            prepared.close()
            prepared = None
            self._release_memory()

    def _time_rounds(
        self, prepared: _PreparedPair, default: _PreparedPair, rounds: int
    ) -> list[float]:
        """Time both pairings in each round. The pairing that runs first alternates.

        Returns the seconds per call of `prepared` in each round. The seconds per call of the
        default are appended to `default.seconds`.
        """
        prepared_times: list[float] = []
        default_times: list[float] = []
        for index in range(rounds):
            pairings = ((prepared, prepared_times), (default, default_times))
            for pairing, times in pairings if index % 2 else reversed(pairings):
                times.append(self._time_once(pairing))
        default.seconds += reduce_max_over_ranks(self.ranks, default_times)
        return reduce_max_over_ranks(self.ranks, prepared_times)

    def _time_once(self, prepared: _PreparedPair) -> float:
        """Return the seconds per call in one round; infinity if any rank has failed."""
        # all_gather exchanges failures, and is a barrier, so that all ranks start together.
        if any(self.ranks.all_gather(bool(prepared.failure))):
            return math.inf
        try:
            return self._run(prepared)
        # A part can raise any exception, which must not end the search.
        except Exception as error:  # noqa: BLE001
            prepared.failure = _format_error(error)
            return math.inf

    def _run(self, prepared: _PreparedPair) -> float:
        """Return this rank's seconds per call in one round."""
        times = time_runs_ms(prepared.runs, self._clock, self._flush_l2)
        return sum(times) / len(self.workload.inputs) / 1e3

    def _prepare(self, pair: Pair) -> tuple[_PreparedPair | None, str]:
        """Build, check and capture a pairing. Returns (None, error message) after a failure.

        Raises BudgetSpentError if the time is over before the kernels are compiled. After the
        compilation, the remaining steps take little time, so the pairing is timed in any case.
        """
        kernel, failure = self._run_on_all_ranks(lambda: self._build(pair))
        if kernel is None:
            return None, failure
        prepared = None
        try:
            self.budget.require_time()
            prepared, failure = self._check_and_capture(kernel, pair)
        finally:
            if prepared is None:
                _destroy_kernel(kernel)
        self.prepared_pairs.add(pair)
        return prepared, failure

    def _check_and_capture(
        self, kernel: FusedMoEModularKernel, pair: Pair
    ) -> tuple[_PreparedPair | None, str]:
        """Plan, check and capture a kernel. Returns (None, error message) after a failure.

        The ranks exchange failures after each step, because a rank that stops alone would block the
        other ranks.
        """
        call, failure = self._run_on_all_ranks(lambda: self._make_plan(kernel))
        if call is None:
            return None, failure
        outputs, failure = self._run_on_all_ranks(lambda: self._run_for_check(call))
        if outputs is None:
            return None, failure
        _, failure = self._run_on_all_ranks(lambda: self._check_outputs(outputs))
        if failure:
            return None, failure
        return self._run_on_all_ranks(lambda: self._capture(kernel, call, pair))

    def _build(self, pair: Pair) -> FusedMoEModularKernel:
        problem = self.workload.problem
        kernel = make_kernel(*pair, problem, group=self.ranks.group, machine=self.machine)
        required_bytes = (
            workspace_bytes(kernel.workspace_specs(problem.tokens)) * self._sharing_ranks
        )
        free_memory = free_bytes(self._device)
        if free_memory is not None and required_bytes > _MAX_FREE_FRACTION * free_memory:
            plans = "its plan takes" if self._sharing_ranks == 1 else "its plans on all ranks take"
            raise MemoryError(
                f"{plans} {format_gigabytes(required_bytes)}, "
                f"{format_gigabytes(free_memory)} are free"
            )
        return kernel

    def _make_plan(self, kernel: FusedMoEModularKernel) -> PlannedCall:
        plan, weights = kernel.plan(), self.workload.weights
        return lambda x_TH, routing: plan(x_TH, weights, routing)

    def _run_for_check(self, call: PlannedCall) -> list[torch.Tensor]:
        """Return copies of the outputs of the calls in `workload.expected`.

        The output is filled with NaN before each call, so that unwritten values fail the check.
        """
        with self.budget.limit_compilation():
            call(*self.workload.expected[0].call_inputs).fill_(math.nan)
        outputs = []
        for expected_rows in self.workload.expected:
            out = call(*expected_rows.call_inputs)
            outputs.append(out.clone())
            out.fill_(math.nan)
        self._clock.wait()
        return outputs

    def _check_outputs(self, outputs: Sequence[torch.Tensor]) -> None:
        error = self.workload.find_error(outputs)
        if error:
            raise ArithmeticError(error)

    def _capture(
        self, kernel: FusedMoEModularKernel, call: PlannedCall, pair: Pair
    ) -> _PreparedPair:
        """Capture the calls of a round in CUDA graphs.

        If the L2 cache is overwritten between calls, each call has its own graph. Otherwise, one
        graph contains all calls. If the calls cannot be captured, they run eagerly.
        """
        calls = [partial(call, *call_inputs) for call_inputs in self.workload.inputs]
        for planned_call in calls:
            planned_call()
        groups = [[planned_call] for planned_call in calls] if self.workload.flush else [calls]
        if self._device.type == "cuda" and pair in self.capturable:
            graphs = capture_graphs(groups)
            if graphs is not None:
                return _PreparedPair(pair, kernel, graphs, "graph")
        mode = "eager" if self._device.type == "cuda" else "cpu"
        return _PreparedPair(pair, kernel, [partial(call_all, group) for group in groups], mode)

    def _run_on_all_ranks(self, work: Callable[[], T]) -> tuple[T | None, str]:
        """Return (result of `work`, ""), or (None, error message) if `work` fails on any rank."""
        local_failure, result = "", None
        try:
            result = work()
        except BudgetSpentError:  # only on a single rank, see Budget.limit_compilation
            raise
        # A part can raise any exception, which must not end the search.
        except Exception as error:  # noqa: BLE001
            local_failure = _format_error(error)
        failure = first_failure(self.ranks, local_failure)
        if failure and isinstance(result, FusedMoEModularKernel):
            _destroy_kernel(result)  # the kernel could not be built on another rank
        return (None, failure) if failure else (result, "")

    def _release_memory(self) -> None:
        if self._device.type == "cuda":  # the CPU allocator keeps no memory
            torch.cuda.empty_cache()


def _make_outcome(
    prepared: _PreparedPair,
    times: Sequence[float],
    default_times: Sequence[float],
    *,
    rough: bool,
) -> TimedOutcome:
    """Return the outcome of a pairing that was timed in the same rounds as the default.

    times: seconds per call of the pairing in each round.
    default_times: seconds per call of the default in each round.
    """
    us = (min(times) if rough else median(times)) * 1e6
    if rough:
        ratio, noise = min(times) / min(default_times), 0.0
    else:
        ratios = [t / default_t for t, default_t in zip(times, default_times, strict=True)]
        quartiles = quantiles(ratios, n=4)
        ratio, noise = median(ratios), (quartiles[2] - quartiles[0]) / len(ratios) ** 0.5
    return TimedOutcome(prepared.pair, us, ratio, noise, rough, prepared.mode)


def _format_error(error: Exception) -> str:
    """Format an exception as one line. The type is omitted if this module raised it."""
    text = str(error).partition("\n")[0]
    is_from_this_module = isinstance(error, ArithmeticError | MemoryError)
    return (text if is_from_this_module else f"{type(error).__name__}: {text}")[:_MAX_CHARACTERS]
