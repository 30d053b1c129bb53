"""List all fuzz targets, and run the configuration that a seed and a number determine.

A target is a kind of call with random input. A configuration is one input of one target.
"""

import functools
from collections.abc import Iterator
from random import Random
from typing import Any

from modular_kernel.testing.stress.fuzz import (
    calls,
    checkpoints,
    command_line,
    compose_calls,
    concurrency,
    entry_points,
    files,
    fused_experts,
    layer_states,
    layouts,
    nan_values,
    numbers,
    packed_weights,
    placements,
    public_functions,
    routers,
    specs,
    torch_settings,
    transforms,
)
from modular_kernel.testing.stress.fuzz.outcome import FuzzOutcome
from modular_kernel.testing.stress.fuzz.properties import TargetProperty, open_directory_database
from modular_kernel.testing.stress.fuzz.target import Target

TARGETS: tuple[Target[Any], ...] = (
    *calls.TARGETS,
    *specs.TARGETS,
    *placements.TARGETS,
    *fused_experts.TARGETS,
    *packed_weights.TARGETS,
    *command_line.TARGETS,
    *compose_calls.TARGETS,
    *files.TARGETS,
    *checkpoints.TARGETS,
    *entry_points.TARGETS,
    *nan_values.TARGETS,
    *layouts.TARGETS,
    *public_functions.TARGETS,
    *transforms.TARGETS,
    *routers.TARGETS,
    *concurrency.TARGETS,
    *layer_states.TARGETS,
    *numbers.TARGETS,
    *torch_settings.TARGETS,
)
NAMES = tuple(target.name for target in TARGETS)


def select_targets(*, calls_only: bool, only: str) -> list[Target[Any]]:
    """Return the targets from which configurations are drawn.

    calls_only: whether to use only targets that may launch kernels, for a run with interpreted
        kernels.
    only: the name of the only target to use; "" means all targets.
    """
    return [
        target
        for target in TARGETS
        if (target.launches or not calls_only) and only in ("", target.name)
    ]


@functools.cache
def get_property(name: str) -> TargetProperty:
    """Return the Hypothesis property of a target."""
    return TargetProperty(TARGETS[NAMES.index(name)], open_directory_database())


def run_configuration(
    seed: str, number: int, *, calls_only: bool = False, only: str = ""
) -> tuple[str, FuzzOutcome]:
    """Run configuration `number` of a seed; return the name of its target and its outcome."""
    rng = Random(f"{seed}/{number}")
    targets = select_targets(calls_only=calls_only, only=only)
    (target,) = rng.choices(targets, [target.frequency for target in targets])
    return target.name, get_property(target.name).run(rng)


def find_saved_failures(
    *, calls_only: bool = False, only: str = ""
) -> Iterator[tuple[str, FuzzOutcome]]:
    """Run the explicit examples and the saved failures of each target.

    Yields (name of the target, outcome of the shrunk input) for each target that still fails.
    """
    for target in select_targets(calls_only=calls_only, only=only):
        for outcome in get_property(target.name).failures():
            yield target.name, outcome
