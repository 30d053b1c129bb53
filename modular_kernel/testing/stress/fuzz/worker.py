"""Worker process that runs configurations: `worker SEED FIRST STOP CALLS TARGET`.

Prints one line of JSON per configuration. CALLS: "calls" for targets that launch something, else
"". TARGET: the name of the only target, "" for all.
"""

import json
import os
import sys
import warnings

from modular_kernel.testing.stress.fuzz.targets import outcome_of


def main(seed: str, first: str, stop: str, calls: str = "", only: str = "") -> None:
    """Print [number, target, kind, what] for each configuration; all other output is discarded."""
    warnings.simplefilter("ignore")
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for number in range(int(first), int(stop)):
            target, outcome = outcome_of(seed, number, calls_only=bool(calls), only=only)
            print(
                json.dumps([number, target, outcome.kind, outcome.what]), file=answers, flush=True
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
