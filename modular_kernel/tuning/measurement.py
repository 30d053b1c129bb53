"""Check and time choices (launch configurations) on this machine, as a Benchmarker of the tuner.

Before a choice is timed, its output is checked. The workspace is filled with NaN before the call.

- All values must be finite.
- Some rows are compared with the float64 reference, with the tolerances of `mk test`.
- The whole output is compared with the output of the first correct choice.

Screening times the stages of a few calls with events (`tuning.stage_timer`). A comparison replays
the CUDA graphs of all finalists alternately. In both cases, each call has its own input, and the L2
cache is overwritten between calls if it could still hold data of the previous call.
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
from modular_kernel.measure.timing import (
    Call,
    capture_graphs,
    make_clock,
    make_l2_flush,
    time_runs_ms,
)
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.tuning.compilation import Compiler, TunedPair
from modular_kernel.tuning.search import Benchmarker, Refusal
from modular_kernel.tuning.stage_timer import StageTimer, compute_median_stage_times
from modular_kernel.tuning.workload import TuneWorkload, WorkloadFactory, make_tuning_weights
from modular_kernel.workspace import Workspace

# In screening, choices that take more than 1.3 times as long as the fastest are timed only once.
_MAX_RATIO_TO_FASTEST = 1.3
_EXTRA_TIMINGS = 2  # additional timings of the other choices
_MIN_ROUNDS, _MAX_ROUNDS = 3, 20  # of a comparison

Result = TypeVar("Result")


class DeviceBenchmarker(Benchmarker):
    """Measures the choices of one pairing for one problem, on this machine.

    tokens: all token counts to be tuned, at most problem.tokens.
    space: the search space; None uses the search space of the experts part.
    routing: distribution of tokens over experts, in the syntax of RoutingKind.parse.
    target_ms: milliseconds of device time for each choice in a comparison.
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
        self.space = space or pair.make_search_space(problem)
        self.routing, self.target_ms = RoutingKind.parse(routing), target_ms
        self.device = torch.device(pair.machine.device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._stage_timer = StageTimer(self.space.stages, self.device)
        weights = make_tuning_weights(problem, self.device)
        factory = WorkloadFactory(problem, weights, tokens, self.routing)
        self.weights = self._prepare_weights(weights) if pair.prepared else weights
        self._get_workload = lru_cache(maxsize=1)(factory.make_workload)

    def _prepare_weights(self, weights: ExpertWeights) -> ExpertWeights:
        """Return prepared weights for all kernels of the search."""
        names = self.pair.prepare_finalize, self.pair.experts
        return make_kernel(*names, self.problem, machine=self.pair.machine).prepare_weights(weights)

    def compile_ahead(self, tokens: int, choices: Sequence[Choice]) -> None:
        problem = self.problem.with_tokens(tokens)
        self.compiler.submit(self.pair, self.space, problem, choices)

    def wait_compiled(self, tokens: int, choice: Choice) -> Refusal | None:
        problem = self.problem.with_tokens(tokens)
        return self.compiler.wait_compiled(self.pair, self.space, problem, choice)

    def screen(self, tokens: int, choice: Choice) -> StageTimes | Refusal:
        workload = self._get_workload(tokens)
        return self._catch_errors(choice, lambda: self._screen_workload(workload))

    def compare(self, tokens: int, choices: Sequence[Choice]) -> Mapping[Choice, float | Refusal]:
        workload = self._get_workload(tokens)
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
        # A launch can raise any exception, which must not end the tuning. If the device is unusable
        # after the exception, the synchronization raises another exception.
        except Exception as error:  # noqa: BLE001
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            return Refusal(f"{type(error).__name__}: {str(error)[:200]}")

    def _screen_workload(self, workload: TuneWorkload) -> StageTimes | Refusal:
        error = self._find_error(workload)
        if error:
            return Refusal(error, is_wrong=True)
        calls = self._make_staged_calls(workload)
        flush_l2 = self._flush_l2 if workload.flush else None
        times = self._stage_timer.time_calls(calls, flush_l2)
        if self._is_promising(compute_median_stage_times(times), workload):
            for _ in range(_EXTRA_TIMINGS):
                times += self._stage_timer.time_calls(calls, flush_l2)
        return compute_median_stage_times(times)

    def _find_error(self, workload: TuneWorkload) -> str:
        x_TH, routing = workload.inputs[0]
        return workload.find_error(
            self._build_kernel(workload, poison=True)(x_TH, self.weights, routing)
        )

    def _make_staged_calls(self, workload: TuneWorkload) -> list[Call]:
        """Return a call for each input, which runs the host code that marks stages.

        A plan would replay launches without running the host code.
        """
        kernel = self._build_kernel(workload, poison=False)
        problem = workload.problem
        workspace = Workspace(kernel.workspace_specs(problem.tokens), self.device)
        out = torch.empty(problem.output_shape, dtype=problem.dtype, device=self.device)

        def call(x_TH: torch.Tensor, routing: Routing) -> torch.Tensor:
            pending = kernel.start_checked(x_TH, self.weights, routing, out, workspace)
            return pending.finish()

        return [partial(call, x_TH, routing) for x_TH, routing in workload.inputs]

    def _is_promising(self, measured: StageTimes, workload: TuneWorkload) -> bool:
        """Return whether the time of any stage is close to the fastest time of all choices so far.

        If no stages were timed, the time of the call is used.
        """
        times = dict(measured.stages) or {"": measured.seconds}
        fastest = workload.fastest
        for name, seconds in times.items():
            fastest[name] = min(seconds, fastest.get(name, seconds))
        return any(
            seconds <= _MAX_RATIO_TO_FASTEST * fastest[name] for name, seconds in times.items()
        )

    def _check_and_capture(self, workload: TuneWorkload) -> list[Call] | Refusal:
        """Check the current choice, and return functions that together make all calls of a round.

        If the L2 cache is overwritten between calls, each call has its own CUDA graph. Otherwise,
        one graph contains all calls. If the parts cannot be captured, the calls run eagerly.
        """
        error = self._find_error(workload)
        if error:
            return Refusal(error, is_wrong=True)
        plan = self._build_kernel(workload, poison=False).plan()
        calls = [partial(plan, x_TH, self.weights, r) for x_TH, r in workload.inputs]
        for call in calls:
            call()
        if not self._is_capturable:
            return list(calls)
        graphs = capture_graphs([[call] for call in calls] if workload.flush else [calls])
        return graphs or Refusal("could not be captured in a CUDA graph")

    @cached_property
    def _is_capturable(self) -> bool:
        pair, graph = self.pair, replace(self.problem, graph=True)
        names = pair.prepare_finalize, pair.experts
        return self.device.type == "cuda" and check(*names, graph, pair.machine).ok

    @cached_property
    def _flush_l2(self) -> Callable[[], object] | None:
        return make_l2_flush(self.device)

    def _time_alternately(
        self, runs: Mapping[Choice, Sequence[Call]], workload: TuneWorkload
    ) -> dict[Choice, float]:
        """Return the median seconds per call of each choice.

        Each round times every choice once, so that a drift of clock rates affects all choices.
        """
        clock, flush_l2 = make_clock(self.device), self._flush_l2 if workload.flush else None

        def time_once(choice: Choice) -> float:
            with self.space.using(choice):  # has no effect on captured calls
                times = time_runs_ms(runs[choice], clock, flush_l2)
            return sum(times) / len(workload.inputs) / 1e3

        times: dict[Choice, list[float]] = {choice: [] for choice in runs}
        slowest = max(time_once(choice) for choice in runs) * len(workload.inputs)
        rounds = int(self.target_ms / 1e3 / max(slowest, 1e-9))
        for _ in range(min(max(rounds, _MIN_ROUNDS), _MAX_ROUNDS)):
            for choice in runs:
                times[choice].append(time_once(choice))
        return {choice: median(samples) for choice, samples in times.items()}

    def _build_kernel(self, workload: TuneWorkload, *, poison: bool) -> FusedMoEModularKernel:
        pair = self.pair
        names = pair.prepare_finalize, pair.experts
        return make_kernel(
            *names, workload.problem, machine=pair.machine, poison=poison, auto_prepare=False
        )
