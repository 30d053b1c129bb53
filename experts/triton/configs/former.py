"""Translation of tuned files of version 1 to the current paths.

Version 1 has fewer path names: two paths shared the name "single", and launches for 4-bit weights
with few rows were stored under the aligned path. Paths added later are faster than the launches in
such files wherever the heuristics choose them.
"""

from collections.abc import Collection
from dataclasses import fields

from experts.triton.configs.heuristics import ConfigSteps, overlay_path
from experts.triton.launch_config import Device, Launch, MoEConfig
from experts.triton.path import UNBOUNDED_TOKENS, Path
from experts.triton.paths import PATHS
from modular_kernel.spec.problem import Problem

V1_NAMES = tuple(dict.fromkeys(name for path in PATHS for name in path.former_names))
# Paths that a file of version 1 can name.
V1_PATHS = tuple(path.name for path in PATHS if path.replaces is None)


def path_from_v1(name: str, problem: Problem, device: Device) -> type[Path]:
    """Return the path that `name` denotes in a file of version 1, preferably a supported one."""
    candidates = [path for path in PATHS if name in path.former_names]
    return next((path for path in candidates if path.serves(problem, device)), candidates[0])


def config_from_v1(config: MoEConfig, problem: Problem, device: Device) -> MoEConfig:
    """Convert a configuration of version 1 to the path and the launch types of today."""
    path = path_from_v1(config.path, problem, device)
    one, two = (_convert_launch(launch, path) for launch in (config.gemm1, config.gemm2))
    return MoEConfig(one, two, path.name)


def _convert_launch(launch: Launch, path: type[Path]) -> Launch:
    values = {field.name: getattr(launch, field.name) for field in fields(path.launch)}
    converted: Launch = path.launch(**values)
    return converted


def apply_newer_paths(
    steps: ConfigSteps, problem: Problem, device: Device, paths: Collection[str]
) -> ConfigSteps:
    """Replace steps of a version 1 file with those of paths that it could not name."""
    for path in PATHS:
        if path.name not in paths or not path.serves(problem, device):
            continue
        if path.overrides_v1_files:
            steps = overlay_path(steps, path, problem, device)
        if path.replaces is None:
            continue

        def change(last: int, config: MoEConfig, path: type[Path] = path) -> MoEConfig:
            if config.path != path.replaces:
                return config
            return path.translate_v1_config(config, last, problem, device)

        steps = steps.changed(path.breakpoints(problem), change)
    return steps


def launched_config_from_v1(
    config: MoEConfig, tokens: int, problem: Problem, device: Device, paths: Collection[str]
) -> MoEConfig:
    """Return what a call of `tokens` tokens launches when a file of version 1 has `config`."""
    steps = ConfigSteps((UNBOUNDED_TOKENS,), (config_from_v1(config, problem, device),))
    return apply_newer_paths(steps, problem, device, paths).choose(tokens)
