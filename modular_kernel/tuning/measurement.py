"""Verification and timing of launch configurations (choices) on a GPU.

Before a choice is timed, its output is verified, with workspaces filled with poison:

- all values must be finite;
- some rows are compared with the float64 oracle, at the tolerance of the test harness; and
- the whole output is compared with that of the first correct choice.

Screening times the stages of a call with events (`tuning.stage_timer`). A comparison replays the
CUDA graphs of all finalists alternately. In both, each call has its own input, and the L2 cache is
overwritten between calls if inputs and weights would stay in it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from statistics import median
from typing import TypeVar

import torch

from modular_kernel.catalog import check, make_kernel
from modular_kernel.contracts import Choice, StageTimes, Tunable
from modular_kernel.errors import ConfigurationError
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.measure.routing_patterns import RoutingKind
from modular_kernel.measure.timing import Call, capture, clock_of, l2_flusher, samples_ms
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.tuning.compilation import Compiler, TunedPair
from modular_kernel.tuning.search import Bench, Refusal
from modular_kernel.tuning.stage_timer import StageClock, median_times
from modular_kernel.tuning.workload import TuneWorkload, Workloads, tuning_weights
from modular_kernel.workspace import Workspace

_MAX_RATIO_TO_BEST = 1.3  # choices with a larger ratio to the fastest are timed only once
_EXTRA_TIMINGS = 2  # additional timings of all other choices
_MIN_ROUNDS, _MAX_ROUNDS = 3, 20  # of a comparison

Result = TypeVar("Result")


class TimedSearch(Bench):
    """Measurement of one pairing and problem on this machine's GPU.

    tokens: all token counts to be tuned, at most problem.tokens. space: the search space; None uses
    that of the experts part. routing: distribution of tokens over experts, in the syntax of
    RoutingKind.parse. target_ms: milliseconds on the device for each choice in a comparison.
    """

    def __init__(
        self,
        pair: TunedPair,
        problem: Problem,
        compiler: Compiler,
        *,
        tokens: Sequence[int],
        space: Tunable | None = None,
        routing: str = "uniform",
        target_ms: float = 10.0,
    ) -> None:
        if problem.inplace:  # each replay would overwrite x
            raise ConfigurationError("inplace while tuning", got=True, need="False")
        self.pair, self.problem, self.compiler = pair, problem, compiler
        self.space = space or pair.space(problem)
        self.routing, self.target_ms = RoutingKind.parse(routing), target_ms
        self.device = torch.device(pair.machine.device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._clock = StageClock(self.space.stages, self.device)
        weights = tuning_weights(problem, self.device)
        workloads = Workloads(problem, weights, tokens, self.routing)
        self.weights = self._prepare_weights(weights) if pair.prepared else weights
        self._workload = lru_cache(maxsize=1)(workloads.workload)

    def _prepare_weights(self, weights: ExpertWeights) -> ExpertWeights:
        """Return prepared weights for all kernels of the search, which differ only in tokens."""
        names = self.pair.prepare_finalize, self.pair.experts
        return make_kernel(*names, self.problem, machine=self.pair.machine).prepare_weights(weights)

    def compile_ahead(self, tokens: int, choices: Sequence[Choice]) -> None:
        problem = self.problem.with_tokens(tokens)
        self.compiler.submit(self.pair, self.space, problem, choices)

    def refusal(self, tokens: int, choice: Choice) -> Refusal | None:
        problem = self.problem.with_tokens(tokens)
        return self.compiler.refusal(self.pair, self.space, problem, choice)

    def screen(self, tokens: int, choice: Choice) -> StageTimes | Refusal:
        workload = self._workload(tokens)
        return self._catch_errors(choice, lambda: self._screen_workload(workload))

    def compare(self, tokens: int, choices: Sequence[Choice]) -> Mapping[Choice, float | Refusal]:
        workload = self._workload(tokens)
        runs: dict[Choice, list[Call]] = {}
        outcomes: dict[Choice, float | Refusal] = {}
        for choice in choices:
            calls = self._catch_errors(choice, lambda: self._check_and_capture(workload))
            if isinstance(calls, Refusal):
                outcomes[choice] = calls
            else:
                runs[choice] = calls
        return outcomes | (self._time_alternately(runs, workload) if runs else {})

    def _catch_errors(
        self, choice: Choice, work: Callable[[], Result | Refusal]
    ) -> Result | Refusal:
        try:
            with self.space.using(choice):
                return work()
        # A launch can raise any exception, none of which may end the search. If the device became
        # unusable, the synchronization raises again.
        except Exception as error:  # noqa: BLE001
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            return Refusal(f"{type(error).__name__}: {str(error)[:200]}")

    def _screen_workload(self, workload: TuneWorkload) -> StageTimes | Refusal:
        error = self._find_error(workload)
        if error:
            return Refusal(error, wrong=True)
        calls = self._staged_calls(workload)
        flush_l2 = self._flush_l2 if workload.flush else None
        times = self._clock.times(calls, flush_l2)
        if self._is_promising(median_times(times), workload):
            for _ in range(_EXTRA_TIMINGS):
                times += self._clock.times(calls, flush_l2)
        return median_times(times)

    def _find_error(self, workload: TuneWorkload) -> str:
        x_TH, routing = workload.inputs[0]
        return workload.find_error(self._kernel(workload, poison=True)(x_TH, self.weights, routing))

    def _staged_calls(self, workload: TuneWorkload) -> list[Call]:
        """Return calls that run the host code of every stage, which a plan would not."""
        kernel = self._kernel(workload, poison=False)
        problem = workload.problem
        workspace = Workspace(kernel.workspace_specs(problem.tokens), self.device)
        out = torch.empty(problem.output_shape, dtype=problem.dtype, device=self.device)

        def call(x_TH: torch.Tensor, routing: Routing) -> torch.Tensor:
            pending = kernel.start_checked(x_TH, self.weights, routing, out, workspace)
            return pending.finish()

        return [partial(call, x_TH, routing) for x_TH, routing in workload.inputs]

    def _is_promising(self, measured: StageTimes, workload: TuneWorkload) -> bool:
        """Return whether any stage, or a call without stages, is close to the fastest so far."""
        times = dict(measured.stages) or {"": measured.seconds}
        fastest = workload.fastest
        for name, seconds in times.items():
            fastest[name] = min(seconds, fastest.get(name, seconds))
        return any(seconds <= _MAX_RATIO_TO_BEST * fastest[name] for name, seconds in times.items())

    def _check_and_capture(self, workload: TuneWorkload) -> list[Call] | Refusal:
        """Verify the current choice, and return the runs of one round of a comparison.

        The runs are one graph of all calls; one graph per call if the L2 cache is overwritten
        between calls; or the calls themselves if they cannot be captured.
        """
        error = self._find_error(workload)
        if error:
            return Refusal(error, wrong=True)
        plan = self._kernel(workload, poison=False).plan()
        calls = [partial(plan, x_TH, self.weights, r) for x_TH, r in workload.inputs]
        for call in calls:
            call()
        if not self._is_capturable:
            return list(calls)
        graphs = capture([[call] for call in calls] if workload.flush else [calls])
        return graphs or Refusal("could not be captured in a CUDA graph")

    @cached_property
    def _is_capturable(self) -> bool:
        pair, graph = self.pair, replace(self.problem, graph=True)
        names = pair.prepare_finalize, pair.experts
        return self.device.type == "cuda" and check(*names, graph, pair.machine).ok

    @cached_property
    def _flush_l2(self) -> Callable[[], object] | None:
        return l2_flusher(self.device)

    def _time_alternately(
        self, runs: Mapping[Choice, Sequence[Call]], workload: TuneWorkload
    ) -> dict[Choice, float]:
        """Return the median seconds per call.

        Choices alternate, so that drift affects them alike.
        """
        clock, flush_l2 = clock_of(self.device), self._flush_l2 if workload.flush else None

        def time_once(choice: Choice) -> float:
            with self.space.using(choice):  # affects only calls that are not captured
                times = samples_ms(runs[choice], clock, flush_l2)
            return sum(times) / len(workload.inputs) / 1e3

        times: dict[Choice, list[float]] = {choice: [] for choice in runs}
        slowest = max(time_once(choice) for choice in runs) * len(workload.inputs)
        rounds = int(self.target_ms / 1e3 / max(slowest, 1e-9))
        for _ in range(min(max(rounds, _MIN_ROUNDS), _MAX_ROUNDS)):
            for choice in runs:
                times[choice].append(time_once(choice))
        return {choice: median(samples) for choice, samples in times.items()}

    def _kernel(self, workload: TuneWorkload, *, poison: bool) -> FusedMoEModularKernel:
        pair = self.pair
        names = pair.prepare_finalize, pair.experts
        return make_kernel(
            *names, workload.problem, machine=pair.machine, poison=poison, auto_prepare=False
        )
