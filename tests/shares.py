"""Which cases a run of the suite proves, where not all of them: a share that changes with the tree.

Equal sources give equal shares on every machine. Another tree has another share, so over time all
cases are proven; `make verify` proves all of them at once.
"""

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

from modular_kernel.testing import Case, cases_for
from modular_kernel.types import Machine

_ROOT = Path(__file__).parent.parent
_PACKAGES = ("modular_kernel", "experts", "prepare_finalize", "topk_reduce")
THIRD, EIGHTH = 3, 8

C = TypeVar("C", bound=Case)


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
    return tuple(
        case
        for case in cases
        if int.from_bytes(hashlib.sha256(f"{tree} {case}".encode()).digest()[:8]) % of == 0
    )


def proven_here(
    pairs: Sequence[tuple[str, str]], machine: Machine, tree: str
) -> dict[tuple[str, str], tuple[Case, ...]]:
    """The cases of each pairing that one run proves: smoke, and a share of the others.

    The share is a third with the first PrepareAndFinalize that an experts part goes with, an eighth
    elsewhere. `make verify` proves all.
    """
    found: dict[tuple[str, str], tuple[Case, ...]] = {}
    for pf, experts in pairs:
        smoke = cases_for(pf, experts, machine, "smoke").cases
        cases = cases_for(pf, experts, machine).cases
        of = EIGHTH if experts in {seen for _, seen in found} else THIRD
        found[pf, experts] = tuple(dict.fromkeys((*smoke, *share(cases, of, tree))))
    return found
