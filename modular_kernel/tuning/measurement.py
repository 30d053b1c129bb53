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
from modular_kernel.tuning.weights import tuning_weights
from modular_kernel.tuning.workload import TuneWorkload, Workloads
from modular_kernel.workspace import Workspace

_HOPELESS = 1.3  # ratio to the best above which a choice is not timed again
_MORE = 2  # additional timings of the other choices
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 20  # rounds of a comparison

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
        situations = Workloads(problem, weights, tokens, self.routing)
        self.weights = self._prepared(weights) if pair.prepared else weights
        self._situation = lru_cache(maxsize=1)(situations.at)

    def _prepared(self, weights: ExpertWeights) -> ExpertWeights:
        """Return prepared weights for all kernels of the search, which differ only in tokens."""
        names = self.pair.prepare_finalize, self.pair.experts
        return make_kernel(*names, self.problem, machine=self.pair.machine).prepare_weights(weights)

    def compile_ahead(self, tokens: int, choices: Sequence[Choice]) -> None:
        problem = self.problem.with_tokens(tokens)
        self.compiler.begin(self.pair, self.space, problem, choices)

    def refusal(self, tokens: int, choice: Choice) -> Refusal | None:
        problem = self.problem.with_tokens(tokens)
        return self.compiler.refusal(self.pair, self.space, problem, choice)

    def screen(self, tokens: int, choice: Choice) -> StageTimes | Refusal:
        situation = self._situation(tokens)
        return self._guarded(choice, lambda: self._screen_workload(situation))

    def compare(self, tokens: int, choices: Sequence[Choice]) -> Mapping[Choice, float | Refusal]:
        situation = self._situation(tokens)
        runs: dict[Choice, list[Call]] = {}
        outcomes: dict[Choice, float | Refusal] = {}
        for choice in choices:
            calls = self._guarded(choice, lambda: self._ready(situation))
            if isinstance(calls, Refusal):
                outcomes[choice] = calls
            else:
                runs[choice] = calls
        return outcomes | (self._time_alternately(runs, situation) if runs else {})

    def _guarded(self, choice: Choice, work: Callable[[], Result | Refusal]) -> Result | Refusal:
        try:
            with self.space.using(choice):
                return work()
        # A launch can raise any exception, and none may end the search, unless the device became
        # unusable: then the synchronization raises again.
        except Exception as error:  # noqa: BLE001
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            return Refusal(f"{type(error).__name__}: {str(error)[:200]}")

    def _screen_workload(self, situation: TuneWorkload) -> StageTimes | Refusal:
        wrong = self._wrong(situation)
        if wrong:
            return Refusal(wrong, wrong=True)
        calls = self._staged_calls(situation)
        wipe = self._wipe if situation.flush else None
        times = self._clock.times(calls, wipe)
        if self._worth_more(median_times(times), situation):
            for _ in range(_MORE):
                times += self._clock.times(calls, wipe)
        return median_times(times)

    def _wrong(self, situation: TuneWorkload) -> str:
        x_TH, routing = situation.inputs[0]
        return situation.wrong(self._kernel(situation, poison=True)(x_TH, self.weights, routing))

    def _staged_calls(self, situation: TuneWorkload) -> list[Call]:
        """Return calls that run every stage on the host, unlike a plan, which replays launches."""
        kernel = self._kernel(situation, poison=False)
        problem = situation.problem
        workspace = Workspace(kernel.workspace_specs(problem.tokens), self.device)
        out = torch.empty(problem.output_shape, dtype=problem.dtype, device=self.device)

        def call(x_TH: torch.Tensor, routing: Routing) -> torch.Tensor:
            pending = kernel.start_checked(x_TH, self.weights, routing, out, workspace)
            return pending.finish()

        return [partial(call, x_TH, routing) for x_TH, routing in situation.inputs]

    def _worth_more(self, took: StageTimes, situation: TuneWorkload) -> bool:
        """Return whether some stage, or the call without stages, is near the fastest."""
        times = dict(took.stages) or {"": took.seconds}
        fastest = situation.fastest
        for name, seconds in times.items():
            fastest[name] = min(seconds, fastest.get(name, seconds))
        return any(seconds <= _HOPELESS * fastest[name] for name, seconds in times.items())

    def _ready(self, situation: TuneWorkload) -> list[Call] | Refusal:
        """Return the runs of one round of a comparison.

        They are a graph of all calls, or one graph per call.
        """
        wrong = self._wrong(situation)
        if wrong:
            return Refusal(wrong, wrong=True)
        plan = self._kernel(situation, poison=False).plan()
        calls = [partial(plan, x_TH, self.weights, r) for x_TH, r in situation.inputs]
        for call in calls:
            call()
        if not self._captured:
            return list(calls)
        graphs = capture([[call] for call in calls] if situation.flush else [calls])
        return graphs or Refusal("could not be captured in a CUDA graph")

    @cached_property
    def _captured(self) -> bool:
        pair, graph = self.pair, replace(self.problem, graph=True)
        names = pair.prepare_finalize, pair.experts
        return self.device.type == "cuda" and check(*names, graph, pair.machine).ok

    @cached_property
    def _wipe(self) -> Callable[[], object] | None:
        return l2_flusher(self.device)

    def _time_alternately(
        self, runs: Mapping[Choice, Sequence[Call]], situation: TuneWorkload
    ) -> dict[Choice, float]:
        """Return median seconds per call, timed alternately so that drift affects all choices."""
        clock, wipe = clock_of(self.device), self._wipe if situation.flush else None

        def once(choice: Choice) -> float:
            with self.space.using(choice):  # needed for calls that are not captured
                times = samples_ms(runs[choice], clock, wipe)
            return sum(times) / len(situation.inputs) / 1e3

        times: dict[Choice, list[float]] = {choice: [] for choice in runs}
        slowest = max(once(choice) for choice in runs) * len(situation.inputs)
        rounds = int(self.target_ms / 1e3 / max(slowest, 1e-9))
        for _ in range(min(max(rounds, _LEAST_ROUNDS), _MOST_ROUNDS)):
            for choice in runs:
                times[choice].append(once(choice))
        return {choice: median(samples) for choice, samples in times.items()}

    def _kernel(self, situation: TuneWorkload, *, poison: bool) -> FusedMoEModularKernel:
        pair = self.pair
        names = pair.prepare_finalize, pair.experts
        return make_kernel(
            *names, situation.problem, machine=pair.machine, poison=poison, auto_prepare=False
        )
