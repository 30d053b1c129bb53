"""Suites that are bounded in time: which tests `--suite quick` and `--suite rest` select.

`tests/durations.json` records how many seconds each test function took, over all its parameters,
where that was more than half a second. A suite spends at most its budget on each function: of a
function that takes longer, it selects the part of the parameters that fits, drawn by the hash of
the sources. Equal sources select equal tests on every machine, and over many commits every test
runs. `quick` and `rest` never select the same test; a function without a record runs in `quick`.

To renew the record from runs with `--junitxml FILE`:

    python tests/helpers/suites.py out/interpreted.xml out/compiled.xml
"""

import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

RECORD = Path(__file__).parents[1] / "durations.json"
BUDGETS_S = {"quick": 0.5, "rest": 3.0}  # of a function; @pytest.mark.budget sets others
_RECORDED_FROM_S = 0.5


def selected(suite: str, name: str, tree: str, **options: float) -> bool:
    """Whether `suite` selects the test.

    name: the test's function, and its parameters in brackets, as "test_router::test_ties[fp32]".
    tree: the hash of the sources. options: those of @pytest.mark.budget: `quick` and `rest`, in
    seconds, where they differ from BUDGETS_S; `module=True` selects all tests of a module, which
    share an expensive fixture, or none.
    """
    if options.pop("module", False):
        name = name.partition("::")[0]
        seconds = sum(t for test, t in durations().items() if test.partition("::")[0] == name)
    else:
        seconds = durations().get(name.partition("[")[0], 0.0)
    budget = BUDGETS_S | options
    quick = min(1.0, budget["quick"] / seconds) if seconds else 1.0
    both = min(1.0, quick + (budget["rest"] / seconds if seconds else 0.0))
    digest = hashlib.sha256(f"{tree} suite {name}".encode()).digest()
    drawn = int.from_bytes(digest[:8]) / 2**64
    return drawn < quick if suite == "quick" else quick <= drawn < both


@cache
def durations() -> dict[str, float]:
    """Return the recorded seconds by test function."""
    record: dict[str, float] = json.loads(RECORD.read_text(encoding="utf-8"))
    return record


def durations_of(files: Iterable[Path]) -> dict[str, float]:
    """Sum the seconds of each test function in JUnit XML files."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            module = case.get("classname", "").rpartition(".")[2]
            function = case.get("name", "").partition("[")[0]
            seconds[f"{module}::{function}"] += float(case.get("time", 0))
    return {
        name: round(total, 1) for name, total in sorted(seconds.items()) if total > _RECORDED_FROM_S
    }


if __name__ == "__main__":
    found = durations_of(map(Path, sys.argv[1:]))
    RECORD.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{RECORD}: {len(found)} functions, {sum(found.values()):.0f} s\n")
