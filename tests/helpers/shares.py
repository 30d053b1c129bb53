"""Which cases a run of the suite proves, where not all of them: a share that changes with the tree.

Equal sources give equal shares on every machine. Another tree has another share, so over time all
cases are proven; `make verify` proves all of them at once, and tests marked `share`.
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
    """Hash of the packages' Python sources and where they stand."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        for path in sorted((_ROOT / package).rglob("*.py")):
            digest.update(f"{path.relative_to(_ROOT)}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def share(cases: Sequence[C], of: int, tree: str) -> tuple[C, ...]:
    """About one of `of` cases, each chosen by the hash of its name and the tree's."""
    return tuple(case for case in cases if in_share(str(case), of, tree))


def in_share(name: str, of: int, tree: str) -> bool:
    """Whether this tree proves the case of this name, where it proves about one of `of`.

    Parameters of a test marked `share(of)` are drawn so, by their test's name; `--whole` runs all.
    """
    return int.from_bytes(hashlib.sha256(f"{tree} {name}".encode()).digest()[:8]) % of == 0


def proven_here(
    pairs: Sequence[tuple[str, str]], machine: Machine, tree: str
) -> dict[tuple[str, str], tuple[Case, ...]]:
    """The cases of each pairing that one run proves: all, or smoke and a share of the others.

    All with the first PrepareAndFinalize that an experts part goes with; the share is a
    thirty-sixth. `make verify` proves all of every pairing.
    """
    found: dict[tuple[str, str], tuple[Case, ...]] = {}
    for pf, experts in pairs:
        smoke = cases_for(pf, experts, machine, "smoke").cases
        cases = cases_for(pf, experts, machine).cases
        again = experts in {seen for _, seen in found}
        proven = share(cases, THIRTY_SIXTH, tree) if again else cases
        found[pf, experts] = tuple(dict.fromkeys((*smoke, *proven)))
    return found


def drawn_once(name: str, draw: Callable[[], T]) -> T:
    """What `draw` returns: drawn by one of the workers of a run of the suite, read by the others.

    Drawing takes half of the time of a collection, and each worker collects all tests. Another run
    draws anew, and so does one without workers: nothing of an older tree can be left over.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")  # noqa: TID251  xdist's own
    if run is None:
        return draw()
    folder = _ROOT / "out"
    folder.mkdir(exist_ok=True)
    for old in folder.glob(f"drawn-{name}-*.pickle"):
        if old.stem != f"drawn-{name}-{run}":
            old.unlink(missing_ok=True)
    with (folder / f"drawn-{name}-{run}.pickle").open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if text := file.read():
            found: T = pickle.loads(text)
            return found
        found = draw()
        file.write(pickle.dumps(found))
        file.flush()
    return found
