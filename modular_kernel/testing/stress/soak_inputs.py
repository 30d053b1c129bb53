"""Scenes of a soak: tokens and routing of every rank, drawn alike by all of them."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from modular_kernel.reference import oracle
from modular_kernel.spec.problem import Parallel, Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.cases.inputs import Inputs, Place, make_inputs
from modular_kernel.testing.cases.rank_inputs import part_of
from modular_kernel.testing.verify.over_ranks import recipe_over_ranks

_CPU = torch.device("cpu")
_SKEWS = (0.0, 0.5, 1.2, 4.0)  # odds of an expert are 1 / place ** skew
_IDLE, _SKIPPED = 0.15, 0.05  # how often a rank has no token, and a pair no expert
FACTOR = 2.0  # of plain torch's own error, over a call's rows
ROW_FACTOR = 8.0  # of plain torch's typical row, for each row: thousands are looked at
_EPS = 1e-6


@dataclass
class Scene:
    """A call. tokens_W: T of each rank. world: every rank's tokens and all weights, on the CPU;
    `mine` are this rank's rows of it. x_TH, routing: of this rank, on its device. replay: of a
    captured call into `out`."""

    tokens_W: tuple[int, ...]
    world: Inputs
    mine: slice
    x_TH: torch.Tensor
    routing: Routing
    replay: Callable[[], object] | None = None
    out: torch.Tensor | None = None

    def refill(self, new: "Scene") -> None:
        """Take the values of another scene of the same sizes, at this one's addresses."""
        self.world = new.world
        self.x_TH.copy_(new.x_TH)
        self.routing.topk_weights_TK.copy_(new.routing.topk_weights_TK)
        self.routing.topk_ids_TK.copy_(new.routing.topk_ids_TK)


class Scenes:
    """Draws scenes of a problem for one rank. draw: in the same state on all ranks.

    problem: the rank's. replicated: every rank passes the same. ids_dtype: of topk_ids.
    """

    def __init__(
        self,
        problem: Problem,
        device: torch.device,
        draw: random.Random,
        *,
        replicated: bool,
        ids_dtype: torch.dtype,
    ) -> None:
        self.problem, self.device, self.draw = problem, device, draw
        self._replicated, self._ids_dtype = replicated, ids_dtype
        whole = replace(problem, parallel=Parallel(), graph=False, tokens=1)
        made = make_inputs(whole, "uniform", _CPU)
        self._all_weights = made.weights
        # The same tensors in every call: a plan binds them once, a graph for ever.
        self.weights: ExpertWeights = part_of(
            made, slice(0), problem, Place(device), strided=False
        ).weights

    def scene(self, tokens_W: tuple[int, ...] | None = None) -> Scene:
        """Return a new one; tokens_W: with these sizes."""
        parallel, draw = self.problem.parallel, self.draw
        if tokens_W is None:
            most = self.problem.tokens
            counts = [draw.randint(1, most) for _ in range(parallel.world_size)]
            counts = [0 if draw.random() < _IDLE else count for count in counts]
            tokens_W = (counts[0],) * len(counts) if self._replicated else tuple(counts)
        total = tokens_W[0] if self._replicated else sum(tokens_W)
        start = 0 if self._replicated else sum(tokens_W[: parallel.rank])
        mine = slice(start, start + tokens_W[parallel.rank])
        generator = torch.Generator().manual_seed(draw.getrandbits(32))
        routing = self._routing(total, _SKEWS[draw.randrange(len(_SKEWS))], generator)
        x_TH = torch.randn(total, self.problem.hidden, generator=generator)
        x_TH = x_TH.to(self.problem.dtype)
        own = Routing(
            routing.topk_weights_TK[mine].to(self.device, copy=True),
            routing.topk_ids_TK[mine].to(self.device, copy=True),
        )
        world = Inputs(x_TH, self._all_weights, routing)
        return Scene(tokens_W, world, mine, x_TH[mine].to(self.device, copy=True), own)

    def _routing(self, tokens: int, skew: float, generator: torch.Generator) -> Routing:
        experts, top_k = self.problem.experts, self.problem.top_k
        odds = torch.arange(1, experts + 1).float() ** -skew
        odds = odds[torch.randperm(experts, generator=generator)]
        ids = torch.empty(0, top_k, dtype=torch.int64)
        if tokens:
            ids = torch.multinomial(odds.expand(tokens, -1), top_k, generator=generator)
        ids[torch.rand(ids.shape, generator=generator) < _SKIPPED] = -1
        weights = torch.rand(ids.shape, generator=generator) + 0.1
        return Routing(weights, ids.to(self._ids_dtype))


def judged(scene: Scene, out: torch.Tensor, problem: Problem) -> tuple[float, str]:
    """Error over bound of this rank's rows (T, H), by the oracle of all ranks' tokens; and what is
    wrong, "" if nothing. Synchronizes."""
    world, tokens = scene.world, len(scene.world.x_TH)
    if not tokens:
        return 0.0, ""
    whole = replace(problem, parallel=Parallel(), graph=False).with_tokens(tokens)
    exact_of_all = oracle(world.x_TH, world.weights, world.routing, whole).double()
    fair_of_all = (recipe_over_ranks(world, problem) - exact_of_all).norm(dim=1)
    ours, exact, fair = out.cpu().double(), exact_of_all[scene.mine], fair_of_all[scene.mine]
    if ours.shape != exact.shape or not bool(ours.isfinite().all()):
        return float("inf"), f"shape {tuple(ours.shape)}, or values that are not finite"
    away = (ours - exact).norm(dim=1)
    share = float(fair_of_all.norm() / (exact_of_all.norm() + _EPS))
    bound = FACTOR * max(float(fair.norm()), share * float(exact.norm())) + _EPS
    worst = float(away.norm()) / bound
    sizes = exact.norm(dim=1)
    rows = away > ROW_FACTOR * (share * torch.maximum(sizes, sizes.mean()) + _EPS)
    if worst > 1 or bool(rows.any()):
        return worst, f"{worst:.2f} of its bound, {int(rows.sum())} rows far off"
    return worst, ""
