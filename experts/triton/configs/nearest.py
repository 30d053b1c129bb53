"""Configurations for layers without a tuned file, taken from the most similar tuned layers.

The time of a launch depends mainly on the sizes of the GEMMs, the number of active experts, and the
rows per active expert. An expert is active if it has rows. In these coordinates, each entry of a
tuned file is a point. A call uses ("borrows") the configuration of the nearest point, which may
belong to any tuned layer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from experts.triton.configs.files import ConfigKey, TunedConfigs
from experts.triton.configs.heuristics import ConfigSteps, is_launchable
from experts.triton.launch_config import Device, MoEConfig
from experts.triton.path import UNBOUNDED_TOKENS, Path
from experts.triton.paths import ALL_PATHS, BASE_PATH, BY_NAME
from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.problem import Problem
from modular_kernel.text import format_count

_TOKEN_COUNTS = tuple(1 << power for power in range(15))
# Up to this mean number of rows per expert, loading weights takes most of the time.
MIN_COMPUTE_BOUND_ROWS = 24
MAX_DISTANCE = 1.0  # at a larger distance, the heuristics are used
# In this range of mean rows per expert, the best launch depends on the skew of the routing. Tuned
# files are for uniform routing, but the heuristics of these schemes are for both.
_SKEWED_ROWS = (3, 56)
_SKEWED_SCHEMES = ("none", "fp8_w8a8_block")
# The distance that a factor of two adds, for each field of Point.
_DISTANCE_WEIGHTS = (1.0, 0.5, 0.35, 0.5)


@dataclass(frozen=True)
class Point:
    """A call of a layer, in the coordinates by which calls of different layers are compared.

    rows: log2 of the rows per active expert.
    active_experts: log2 of the expected number of experts that have rows.
    hidden: log2 of the hidden size.
    intermediate: log2 of the intermediate size.
    """

    rows: float
    active_experts: float
    hidden: float
    intermediate: float

    @classmethod
    def from_call(
        cls, experts: int, top_k: int, hidden: int, intermediate: int, num_tokens: int
    ) -> "Point":
        """Compute the point of a call of num_tokens tokens, assuming uniform routing."""
        active_experts = experts * (1 - (1 - min(top_k / experts, 1)) ** num_tokens)
        coordinates = num_tokens * top_k / active_experts, active_experts, hidden, intermediate
        return cls(*map(math.log2, coordinates))

    def distance_to(self, other: "Point") -> float:
        """Return the weighted sum of the distances along the coordinates."""
        differences = (
            self.rows - other.rows,
            self.active_experts - other.active_experts,
            self.hidden - other.hidden,
            self.intermediate - other.intermediate,
        )
        return sum(
            weight * abs(difference)
            for weight, difference in zip(_DISTANCE_WEIGHTS, differences, strict=True)
        )


@dataclass(frozen=True)
class TunedLayer:
    """The sizes of a tuned layer, and the contents of its config file."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int
    tuned_configs: TunedConfigs

    @classmethod
    def from_config_file(cls, key: ConfigKey, tuned_configs: TunedConfigs) -> "TunedLayer":
        """Build a TunedLayer from a config file in our format and its name.

        Raise ConfigurationError if the file has no "tuned_for".
        """
        if tuned_configs.tuned_for is None:
            raise ConfigurationError(
                f"config file {tuned_configs.origin}", got='no "tuned_for"', need='"tuned_for"'
            )
        tuned = tuned_configs.tuned_for
        return cls(key.experts, tuned.top_k, tuned.hidden, key.intermediate, tuned_configs)

    @property
    def name(self) -> str:
        sizes = self.experts, self.top_k, self.hidden, self.intermediate
        return "E={}, K={}, H={}, I={}".format(*sizes)

    def point(self, num_tokens: int) -> Point:
        """Return the point of a call of num_tokens tokens of this layer."""
        sizes = self.experts, self.top_k, self.hidden, self.intermediate
        return Point.from_call(*sizes, num_tokens)


@dataclass(frozen=True)
class BorrowedConfig:
    """A configuration that is borrowed from a tuned layer.

    tokens: the number of tokens of the call that borrows it.
    config: the configuration.
    origin: the tuned layer, or "heuristics" if no tuned layer is near enough.
    """

    tokens: int
    config: MoEConfig
    origin: str


def borrow_configs(
    tuned_layers: Sequence[TunedLayer],
    problem: Problem,
    device: Device,
    fallback: ConfigSteps,
    token_counts: Sequence[int] = _TOKEN_COUNTS,
) -> list[BorrowedConfig]:
    """Return the configuration of the nearest point for each of token_counts.

    Points whose configuration cannot be launched for `problem` are skipped. If no point is within
    MAX_DISTANCE, the configuration of `fallback` is used.
    """
    points = [
        (
            layer.point(tuned_tokens),
            config,
            f"{layer.name}, {label}",
            _get_max_tokens_for(config, tuned_tokens, problem),
        )
        for layer in tuned_layers
        for tuned_tokens, config in layer.tuned_configs.configs().items()
        for label in (format_count(tuned_tokens, "token"),)
        if is_launchable(_adapt_config(config, problem, device, tuned_tokens), problem, device)
    ]
    borrowed = []
    for num_tokens in token_counts:
        sizes = problem.e, problem.top_k, problem.hidden, problem.intermediate
        target = Point.from_call(*sizes, num_tokens)
        distance, config, origin = min(
            (
                (target.distance_to(point), config, origin)
                for point, config, origin, max_tokens in points
                if num_tokens <= max_tokens
            ),
            key=lambda candidate: candidate[0],
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


def _get_max_tokens_for(config: MoEConfig, tokens: int, problem: Problem) -> int:
    """Return the number of tokens of the largest call that may use a configuration.

    Only paths for few tokens have a limit. The configuration was tuned for `tokens` tokens.
    """
    max_tokens = BY_NAME[config.path].max_tokens(problem)
    return UNBOUNDED_TOKENS if max_tokens is None else max(tokens, max_tokens)


def _adapt_config(config: MoEConfig, problem: Problem, device: Device, tokens: int) -> MoEConfig:
    """Adapt a borrowed configuration to `problem`.

    If the launches of the path are not transferable (`Path.transferable`), only the path is
    borrowed, with its default launches. For example, the best launch can depend on K.
    """
    path = BY_NAME[config.path]
    if path.transferable or not path.supports(problem, device):
        return config
    return path.default_config(problem, tokens, device)


def depends_on_skew(problem: Problem, tokens: int) -> bool:
    """Return whether the best launch of a call of `tokens` tokens depends on the routing's skew.

    Tuned files are for uniform routing, so such calls do not borrow launches from them.
    """
    if problem.scheme.name not in _SKEWED_SCHEMES:
        return False
    min_tokens, max_tokens = _skewed_tokens(problem)
    return min_tokens < tokens <= max_tokens


def _skewed_tokens(problem: Problem) -> tuple[int, int]:
    """Return the token counts with the numbers of rows per expert in _SKEWED_ROWS."""
    min_rows, max_rows = _SKEWED_ROWS
    experts, top_k = problem.experts, problem.top_k
    return min_rows * experts // top_k, max_rows * experts // top_k


def prefer_heuristics_by_rows(
    steps: ConfigSteps, defaults: ConfigSteps, problem: Problem
) -> ConfigSteps:
    """Replace borrowed configurations by `defaults` that suit the rows per expert better.

    With more than MIN_COMPUTE_BOUND_ROWS rows per expert, the rows per expert determine the best
    path and block_m, but the nearest entry of a tuned file may be for fewer rows. A borrowed
    configuration is therefore replaced if its path or its block_m differs from the default. On
    paths other than BASE_PATH, it is also replaced if its block_n is smaller than the default.

    On an H200 with 32 to 128 rows per expert, the replacements take 0.78 to 0.99 times as long as
    the borrowed configurations (2026-11-28, triton 3.6.0, seven layers).

    If the best launch depends on the skew of the routing (`depends_on_skew`), all borrowed
    configurations are replaced. The replacements take 0.93 to 0.98 times as long with skewed
    routing and 1.00 to 1.04 times as long with uniform routing (2026-12-01, three layers with 4 to
    21 rows per expert).
    """
    max_memory_bound_tokens = MIN_COMPUTE_BOUND_ROWS * problem.experts // problem.top_k

    def replace_config(max_tokens: int, config: MoEConfig) -> MoEConfig:
        default_config = defaults.choose(max_tokens)
        if depends_on_skew(problem, max_tokens):
            return default_config
        if max_tokens <= max_memory_bound_tokens:
            return config
        borrowed_gemm1, default_gemm1 = config.gemm1, default_config.gemm1
        is_narrower = (
            config.path != BASE_PATH.name and borrowed_gemm1.block_n < default_gemm1.block_n
        )
        is_suitable = (
            config.path == default_config.path
            and borrowed_gemm1.block_m == default_gemm1.block_m
            and not is_narrower
        )
        return config if is_suitable else default_config

    breakpoints = *_skewed_tokens(problem), max_memory_bound_tokens, *defaults.last_tokens
    return steps.map_steps(breakpoints, replace_config)


def steps_from_borrowed(borrowed: Sequence[BorrowedConfig]) -> ConfigSteps:
    """Return steps in which a call uses the configuration for the nearest token count."""
    midpoints = [(low.tokens + high.tokens) // 2 for low, high in pairwise(borrowed)]
    return ConfigSteps(
        (*midpoints, UNBOUNDED_TOKENS),
        tuple(borrowed_config.config for borrowed_config in borrowed),
    )


def split_at_breakpoints(steps: ConfigSteps, problem: Problem, device: Device) -> ConfigSteps:
    """Split the borrowed steps of paths whose launches are not transferable.

    These paths use their own `default_config`. Their steps are split at the breakpoints of the
    path, because `default_config` changes there.
    """
    for path in ALL_PATHS:
        if path.transferable or not path.supports(problem, device):
            continue

        def replace_config(
            max_tokens: int, config: MoEConfig, path: type[Path] = path
        ) -> MoEConfig:
            uses_path = config.path == path.name
            return path.default_config(problem, max_tokens, device) if uses_path else config

        steps = steps.map_steps(path.breakpoints(problem), replace_config)
    return steps
