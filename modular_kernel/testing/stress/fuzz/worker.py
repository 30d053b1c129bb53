"""Worker process that runs configurations: `worker SEED FIRST STOP CALLS TARGET`.

Prints one line of JSON per configuration. CALLS: "calls" for targets that launch something, else
"". TARGET: the name of the only target, "" for all.

Number -1 stands for the explicit examples and saved failures of each target. A failure is printed
at once, because shrinking it may crash or hang, then once more with the smallest input found.
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
    """Print [number, target, kind, what] for each configuration; all other output is discarded.

    kind: that of the outcome, "saved" for number -1, "smaller" for a shrunk input.
    """
    warnings.simplefilter("ignore")
    seen = set[tuple[str, str]]()
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for number in range(int(first), int(stop)):
            for target, kind, what in _lines(seed, number, bool(calls), only, seen):
                print(json.dumps([number, target, kind, what]), file=answers, flush=True)


def _lines(
    seed: str, number: int, calls_only: bool, only: str, seen: set[tuple[str, str]]
) -> Iterator[tuple[str, str, str]]:
    if number == _SAVED:
        yield "saved", "saved", ""
        for target, outcome in saved_failures(calls_only=calls_only, only=only):
            yield target, outcome.kind, outcome.what
        return
    target, outcome = outcome_of(seed, number, calls_only=calls_only, only=only)
    yield target, outcome.kind, outcome.what
    # One failure of each kind is shrunk: the others are probably the same.
    if outcome.kind in BAD and (target, outcome.kind) not in seen:
        seen.add((target, outcome.kind))
        for smallest in property_of(target).failures():
            yield target, "smaller", _formatted(smallest)


def _formatted(outcome: FuzzOutcome) -> str:
    return f"{outcome.kind}: {outcome.what}"


if __name__ == "__main__":
    main(*sys.argv[1:])
