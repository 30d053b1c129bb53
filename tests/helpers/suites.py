"""Selects the tests of `--suite quick` and `--suite rest`, which limit the time of each function.

`tests/durations.json` records how many seconds each test function takes over all its parameters, if
it takes more than half a second. Each suite has a time budget per function. If a function exceeds
the budget, only as many of its parameters run as fit into it. A hash of the sources selects these
parameters, so equal sources select the same tests on every machine, and over many commits every
test runs. `quick` and `rest` never select the same test. Functions without a record run in `quick`.

To update the record from runs with `--junitxml FILE`:

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
BUDGETS_S = {"quick": 0.5, "rest": 3.0}  # per function; @pytest.mark.budget overrides them
_RECORDED_FROM_S = 0.5


def is_selected(suite: str, name: str, tree: str, **options: float) -> bool:
    """Return whether `suite` selects a test.

    name: test function with its parameters, such as "test_router::test_ties[fp32]". tree: hash of
    the sources. options: arguments of @pytest.mark.budget. `quick` and `rest` override BUDGETS_S,
    in seconds. With `module=True`, either all tests of a module are selected or none, for modules
    with an expensive fixture.
    """
    if options.pop("module", False):
        name = name.partition("::")[0]
        seconds = sum(t for test, t in read_durations().items() if test.partition("::")[0] == name)
    else:
        seconds = read_durations().get(name.partition("[")[0], 0.0)
    budget = BUDGETS_S | options
    end_of_quick = min(1.0, budget["quick"] / seconds) if seconds else 1.0
    end_of_rest = min(1.0, end_of_quick + (budget["rest"] / seconds if seconds else 0.0))
    digest = hashlib.sha256(f"{tree} suite {name}".encode()).digest()
    fraction = int.from_bytes(digest[:8]) / 2**64
    if suite == "quick":
        return fraction < end_of_quick
    return end_of_quick <= fraction < end_of_rest


@cache
def read_durations() -> dict[str, float]:
    """Return the recorded seconds by test function."""
    record: dict[str, float] = json.loads(RECORD.read_text(encoding="utf-8"))
    return record


def sum_durations(files: Iterable[Path]) -> dict[str, float]:
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
    measured = sum_durations(map(Path, sys.argv[1:]))
    RECORD.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{RECORD}: {len(measured)} functions, {sum(measured.values()):.0f} s\n")
