"""Worker process that runs configurations: `worker SEED FIRST STOP CALLS TARGET`.

Runs the configurations FIRST to STOP - 1, and prints one line of JSON for each. Number -1 stands
for the explicit examples and saved failures of each target. CALLS: "calls" for only the targets
that may launch kernels, else "". TARGET: the name of the only target, "" for all.

A failure is printed at once, because shrinking it may crash or hang. It is printed once more with
the smallest input that was found.
"""

import json
import os
import sys
import warnings
from collections.abc import Iterator

from modular_kernel.testing.stress.fuzz.outcome import BAD, FuzzOutcome
from modular_kernel.testing.stress.fuzz.targets import outcome_of, property_of, saved_failures

_SAVED = -1


def main(seed: str, first: str, stop: str, calls: str = "", only: str = "") -> None:
    """Print [number, target, kind, description] for each configuration.

    The printed kind is that of the outcome, "saved" before the outcomes of number -1, or "smaller"
    for a shrunk input. The arguments are those of the command. All other output is discarded.
    """
    warnings.simplefilter("ignore")
    seen = set[tuple[str, str]]()
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for number in range(int(first), int(stop)):
            for target, kind, description in _lines(seed, number, bool(calls), only, seen):
                print(json.dumps([number, target, kind, description]), file=answers, flush=True)


def _lines(
    seed: str, number: int, calls_only: bool, only: str, seen: set[tuple[str, str]]
) -> Iterator[tuple[str, str, str]]:
    if number == _SAVED:
        yield "saved", "saved", ""
        for target, outcome in saved_failures(calls_only=calls_only, only=only):
            yield target, outcome.kind, outcome.description
        return
    target, outcome = outcome_of(seed, number, calls_only=calls_only, only=only)
    yield target, outcome.kind, outcome.description
    # Shrink one failure of each kind. The others probably have the same cause.
    if outcome.kind in BAD and (target, outcome.kind) not in seen:
        seen.add((target, outcome.kind))
        for smallest in property_of(target).failures():
            yield target, "smaller", _format(smallest)


def _format(outcome: FuzzOutcome) -> str:
    return f"{outcome.kind}: {outcome.description}"


if __name__ == "__main__":
    main(*sys.argv[1:])
