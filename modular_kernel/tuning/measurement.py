"""Checks and timing of choices on a GPU.

Every choice is checked before it is timed, with poisoned memory: some rows of its output against
the float64 oracle by the test harness's rule, the whole output against that of the first correct
choice, and all values must be finite. Screening times stages with events (`tuning.stage_timer`);
comparing replays CUDA graphs of plans alternately. In both cases each call has its own input, and
the L2 cache is overwritten between calls if inputs and weights would stay in it.
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

_MAX_RATIO_TO_BEST = 1.3  # ratio to the best above which a choice is not timed again
_EXTRA_TIMINGS = 2  # additional timings of the other choices
_MIN_ROUNDS, _MAX_ROUNDS = 3, 20  # rounds of a comparison

Result = TypeVar("Result")


class TimedSearch(Bench):
    """Measurement of one pair and problem on this machine's GPU.

    tokens: the token counts that will be used, at most problem.tokens. routing: in the syntax of
    measure.routing_patterns.RoutingKind.parse. target_ms: device time per choice in a comparison.
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
        # A launch can raise any exception, and none may end the search, unless the device became
        # unusable: then the synchronization raises again.
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
        """Return calls that run every stage on the host, unlike a plan, which replays launches."""
        kernel = self._kernel(workload, poison=False)
        problem = workload.problem
        workspace = Workspace(kernel.workspace_specs(problem.tokens), self.device)
        out = torch.empty(problem.output_shape, dtype=problem.dtype, device=self.device)

        def call(x_TH: torch.Tensor, routing: Routing) -> torch.Tensor:
            pending = kernel.start_checked(x_TH, self.weights, routing, out, workspace)
            return pending.finish()

        return [partial(call, x_TH, routing) for x_TH, routing in workload.inputs]

    def _is_promising(self, measured: StageTimes, workload: TuneWorkload) -> bool:
        """Return whether some stage, or the call without stages, is near the fastest."""
        times = dict(measured.stages) or {"": measured.seconds}
        fastest = workload.fastest
        for name, seconds in times.items():
            fastest[name] = min(seconds, fastest.get(name, seconds))
        return any(seconds <= _MAX_RATIO_TO_BEST * fastest[name] for name, seconds in times.items())

    def _check_and_capture(self, workload: TuneWorkload) -> list[Call] | Refusal:
        """Return the runs of one round of a comparison.

        They are a graph of all calls, or one graph per call.
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
        """Return median seconds per call, timed alternately so that drift affects all choices."""
        clock, flush_l2 = clock_of(self.device), self._flush_l2 if workload.flush else None

        def time_once(choice: Choice) -> float:
            with self.space.using(choice):  # needed for calls that are not captured
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
