"""Default launch configurations, for layers and GPUs without a tuned file.

A path is one implementation of TritonExperts with its own kernels (`experts.triton.path`), for
example "aligned" or "gemv". A configuration (`MoEConfig`) names a path and the launches of both
GEMMs. The default configurations of a layer are a step function of the number of tokens: a path is
used for a range of token counts, and its `default_config` gives the launches.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from experts.triton.launch_config import Device, MoEConfig, Violation, gemms
from experts.triton.path import UNBOUNDED_TOKENS
from experts.triton.path import Path as ExecutionPath
from experts.triton.paths import ALL_PATHS, BASE_PATH, BY_NAME, NAMES
from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.problem import Problem


@dataclass(frozen=True)
class ConfigSteps:
    """Configurations as a step function of the number of tokens.

    Step i is for calls of last_tokens[i - 1] + 1 to last_tokens[i] tokens.

    last_tokens: the largest number of tokens of each step, ascending. The last one is
        UNBOUNDED_TOKENS.
    configs: the configuration of each step.
    """

    last_tokens: tuple[int, ...]
    configs: tuple[MoEConfig, ...]

    def find_step(self, num_tokens: int) -> int:
        """Return the index of the step of a call of num_tokens tokens."""
        return bisect_left(self.last_tokens, num_tokens)

    def choose(self, num_tokens: int) -> MoEConfig:
        """Return the configuration of a call of num_tokens tokens."""
        return self.configs[self.find_step(num_tokens)]

    def max_tokens_by_path_and_block(self, limit: int) -> dict[tuple[str, int], int]:
        """Map each (path, block_m) to the number of tokens of the largest call that uses it.

        Only calls of at most `limit` tokens are considered.
        """
        result: dict[tuple[str, int], int] = {}
        for last in self.last_tokens:
            max_tokens = min(limit, last)
            config = self.choose(max_tokens)
            key = config.path, config.gemm1.block_m
            result[key] = max(max_tokens, result.get(key, 0))
        return result

    def replace_other_paths(self, paths: Collection[str], defaults: "ConfigSteps") -> "ConfigSteps":
        """Keep configurations whose path is in `paths`, and take the others from `defaults`."""
        return self.map_steps(
            defaults.last_tokens,
            lambda last, config: config if config.path in paths else defaults.choose(last),
        )

    def map_steps(
        self, ends: Iterable[int], change: Callable[[int, MoEConfig], MoEConfig]
    ) -> "ConfigSteps":
        """Split steps after each of `ends`, apply `change` to all steps, and merge equal neighbors.

        ends: token counts after which a new step begins.
        change: a function of the last token count of a step and its configuration. It returns the
            configuration for all token counts of that step.
        """
        boundaries = sorted(
            {*self.last_tokens, *(end for end in ends if 0 <= end < UNBOUNDED_TOKENS)}
        )
        configs = [change(last, self.choose(last)) for last in boundaries]
        last_of_run = [i for i, config in enumerate(configs[:-1]) if config != configs[i + 1]] + [
            len(configs) - 1
        ]
        return ConfigSteps(
            tuple(boundaries[i] for i in last_of_run), tuple(configs[i] for i in last_of_run)
        )


def config_violations(
    config: MoEConfig, problem: Problem, device: Device
) -> Iterator[tuple[str, Violation]]:
    """Yield every reason why `config` cannot be launched, as (name of the GEMM, violation).

    The name is "" if the violation concerns both GEMMs.
    """
    path = BY_NAME[config.path]
    if not path.supports(problem, device):
        yield "", Violation("path", config.path, f"one that supports {problem.quant}")
        return
    for launch, gemm in zip((config.gemm1, config.gemm2), gemms(problem), strict=True):
        if not isinstance(launch, path.launch):
            need = f"{path.launch.__name__}, which the {path.name} path requires"
            yield str(gemm), Violation("launch", type(launch).__name__, need)
            continue
        for violation in path.violations(launch, gemm, problem, device):
            yield str(gemm), violation


def is_launchable(config: MoEConfig, problem: Problem, device: Device) -> bool:
    """Return whether `config` can be launched for `problem` on `device`."""
    return next(config_violations(config, problem, device), None) is None


def require_config(config: MoEConfig, problem: Problem, device: Device, origin: str) -> None:
    """Raise ConfigurationError if `config` cannot be launched. `origin` names it in the message."""
    for gemm, violation in config_violations(config, problem, device):
        what = f"{origin}: {gemm} {violation.what}" if gemm else f"{origin}: {violation.what}"
        raise ConfigurationError(what, got=violation.got, need=violation.need)


def make_heuristic_steps(
    problem: Problem, device: Device, paths: Collection[str] = NAMES, *, prepared: bool = False
) -> ConfigSteps:
    """Return the default configurations of `problem` on `device`.

    The defaults of BASE_PATH cover all token counts. The paths in ALL_PATHS are then applied in
    order: each path that supports the problem replaces the configurations in its token range.

    Raise ConfigurationError if no launch is compatible with the scale groups of the scheme.

    paths: names of the paths to use, in addition to BASE_PATH.
    prepared: whether calls use prepared weights.
    """
    steps = ConfigSteps(
        (UNBOUNDED_TOKENS,), (BASE_PATH.default_config(problem, UNBOUNDED_TOKENS, device),)
    )
    for path in ALL_PATHS:
        if path is BASE_PATH or (path.name in paths and path.supports(problem, device)):
            steps = overlay_path(steps, path, problem, device)
    return overlay_prepared_configs(steps, problem, device, paths) if prepared else steps


def overlay_prepared_configs(
    steps: ConfigSteps, problem: Problem, device: Device, paths: Collection[str]
) -> ConfigSteps:
    """Replace configurations by the `prepared_configs` of `paths`."""
    for path in ALL_PATHS:
        if path.name not in paths or not path.supports(problem, device):
            continue
        prepared_configs = path.prepared_configs(problem)

        def change(
            last: int,
            config: MoEConfig,
            prepared_configs: Sequence[tuple[int, MoEConfig]] = prepared_configs,
        ) -> MoEConfig:
            return next(
                (
                    path_config
                    for min_tokens, path_config in reversed(prepared_configs)
                    if min_tokens <= last
                ),
                config,
            )

        steps = steps.map_steps((min_tokens - 1 for min_tokens, _ in prepared_configs), change)
    return steps


def replace_foreign_configs(
    steps: ConfigSteps, problem: Problem, device: Device, paths: Collection[str]
) -> ConfigSteps:
    """Replace configurations from a file of vLLM or SGLang if one of `paths` is faster."""
    for path in ALL_PATHS:
        if path.name not in paths or not path.supports(problem, device):
            continue

        def change(last: int, config: MoEConfig, path: type[ExecutionPath] = path) -> MoEConfig:
            return path.replace_foreign_config(config, last, problem, device)

        min_tokens, max_tokens = path.min_tokens(problem), path.max_tokens(problem)
        ends = min_tokens - 1, *path.breakpoints(problem), max_tokens or UNBOUNDED_TOKENS
        steps = steps.map_steps(ends, change)
    return steps


def overlay_path(
    steps: ConfigSteps, path: type[ExecutionPath], problem: Problem, device: Device
) -> ConfigSteps:
    """Replace the configurations in the token range of `path` by the defaults of `path`."""
    min_tokens, max_tokens = path.min_tokens(problem), path.max_tokens(problem)
    if max_tokens == 0:
        return steps
    last_tokens = UNBOUNDED_TOKENS if max_tokens is None else max_tokens

    def change(last: int, config: MoEConfig) -> MoEConfig:
        return (
            path.default_config(problem, last, device)
            if min_tokens <= last <= last_tokens
            else config
        )

    return steps.map_steps((min_tokens - 1, *path.breakpoints(problem), last_tokens), change)
