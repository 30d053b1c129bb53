"""What is launched without a tuned file: the default configurations of the paths, by tokens."""

from collections.abc import Collection

from experts.triton.configs.steps import Steps
from experts.triton.launch_config import Device, MoEConfig
from experts.triton.path import ENDLESS, Path
from experts.triton.paths import BASE, NAMES, PATHS
from modular_kernel.types import Problem


def heuristics(problem: Problem, device: Device, paths: Collection[str] = NAMES) -> Steps:
    """Return the configurations of `problem` on `device`, by the paths named, BASE at least.

    Raise ConfigurationError where the scheme's groups allow no launch.
    """
    steps = Steps((ENDLESS,), (BASE.default_config(problem, ENDLESS, device),))
    for path in PATHS:
        if path is BASE or (path.name in paths and path.serves(problem, device)):
            steps = over(steps, path, problem, device)
    return steps


def over(steps: Steps, path: type[Path], problem: Problem, device: Device) -> Steps:
    """Return `steps`, but what `path` takes where it does without a tuned file."""
    least, most = path.least_tokens(problem), path.most_tokens(problem)
    if most == 0:
        return steps
    top = ENDLESS if most is None else most

    def change(last: int, config: MoEConfig) -> MoEConfig:
        return path.default_config(problem, last, device) if least <= last <= top else config

    return steps.changed((least - 1, *path.turns(problem), top), change)
