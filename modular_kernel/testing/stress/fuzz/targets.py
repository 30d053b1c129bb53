"""Targets of fuzzing: draws a configuration from a seed and a number, and returns its outcome."""

from collections.abc import Callable
from random import Random

from modular_kernel.testing.stress.fuzz import (
    calls,
    checkpoints,
    compose_calls,
    entry_functions,
    entry_points,
    files,
    placements,
    specs,
)
from modular_kernel.testing.stress.fuzz.outcome import FuzzOutcome, run_or_outcome

Target = Callable[[Random], FuzzOutcome]

# Targets with their share in percent.
TARGETS: tuple[tuple[Target, int], ...] = (
    (calls.right_call, 18),
    (calls.changed_call, 23),
    (calls.nan_call, 5),
    (specs.problem_fields, 13),
    (specs.small_facts, 5),
    (placements.placements, 1),
    (specs.compatibility_checks, 7),
    (entry_functions.fused_experts, 8),
    (entry_functions.importers, 4),
    (entry_functions.command_line, 6),
    (compose_calls.composed_call, 3),
    (files.stored_files, 4),
    (checkpoints.checkpoints, 2),
    (entry_points.entry_points, 1),
)
CALLS = (calls.right_call, calls.changed_call, calls.nan_call, entry_functions.fused_experts)


NAMES = tuple(target.__name__ for target, _ in TARGETS)


def outcome_of(
    seed: str, number: int, *, calls_only: bool = False, only: str = ""
) -> tuple[str, FuzzOutcome]:
    """Return the target's name and the outcome of configuration `number`.

    calls_only: use only targets that launch something, for interpreted kernels. only: the name of
    the only target; "" for all.
    """
    rng = Random(f"{seed}/{number}")
    candidates = [(t, share) for t, share in TARGETS if t in CALLS or not calls_only]
    candidates = [(t, share) for t, share in candidates if only in ("", t.__name__)]
    (target,) = rng.choices([t for t, _ in candidates], [share for _, share in candidates])
    name = target.__name__
    return name, run_or_outcome(name, lambda: target(rng))
