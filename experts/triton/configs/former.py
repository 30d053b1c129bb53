"""What files of version 1 say, in the words of today.

They name fewer paths: two had the name "single", and launches of 4-bit weights and few rows were
chosen behind what a file said of the aligned path. Some paths came later, and are faster than what
such files have, wherever they are taken without one.
"""

from collections.abc import Collection
from dataclasses import fields

from experts.triton.configs.heuristics import Steps, over
from experts.triton.launch_config import Device, Launch, MoEConfig
from experts.triton.path import ENDLESS, Path
from experts.triton.paths import PATHS
from modular_kernel.spec.problem import Problem

FORMER_NAMES = tuple(dict.fromkeys(name for path in PATHS for name in path.former_names))
# Paths that a file of version 1 could mean.
MEANT = tuple(path.name for path in PATHS if path.replaces is None)


def path_meant(name: str, problem: Problem, device: Device) -> type[Path]:
    """Return the path that a file of version 1 means by `name`: of several that which serves."""
    meant = [path for path in PATHS if name in path.former_names]
    return next((path for path in meant if path.serves(problem, device)), meant[0])


def named_now(config: MoEConfig, problem: Problem, device: Device) -> MoEConfig:
    """Return `config` of a file of version 1 as the path that it means types it."""
    path = path_meant(config.path, problem, device)
    one, two = (_typed(launch, path) for launch in (config.gemm1, config.gemm2))
    return MoEConfig(one, two, path.name)


def _typed(launch: Launch, path: type[Path]) -> Launch:
    values = {field.name: getattr(launch, field.name) for field in fields(path.launch)}
    made: Launch = path.launch(**values)
    return made


def replaced(steps: Steps, problem: Problem, device: Device, paths: Collection[str]) -> Steps:
    """Return `steps`, with what paths that had no name launched in place of what is said there."""
    for path in PATHS:
        if path.name not in paths or not path.serves(problem, device):
            continue
        if path.younger:
            steps = over(steps, path, problem, device)
        if path.replaces is None:
            continue

        def change(last: int, config: MoEConfig, path: type[Path] = path) -> MoEConfig:
            if config.path != path.replaces:
                return config
            return path.in_place_of(config, last, problem, device)

        steps = steps.changed(path.turns(problem), change)
    return steps


def in_words_of_now(
    config: MoEConfig, tokens: int, problem: Problem, device: Device, paths: Collection[str]
) -> MoEConfig:
    """Return what a call of `tokens` tokens launches where a file of version 1 has `config`."""
    steps = Steps((ENDLESS,), (named_now(config, problem, device),))
    return replaced(steps, problem, device, paths).choose(tokens)
