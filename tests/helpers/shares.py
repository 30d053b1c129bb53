"""Selects a share of the cases and parametrized tests for a run of the test suite.

A hash of the source tree determines the share. Equal sources select the same cases on every
machine, and over many commits every case runs. `make verify` runs all cases and all tests marked
`share`.
"""

import fcntl
import hashlib
import os
import pickle
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

from modular_kernel.spec.problem import Machine
from modular_kernel.testing import Case, cases_for

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("modular_kernel", "experts", "prepare_finalize", "topk_reduce")
THIRTY_SIXTH = 36

C = TypeVar("C", bound=Case)
T = TypeVar("T")


@cache
def tree_hash() -> str:
    """Return a hash of the Python sources of the packages and of their paths."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        for path in sorted((_ROOT / package).rglob("*.py")):
            digest.update(f"{path.relative_to(_ROOT)}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def share(cases: Sequence[C], of: int, tree: str) -> tuple[C, ...]:
    """Return about one in `of` cases, selected by a hash of their names and of the tree."""
    return tuple(case for case in cases if in_share(str(case), of, tree))


def in_share(name: str, of: int, tree: str) -> bool:
    """Return whether a name is among the about one in `of` names that are selected.

    name: name of a case, or id of a test marked `share(of)`.
    """
    return int.from_bytes(hashlib.sha256(f"{tree} {name}".encode()).digest()[:8]) % of == 0


def selected_cases(
    pairs: Sequence[tuple[str, str]], machine: Machine, tree: str
) -> dict[tuple[str, str], tuple[Case, ...]]:
    """Return the cases of each pairing that a run of the test suite proves.

    The first pairing of an experts part in `pairs` has all its cases. Every further pairing of the
    part has its smoke cases and one in 36 of its other cases.
    """
    selected: dict[tuple[str, str], tuple[Case, ...]] = {}
    for pf, experts in pairs:
        smoke = cases_for(pf, experts, machine, "smoke").cases
        cases = cases_for(pf, experts, machine).cases
        is_repeated = experts in {previous for _, previous in selected}
        others = share(cases, THIRTY_SIXTH, tree) if is_repeated else cases
        selected[pf, experts] = tuple(dict.fromkeys((*smoke, *others)))
    return selected


def computed_once(name: str, draw: Callable[[], T]) -> T:
    """Return `draw()`, which only one pytest-xdist worker of a test run calls.

    The other workers read the result from a file, because drawing takes half of the collection
    time. Later runs do not reuse the file. Without workers, `draw` is called directly.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")  # noqa: TID251  set by pytest-xdist
    if run is None:
        return draw()
    folder = _ROOT / "out"
    folder.mkdir(exist_ok=True)
    for stale_file in folder.glob(f"drawn-{name}-*.pickle"):
        if stale_file.stem != f"drawn-{name}-{run}":
            stale_file.unlink(missing_ok=True)
    with (folder / f"drawn-{name}-{run}.pickle").open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if content := file.read():
            stored: T = pickle.loads(content)
            return stored
        result = draw()
        file.write(pickle.dumps(result))
        file.flush()
    return result
