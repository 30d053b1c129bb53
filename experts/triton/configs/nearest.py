"""Configurations of a layer without a file of its own: the nearest layers' that have one.

What a launch costs depends on few things: how deep and wide the products are, how many experts have
rows, and how many. Each entry of a tuned file is a point by these; a call takes the entry of the
nearest point, whatever layer it was tuned for.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from experts.triton.configs.files import VERSION, ConfigKey, Recipe
from experts.triton.configs.former import named_now
from experts.triton.configs.heuristics import Steps, fits
from experts.triton.launch_config import Device, MoEConfig
from experts.triton.path import ENDLESS
from experts.triton.paths import BASE, BY_NAME
from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.problem import Problem
from modular_kernel.text import counted

_TOKENS = tuple(1 << power for power in range(15))
LEAST_ROWS = 24  # of an expert: with fewer, weights take longer to arrive than to be multiplied
NEAR = 1.0  # the farthest point whose launches are better than those of the heuristics
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
    def of(cls, key: ConfigKey, recipe: Recipe) -> "Known":
        """From a file of ours; ConfigurationError if it does not say what it was tuned for."""
        if recipe.tuned_for is None:
            raise ConfigurationError(f"config file {recipe.origin}", got="none", need="tuned_for")
        tuned = recipe.tuned_for
        return cls(key.experts, tuned.top_k, tuned.hidden, key.intermediate, recipe)

    @property
    def name(self) -> str:
        sizes = self.experts, self.top_k, self.hidden, self.intermediate
        return "E={}, K={}, H={}, I={}".format(*sizes)

    def configs(self, problem: Problem, device: Device) -> Iterator[tuple[int, MoEConfig]]:
        """Yield what the file has by tokens, by the paths that it means for `problem`."""
        for tokens, config in self.recipe.configs().items():
            former = self.recipe.version < VERSION
            yield tokens, named_now(config, problem, device) if former else config

    def point(self, tokens: int) -> Point:
        return Point.of(self.experts, self.top_k, self.hidden, self.intermediate, tokens)


@dataclass(frozen=True)
class Borrowed:
    """What calls of about `tokens` tokens launch, and whose it is: a layer's, or "heuristics"."""

    tokens: int
    config: MoEConfig
    origin: str


def borrow(
    known: Sequence[Known],
    problem: Problem,
    device: Device,
    otherwise: Steps,
    tokens: Sequence[int] = _TOKENS,
) -> list[Borrowed]:
    """Return for each number of tokens the nearest point's, of `otherwise` if none is near.

    A configuration that cannot be launched for `problem` is no point.
    """
    points = [
        (layer.point(there), config, f"{layer.name}, {of}", _top(config, there, problem))
        for layer in known
        for there, config in layer.configs(problem, device)
        for of in (counted(there, "token"),)
        if fits(_lent(config, problem, device, there), problem, device)
    ]
    found = []
    for number in tokens:
        sizes = problem.e, problem.top_k, problem.hidden, problem.intermediate
        here = Point.of(*sizes, number)
        apart, config, origin = min(
            (
                (here.distance(point), config, origin)
                for point, config, origin, top in points
                if number <= top
            ),
            key=lambda each: each[0],
            default=(math.inf, otherwise.choose(number), ""),
        )
        if apart > NEAR:
            found.append(Borrowed(number, otherwise.choose(number), "heuristics"))
        else:
            found.append(Borrowed(number, _lent(config, problem, device, number), origin))
    return found


def _top(config: MoEConfig, tokens: int, problem: Problem) -> int:
    """Return the most tokens that a configuration tuned for `tokens` serves.

    They are a few where the path is for those.
    """
    most = BY_NAME[config.path].most_tokens(problem)
    return ENDLESS if most is None else max(tokens, most)


def _lent(config: MoEConfig, problem: Problem, device: Device, tokens: int) -> MoEConfig:
    """Return what `problem` makes of a point's: some paths lend their names alone.

    How long a ring may be depends on the problem's depths, and launches of 4-bit weights on how
    many programs there are.
    """
    path = BY_NAME[config.path]
    if path.lends or not path.serves(problem, device):
        return config
    return path.default_config(problem, tokens, device)


def checked_by_rows(steps: Steps, own: Steps, problem: Problem) -> Steps:
    """Return borrowed `steps`, with `own` heuristics for calls of more than LEAST_ROWS rows an
    expert where paths or block heights differ, or borrowed tiles are narrower (not on BASE).

    Which path and how high a block pays follows from an expert's rows. The nearest layer may have
    been tuned for fewer of them: a power of two of its tokens is a step of 1.4 to 2 x in rows.
    Measured on one H200 (2026-11-28, triton 3.6.0, seven layers): 0.78 to 0.99 x the time with 32
    to 128 rows.
    """
    few = LEAST_ROWS * problem.experts // problem.top_k

    def change(last: int, config: MoEConfig) -> MoEConfig:
        usual = own.choose(last)
        if last <= few:
            return config
        one, other = config.gemm1, usual.gemm1
        narrower = config.path != BASE.name and one.block_n < other.block_n
        alike = config.path == usual.path and one.block_m == other.block_m and not narrower
        return config if alike else usual

    return steps.changed((few, *own.lasts), change)


def steps_of(borrowed: Sequence[Borrowed]) -> Steps:
    """Give a call the configuration of the nearest number of tokens."""
    between = [(one.tokens + two.tokens) // 2 for one, two in pairwise(borrowed)]
    return Steps((*between, ENDLESS), tuple(one.config for one in borrowed))
