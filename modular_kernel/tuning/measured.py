"""Checks and times choices on a GPU.

A choice is checked first, in poisoned memory: some rows of its output against the float64 oracle,
by the harness's rule, and every value must be finite. Then CUDA graphs of its plan are replayed,
each call on an input of its own, with the L2 cache overwritten in between where inputs and weights
would stay in it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch

from modular_kernel.bench.cases import make_weights
from modular_kernel.bench.floor import work_of
from modular_kernel.bench.method import Rotation, l2_bytes, rotation, time_calls
from modular_kernel.bench.routing import RoutingKind, draw, load_of
from modular_kernel.catalog import check, make_kernel
from modular_kernel.errors import ConfigurationError
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.quant import quantise_weights
from modular_kernel.reference import oracle, recipe
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.compare import compare
from modular_kernel.tunable import Choice, Tunable
from modular_kernel.tuning.compiled import Compiler, Pair
from modular_kernel.tuning.search import Bench, Refusal
from modular_kernel.types import Problem

_ROWS = 16  # of an output that are compared


@dataclass(frozen=True)
class Situation:
    """Everything about one number of tokens but the choice.

    calls: inputs, one for each call. rows: those compared; exact, fair: what they are in float64,
    and what plain torch makes of them. rotate: how calls are kept cold. graph: capture them.
    """

    problem: Problem
    calls: tuple[tuple[torch.Tensor, Routing], ...]
    rows: torch.Tensor
    exact: torch.Tensor
    fair: torch.Tensor
    rotate: Rotation
    graph: bool


class Measured(Bench):
    """One pair and problem on this machine's GPU. routing: as bench.routing.RoutingKind parses."""

    def __init__(
        self,
        pair: Pair,
        problem: Problem,
        compiler: Compiler,
        *,
        space: Tunable | None = None,
        routing: str = "uniform",
        target_ms: float = 20.0,
    ) -> None:
        if problem.inplace:  # x would be overwritten from replay to replay
            raise ConfigurationError("inplace while tuning", got=True, need="False")
        self.pair, self.problem, self.compiler = pair, problem, compiler
        self.space = space or pair.space(problem)
        self.routing, self.target_ms = RoutingKind.parse(routing), target_ms
        self.device = torch.device(pair.machine.device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.weights = _weights(problem, self.device)
        self._situation = lru_cache(maxsize=1)(self._make_situation)

    def compile_ahead(self, tokens: int, choices: Sequence[Choice]) -> None:
        self.compiler.begin(self.pair, self.problem.with_tokens(tokens), choices)

    def refusal(self, tokens: int, choice: Choice) -> Refusal | None:
        return self.compiler.refusal(self.pair, self.problem.with_tokens(tokens), choice)

    def seconds(self, tokens: int, choice: Choice) -> float | Refusal:
        situation = self._situation(tokens)
        try:
            with self.space.using(choice):
                wrong = self._wrong(situation)
                return Refusal(wrong, wrong=True) if wrong else self._time(situation)
        # A launch fails in many ways, and none of them may end the search. One that left the
        # device unusable does: then waiting for it raises again.
        except Exception as error:  # noqa: BLE001
            self._wait()
            return Refusal(f"{type(error).__name__}: {str(error)[:200]}")

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _wrong(self, situation: Situation) -> str:
        """What is wrong with the choice's numbers; "" if nothing is."""
        kernel = self._kernel(situation, poison=True)
        x_TH, routing = situation.calls[0]
        out = kernel(x_TH, self.weights, routing)
        if not bool(out.isfinite().all()):
            return "values that are not finite"
        few = situation.problem.with_tokens(len(situation.rows))
        found = compare(out[situation.rows], situation.exact, situation.fair, few)
        return "; ".join(found.problems)

    def _time(self, situation: Situation) -> float | Refusal:
        plan = self._kernel(situation, poison=False).plan()
        calls = [partial(plan, x_TH, self.weights, routing) for x_TH, routing in situation.calls]
        timing = time_calls(
            calls,
            self.device,
            graph=situation.graph,
            flush=situation.rotate.flush,
            target_ms=self.target_ms,
        )
        if situation.graph and not timing.mode.startswith("graph"):
            return Refusal("could not be captured in a CUDA graph")
        return timing.us / 1e6

    def _kernel(self, situation: Situation, *, poison: bool) -> FusedMoEModularKernel:
        pair = self.pair
        names = pair.prepare_finalize, pair.experts
        return make_kernel(*names, situation.problem, machine=pair.machine, poison=poison)

    def _make_situation(self, tokens: int) -> Situation:
        problem = self.problem.with_tokens(tokens)
        first = self._input(problem, 0)
        rotate = self._rotation(problem, first[1])
        calls = (first, *(self._input(problem, index) for index in range(1, rotate.calls)))
        x_TH, routing = first
        rows = torch.linspace(0, tokens - 1, min(tokens, _ROWS), device=self.device).long()
        few = Routing(routing.topk_weights_TK[rows], routing.topk_ids_TK[rows])
        small = problem.with_tokens(len(rows))
        on_gpu = self.device.type == "cuda"
        pair = self.pair
        graph = check(
            pair.prepare_finalize, pair.experts, replace(problem, graph=True), pair.machine
        )
        return Situation(
            problem=problem,
            calls=calls,
            rows=rows,
            exact=oracle(x_TH[rows], self.weights, few, small),
            fair=recipe(x_TH[rows], self.weights, few, small),
            rotate=rotate,
            graph=on_gpu and graph.ok,
        )

    def _input(self, problem: Problem, index: int) -> tuple[torch.Tensor, Routing]:
        generator = torch.Generator(self.device).manual_seed(1000 * problem.tokens + index)
        shape = (problem.tokens, problem.hidden)
        x_TH = torch.randn(shape, device=self.device, generator=generator).to(problem.dtype)
        return x_TH, draw(problem, self.routing, generator)

    def _rotation(self, problem: Problem, routing: Routing) -> Rotation:
        """Calls in a graph; with one set of weights, so that a small one is flushed instead."""
        load = load_of(routing, problem, self.weights.expert_map)
        moved = work_of(problem, problem.scheme, [load]).bytes
        size = l2_bytes(self.device)
        return rotation(moved, math.inf, problem.tokens, l2=size, memory=0)


def _weights(problem: Problem, device: torch.device) -> ExpertWeights:
    weights = make_weights(problem, device)
    if problem.scheme.static:
        # 448 / 64 = 7: further out than x or h of such weights get.
        scale = torch.full((1,), 2.0**-6, device=device)
        weights = replace(weights, a1_scale=scale, a2_scale=scale.clone())
    return quantise_weights(weights, problem) if problem.scheme.quantised else weights
