"""Configurations for layers without a tuned file, borrowed from the nearest tuned layers.

The time of a launch depends mainly on the sizes of the GEMMs, the number of active experts (those
that have rows) and the rows per active expert. In these coordinates, each entry of a tuned file is
a point. A call uses the configuration of the nearest point, which may belong to any layer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from experts.triton.configs.files import ConfigKey, TunedConfigs
from experts.triton.configs.heuristics import ConfigSteps, is_launchable
from experts.triton.launch_config import Device, MoEConfig
from experts.triton.path import UNBOUNDED_TOKENS, Path
from experts.triton.paths import BASE, BY_NAME, PATHS
from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.problem import Problem
from modular_kernel.text import counted

_TOKENS = tuple(1 << power for power in range(15))
MIN_COMPUTE_BOUND_ROWS = 24  # mean rows per expert up to which loading weights takes most time
MAX_DISTANCE = 1.0  # with a larger distance, the heuristics are used
# Distance per factor of two in each field of Point, in order.
_WEIGHTS = (1.0, 0.5, 0.35, 0.5)


@dataclass(frozen=True)
class Point:
    """A call of a layer in log2 coordinates, for comparing calls of different layers.

    rows: rows per active expert.
    active_experts: expected number of experts with rows.
    hidden, intermediate: sizes of the layer.
    """

    rows: float
    active_experts: float
    hidden: float
    intermediate: float

    @classmethod
    def of(cls, experts: int, top_k: int, hidden: int, intermediate: int, tokens: int) -> "Point":
        """Compute the point of a call of `tokens` tokens under uniform routing."""
        active_experts = experts * (1 - (1 - min(top_k / experts, 1)) ** tokens)
        values = tokens * top_k / active_experts, active_experts, hidden, intermediate
        return cls(*map(math.log2, values))

    def distance(self, other: "Point") -> float:
        differences = (
            self.rows - other.rows,
            self.active_experts - other.active_experts,
            self.hidden - other.hidden,
            self.intermediate - other.intermediate,
        )
        return sum(
            weight * abs(difference)
            for weight, difference in zip(_WEIGHTS, differences, strict=True)
        )


@dataclass(frozen=True)
class TunedLayer:
    """The sizes of a tuned layer and the contents of its config file."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int
    tuned_configs: TunedConfigs

    @classmethod
    def of(cls, key: ConfigKey, tuned_configs: TunedConfigs) -> "TunedLayer":
        """Build from a file in our format. Raise ConfigurationError if it has no "tuned_for"."""
        if tuned_configs.tuned_for is None:
            raise ConfigurationError(
                f"config file {tuned_configs.origin}", got="none", need="tuned_for"
            )
        tuned = tuned_configs.tuned_for
        return cls(key.experts, tuned.top_k, tuned.hidden, key.intermediate, tuned_configs)

    @property
    def name(self) -> str:
        sizes = self.experts, self.top_k, self.hidden, self.intermediate
        return "E={}, K={}, H={}, I={}".format(*sizes)

    def point(self, tokens: int) -> Point:
        return Point.of(self.experts, self.top_k, self.hidden, self.intermediate, tokens)


@dataclass(frozen=True)
class BorrowedConfig:
    """The configuration for about `tokens` tokens, and its origin: a layer or "heuristics"."""

    tokens: int
    config: MoEConfig
    origin: str


def borrow_configs(
    tuned_layers: Sequence[TunedLayer],
    problem: Problem,
    device: Device,
    fallback: ConfigSteps,
    tokens: Sequence[int] = _TOKENS,
) -> list[BorrowedConfig]:
    """Return, for each of `tokens`, the configuration of the nearest point.

    Points whose configuration cannot be launched for `problem` are skipped. If no point is within
    MAX_DISTANCE, the configuration is that of `fallback`.
    """
    points = [
        (
            layer.point(tuned_tokens),
            config,
            f"{layer.name}, {label}",
            _max_tokens_for(config, tuned_tokens, problem),
        )
        for layer in tuned_layers
        for tuned_tokens, config in layer.tuned_configs.configs().items()
        for label in (counted(tuned_tokens, "token"),)
        if is_launchable(_adapt_config(config, problem, device, tuned_tokens), problem, device)
    ]
    borrowed = []
    for num_tokens in tokens:
        sizes = problem.e, problem.top_k, problem.hidden, problem.intermediate
        target = Point.of(*sizes, num_tokens)
        distance, config, origin = min(
            (
                (target.distance(point), config, origin)
                for point, config, origin, max_tokens in points
                if num_tokens <= max_tokens
            ),
            key=lambda each: each[0],
            default=(math.inf, fallback.choose(num_tokens), ""),
        )
        if distance > MAX_DISTANCE:
            borrowed.append(BorrowedConfig(num_tokens, fallback.choose(num_tokens), "heuristics"))
        else:
            borrowed.append(
                BorrowedConfig(
                    num_tokens, _adapt_config(config, problem, device, num_tokens), origin
                )
            )
    return borrowed


def _max_tokens_for(config: MoEConfig, tokens: int, problem: Problem) -> int:
    """Return the largest call that may use a configuration that was tuned for `tokens`.

    Only paths for few tokens have a limit.
    """
    max_tokens = BY_NAME[config.path].max_tokens(problem)
    return UNBOUNDED_TOKENS if max_tokens is None else max(tokens, max_tokens)


def _adapt_config(config: MoEConfig, problem: Problem, device: Device, tokens: int) -> MoEConfig:
    """Adapt a borrowed configuration to `problem`.

    If the path's launches do not transfer (`Path.transferable`), only the path is borrowed: the
    number of ring stages can depend on K, and the best launch for 4-bit weights on the number of
    programs.
    """
    path = BY_NAME[config.path]
    if path.transferable or not path.supports(problem, device):
        return config
    return path.default_config(problem, tokens, device)


def prefer_heuristics_by_rows(
    steps: ConfigSteps, defaults: ConfigSteps, problem: Problem
) -> ConfigSteps:
    """Replace borrowed configurations by `defaults` where those fit the rows per expert better.

    With more than MIN_COMPUTE_BOUND_ROWS rows per expert, a borrowed configuration is replaced if
    its path or block_m differs from the default's. On other paths than BASE, it is also replaced if
    its block_n is smaller. The best path and block_m follow from the rows per expert, and the
    nearest entry may have been tuned for fewer: files have entries for powers of two, 1.4 to 2 x
    apart in rows.

    Measured on one H200 (2026-11-28, triton 3.6.0, seven layers): with 32 to 128 rows per expert,
    the replacement takes 0.78 to 0.99 x the time.
    """
    max_memory_bound_tokens = MIN_COMPUTE_BOUND_ROWS * problem.experts // problem.top_k

    def replace_config(max_tokens: int, config: MoEConfig) -> MoEConfig:
        default = defaults.choose(max_tokens)
        if max_tokens <= max_memory_bound_tokens:
            return config
        borrowed_gemm1, default_gemm1 = config.gemm1, default.gemm1
        narrower = config.path != BASE.name and borrowed_gemm1.block_n < default_gemm1.block_n
        matches = (
            config.path == default.path
            and borrowed_gemm1.block_m == default_gemm1.block_m
            and not narrower
        )
        return config if matches else default

    return steps.map_steps((max_memory_bound_tokens, *defaults.last_tokens), replace_config)


def steps_from_borrowed(borrowed: Sequence[BorrowedConfig]) -> ConfigSteps:
    """Build a step function that uses the configuration of the nearest token count."""
    midpoints = [(low.tokens + high.tokens) // 2 for low, high in pairwise(borrowed)]
    return ConfigSteps((*midpoints, UNBOUNDED_TOKENS), tuple(b.config for b in borrowed))


def split_at_breakpoints(steps: ConfigSteps, problem: Problem, device: Device) -> ConfigSteps:
    """Split the borrowed steps of paths whose launches do not transfer at their breakpoints.

    These paths use their own `default_config`, which changes there.
    """
    for path in PATHS:
        if path.transferable or not path.supports(problem, device):
            continue

        def replace_config(
            max_tokens: int, config: MoEConfig, path: type[Path] = path
        ) -> MoEConfig:
            is_default = config.path == path.name
            return path.default_config(problem, max_tokens, device) if is_default else config

        steps = steps.map_steps(path.breakpoints(problem), replace_config)
    return steps
