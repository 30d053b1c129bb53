"""Fuzzing worker that runs random configurations: `worker SEED FIRST STOP CALLS TARGET`.

It runs the configurations FIRST to STOP - 1, and prints one line of JSON for each. Number -1 stands
for the explicit examples and saved failures of each target.

CALLS: "calls" to run only targets that may launch kernels, "" to run all.
TARGET: name of the only target to run, "" to run all.

A failure is printed at once, because shrinking it may crash or hang. It is printed again with the
smallest input that was found.
"""

import json
import os
import sys
import warnings
from collections.abc import Iterator

from modular_kernel.testing.stress.fuzz.outcome import FAILURE_KINDS, FuzzOutcome
from modular_kernel.testing.stress.fuzz.targets import (
    find_saved_failures,
    get_property,
    run_configuration,
)

_SAVED = -1


def main(seed: str, first: str, stop: str, calls_mode: str = "", only: str = "") -> None:
    """Print [number, target, kind, description] for each configuration.

    The kind is the kind of the outcome. Two other values are used: "saved" marks the start of the
    outcomes of number -1, and "smaller" marks a shrunk input. All other output to stdout is
    redirected to stderr. The arguments are those of the command line.
    """
    warnings.simplefilter("ignore")
    shrunk = set[tuple[str, str]]()
    with os.fdopen(os.dup(1), "w") as results:
        os.dup2(2, 1)
        for number in range(int(first), int(stop)):
            for target, kind, description in _run_number(
                seed, number, bool(calls_mode), only, shrunk
            ):
                print(json.dumps([number, target, kind, description]), file=results, flush=True)


def _run_number(
    seed: str, number: int, calls_only: bool, only: str, shrunk: set[tuple[str, str]]
) -> Iterator[tuple[str, str, str]]:
    if number == _SAVED:
        yield "saved", "saved", ""
        for target, outcome in find_saved_failures(calls_only=calls_only, only=only):
            yield target, outcome.kind, outcome.description
        return
    target, outcome = run_configuration(seed, number, calls_only=calls_only, only=only)
    yield target, outcome.kind, outcome.description
    # Shrink one failure of each target and kind. Others probably have the same cause.
    if outcome.kind in FAILURE_KINDS and (target, outcome.kind) not in shrunk:
        shrunk.add((target, outcome.kind))
        for smallest in get_property(target).failures():
            yield target, "smaller", _format(smallest)


def _format(outcome: FuzzOutcome) -> str:
    return f"{outcome.kind}: {outcome.description}"


if __name__ == "__main__":
    main(*sys.argv[1:])
