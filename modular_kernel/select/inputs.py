"""What candidates are timed on, and what they must return: the same for every rank and candidate.

Every expert's weights come from a seed of its own, so a rank can make its own experts for the layer
and any others for the reference, whatever the world's size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from modular_kernel.measure.cases import first_here, quantized
from modular_kernel.measure.check import FACTOR
from modular_kernel.measure.roofline import expert_bytes, work_of
from modular_kernel.measure.routing_patterns import RoutingKind, draw, load_of
from modular_kernel.measure.timing import l2_bytes, rotation
from modular_kernel.reference import oracle, recipe
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import ExpertWeights, Routing

_SEED = 11
_ROWS = 8  # of one output that are compared
_LEAST_VALUES = 512  # errors of plain torch itself scatter over fewer
_MOST_CHECKED = 8  # calls
_FEW_TOKENS = 256  # up to here a call is short: more of them are timed
_CALLS, _CALLS_OF_MANY = 4, 2
_EPS = 1e-6

Input = tuple[torch.Tensor, Routing]


def plain(problem: Problem) -> Problem:
    """Return the layer as it is timed: not in place, because inputs serve many calls."""
    return replace(problem, inplace=False)


def weight_bytes(problem: Problem) -> float:
    """Return the bytes of this rank's experts, as drawn and as quantized beside that."""
    drawn = problem.e * expert_bytes(problem, QuantScheme.parse("none"))
    if not problem.scheme.quantized:
        return drawn
    return drawn + problem.e * expert_bytes(problem, problem.scheme)


def make_weights(
    problem: Problem, device: torch.device, late: Callable[[], bool] | None = None
) -> ExpertWeights:
    """Draw this rank's experts, in the order of its slots, as the problem's scheme stores them.

    late: asked after each expert; TimeoutError once it says so.
    """
    world = problem.parallel.world_size
    held = problem.placement.slots[problem.parallel.rank] if world > 1 else range(problem.e)
    drawn = _drawn(problem, tuple(held), device, late)
    expert_map = first_here(problem, device)
    if world > 1 and problem.expert_map:
        expert_map = problem.placement.expert_map(problem.parallel.rank).to(device)
    return quantized(replace(drawn, expert_map=expert_map), problem)


def _drawn(
    problem: Problem,
    experts: Sequence[int],
    device: torch.device,
    late: Callable[[], bool] | None = None,
) -> ExpertWeights:
    """Draw normal values over the root of the fan-in, unquantized."""
    n, h, i, dtype = problem.w1_rows, problem.hidden, problem.intermediate, problem.dtype
    count = len(experts)
    w1 = torch.empty(count, n, h, dtype=dtype, device=device)
    w2 = torch.empty(count, h, i, dtype=dtype, device=device)
    b1 = torch.empty(count, n, dtype=dtype, device=device) if problem.bias else None
    b2 = torch.empty(count, h, dtype=dtype, device=device) if problem.bias else None
    for slot, expert in enumerate(experts):
        if late is not None and late():
            raise TimeoutError(f"{slot} of {count} experts' weights were made in time")
        generator = torch.Generator(device).manual_seed(_SEED + expert)
        w1[slot] = torch.randn(n, h, device=device, generator=generator) * h**-0.5
        w2[slot] = torch.randn(h, i, device=device, generator=generator) * i**-0.5
        if b1 is not None and b2 is not None:
            b1[slot] = torch.randn(n, device=device, generator=generator) / 2
            b2[slot] = torch.randn(h, device=device, generator=generator) / 2
    return ExpertWeights(w1, w2, b1, b2)


@dataclass(frozen=True)
class SelectTruth:
    """Some rows of what a call for `given` must return, in float64, and how far from them plain
    torch may be, as a norm."""

    given: Input
    rows: torch.Tensor
    exact: torch.Tensor
    fair: float


@dataclass(frozen=True)
class SelectSituation:
    """One number of tokens. timed: an input for each call of a run. flush: the cache is overwritten
    before each call, because it could keep what the call before has read."""

    problem: Problem
    weights: ExpertWeights
    timed: tuple[Input, ...]
    truths: tuple[SelectTruth, ...]
    flush: bool

    def wrong(self, outputs: Sequence[torch.Tensor]) -> str:
        """Say what is wrong with the outputs for the truths' inputs; "" if nothing is."""
        miss = size = bound = 0.0
        for out, truth in zip(outputs, self.truths, strict=True):
            if tuple(out.shape) != self.problem.output_shape or not bool(out.isfinite().all()):
                return "an output of another shape, or values that are not finite"
            miss += float((out[truth.rows].double() - truth.exact).norm()) ** 2
            size += float(truth.exact.norm()) ** 2
            bound += truth.fair**2
        error, allowed = ((x / size) ** 0.5 if size else x for x in (miss, bound))
        allowed = FACTOR * allowed + _EPS
        return "" if error <= allowed else f"wrong: relative error {error:.2e} > {allowed:.2e}"


def situation(
    problem: Problem,
    weights: ExpertWeights,
    kind: RoutingKind,
    *,
    replicated: bool,
) -> SelectSituation:
    """Draw inputs of `problem.tokens` tokens for this rank; of all ranks alike where replicated."""
    device = weights.w1.device
    rank = 0 if replicated else problem.parallel.rank
    calls = _CALLS if problem.tokens <= _FEW_TOKENS else _CALLS_OF_MANY
    few = min(problem.tokens, _ROWS) * problem.hidden
    checked = min(max(1, -(-_LEAST_VALUES // few)), _MOST_CHECKED)
    inputs = [_input(problem, kind, device, rank, n) for n in range(max(calls, checked))]
    truths = tuple(_truth(problem, given) for given in inputs[:checked])
    timed = tuple(inputs[:calls])
    load = load_of(timed[0][1], _as_one_rank(problem), weights.expert_map)
    moved = work_of(problem, problem.scheme, [load]).bytes
    # Never several sets of weights: memory is needed for candidates' buffers.
    flush = rotation(moved, float("inf"), problem.tokens, l2=l2_bytes(device), memory=0).flush
    return SelectSituation(problem, weights, timed, truths, flush)


def _as_one_rank(problem: Problem) -> Problem:
    """All experts in one place, so that every pair counts."""
    if problem.parallel.world_size == 1:
        return problem
    single = type(problem.parallel)()
    return replace(problem, parallel=single, local_experts=None, expert_map=False)


def _input(
    problem: Problem, kind: RoutingKind, device: torch.device, rank: int, number: int
) -> Input:
    generator = torch.Generator(device).manual_seed(problem.tokens * 4096 + rank * 16 + number)
    x_TH = torch.randn(problem.tokens, problem.hidden, device=device, generator=generator)
    return x_TH.to(problem.dtype), draw(problem, kind, generator)


def _truth(problem: Problem, given: Input) -> SelectTruth:
    """Of a few rows, by the experts that these rows name alone."""
    x_TH, routing = given
    device = x_TH.device
    rows = torch.linspace(0, len(x_TH) - 1, min(len(x_TH), _ROWS), device=device).long()
    some = routing.of(rows)
    ids = sorted(set(some.topk_ids_TK.flatten().tolist()))
    one = _as_one_rank(problem)
    if one.expert_map:  # the other experts are elsewhere, and their pairs no affair of ours
        ids = [i for i in ids if i < problem.e] or [0]
    expert_map = torch.full((problem.experts,), -1, dtype=torch.int32, device=device)
    expert_map[torch.tensor(ids, device=device)] = torch.arange(
        len(ids), dtype=torch.int32, device=device
    )
    few = replace(one, tokens=len(rows), expert_map=True, local_experts=len(ids))
    drawn = replace(_drawn(problem, ids, device), expert_map=expert_map)
    exact = oracle(x_TH[rows], drawn, some, replace(few, quant="none"))
    fair = recipe(x_TH[rows], quantized(drawn, few), some, few)
    return SelectTruth(given, rows, exact, float((fair - exact).norm()))
