"""What is launched without a tuned file: the default configurations of the paths, by tokens."""

from collections.abc import Collection, Sequence

from experts.triton.configs.steps import Steps
from experts.triton.launch_config import Device, MoEConfig
from experts.triton.path import ENDLESS, Path
from experts.triton.paths import BASE, NAMES, PATHS
from modular_kernel.types import Problem


def heuristics(
    problem: Problem, device: Device, paths: Collection[str] = NAMES, *, prepared: bool = False
) -> Steps:
    """Return the configurations of `problem` on `device`, by the paths named, BASE at least.

    prepared: of calls with prepared weights. Raise ConfigurationError where the scheme's groups
    allow no launch.
    """
    steps = Steps((ENDLESS,), (BASE.default_config(problem, ENDLESS, device),))
    for path in PATHS:
        if path is BASE or (path.name in paths and path.serves(problem, device)):
            steps = over(steps, path, problem, device)
    return with_prepared(steps, problem, device, paths) if prepared else steps


def with_prepared(steps: Steps, problem: Problem, device: Device, paths: Collection[str]) -> Steps:
    """Return `steps`, but what paths that prepare weights take of calls with prepared ones."""
    for path in PATHS:
        if path.name not in paths or not path.serves(problem, device):
            continue
        turns = path.turns_of_prepared(problem)

        def change(
            last: int, config: MoEConfig, turns: Sequence[tuple[int, MoEConfig]] = turns
        ) -> MoEConfig:
            return next((own for least, own in reversed(turns) if least <= last), config)

        steps = steps.changed((least - 1 for least, _ in turns), change)
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
