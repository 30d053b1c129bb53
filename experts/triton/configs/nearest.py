"""Tiles of a layer without a file of its own: those of the nearest layers that have one.

What a launch costs depends on few things: how deep and wide the products are, how many experts have
rows, and how many. Each entry of a tuned file is a point by these; a call takes the entry of the
nearest point, whatever layer it was tuned for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from experts.triton.configs.filenames import TileKey
from experts.triton.configs.files import Recipe
from experts.triton.configs.heuristics import ENDLESS, Steps
from experts.triton.configs.limits import MOST_TOKENS, path_violations
from experts.triton.gemv_tma import config as gemv_tma_config
from experts.triton.gemv_w4 import config as gemv_w4_config
from experts.triton.launch_config import SINGLE, STREAMED, Device, TilePair, gemms
from modular_kernel.errors import ConfigurationError
from modular_kernel.types import Problem

_TOKENS = tuple(1 << power for power in range(15))
NEAR = 1.0  # the farthest point whose tiles are better than those of the regimes
# How much it weighs that one of these is twice another, in the order of Point's fields.
_WEIGHTS = (1.0, 0.5, 0.35, 0.5)


@dataclass(frozen=True)
class Point:
    """Logarithms of base 2. rows: of an expert that has some. touched: such experts."""

    rows: float
    touched: float
    hidden: float
    intermediate: float

    @classmethod
    def of(cls, experts: int, top_k: int, hidden: int, intermediate: int, tokens: int) -> "Point":
        """As uniform routing has it."""
        touched = experts * (1 - (1 - min(top_k / experts, 1)) ** tokens)
        values = tokens * top_k / touched, touched, hidden, intermediate
        return cls(*map(math.log2, values))

    def distance(self, other: "Point") -> float:
        apart = (
            self.rows - other.rows,
            self.touched - other.touched,
            self.hidden - other.hidden,
            self.intermediate - other.intermediate,
        )
        return sum(weight * abs(by) for weight, by in zip(_WEIGHTS, apart, strict=True))


@dataclass(frozen=True)
class Known:
    """A layer and the launches it was tuned to. recipe: of ours."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int
    recipe: Recipe

    @classmethod
    def of(cls, key: TileKey, recipe: Recipe) -> "Known":
        """From a file of ours; ConfigurationError if it does not say what it was tuned for."""
        if recipe.tuned_for is None:
            raise ConfigurationError(f"tile file {recipe.origin}", got="none", need="tuned_for")
        tuned = recipe.tuned_for
        return cls(key.experts, tuned.top_k, tuned.hidden, key.intermediate, recipe)

    @property
    def name(self) -> str:
        sizes = self.experts, self.top_k, self.hidden, self.intermediate
        return "E={}, K={}, H={}, I={}".format(*sizes)

    def point(self, tokens: int) -> Point:
        return Point.of(self.experts, self.top_k, self.hidden, self.intermediate, tokens)


@dataclass(frozen=True)
class Borrowed:
    """A pair for calls of about `tokens` tokens, and whose it is: a layer's, or "regimes"."""

    tokens: int
    pair: TilePair
    origin: str


def borrow(
    known: Sequence[Known],
    problem: Problem,
    device: Device,
    otherwise: Steps,
    tokens: Sequence[int] = _TOKENS,
) -> list[Borrowed]:
    """For each number of tokens the pair of the nearest point, of `otherwise` if none is near.

    A pair that cannot be launched for `problem` is no point.
    """
    points = [
        (layer.point(there), pair, f"{layer.name}, {there} tokens", _top(pair, there, problem))
        for layer in known
        for there, pair in layer.recipe.pairs().items()
        if _fits(_lent(pair, problem, device, there), problem, device)
    ]
    found = []
    for number in tokens:
        sizes = problem.e, problem.top_k, problem.hidden, problem.intermediate
        here = Point.of(*sizes, number)
        apart, pair, origin = min(
            (
                (here.distance(point), pair, origin)
                for point, pair, origin, top in points
                if number <= top
            ),
            key=lambda each: each[0],
            default=(math.inf, otherwise.choose(number), ""),
        )
        if apart > NEAR:
            found.append(Borrowed(number, otherwise.choose(number), "regimes"))
        else:
            found.append(Borrowed(number, _lent(pair, problem, device, number), origin))
    return found


def _top(pair: TilePair, tokens: int, problem: Problem) -> int:
    """Return the most tokens that a pair tuned for `tokens` serves.

    They are a few where the path is for those.
    """
    most = MOST_TOKENS.get(pair.path)
    return max(tokens, most(problem)) if most else ENDLESS


def _lent(pair: TilePair, problem: Problem, device: Device, tokens: int) -> TilePair:
    """Return what `problem` makes of a neighbour's pair.

    How long a ring may be depends on the problem's depths, and launches of packed weights on how
    many programs there are.
    """
    if pair.path == STREAMED and gemv_tma_config.serves(problem, device):
        return gemv_tma_config.default(problem, device)
    if pair.path == SINGLE and problem.scheme.packed and gemv_w4_config.serves(problem):
        return gemv_w4_config.default(problem, tokens)
    return pair


def _fits(pair: TilePair, problem: Problem, device: Device) -> bool:
    return not any(
        any(path_violations(tile, gemm, pair.path, problem, device))
        for tile, gemm in zip((pair.gemm1, pair.gemm2), gemms(problem), strict=True)
    )


def steps_of(borrowed: Sequence[Borrowed]) -> Steps:
    """Give a call the pair of the nearest number of tokens."""
    between = [(one.tokens + two.tokens) // 2 for one, two in pairwise(borrowed)]
    return Steps((*between, ENDLESS), tuple(one.pair for one in borrowed))
