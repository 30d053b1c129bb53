"""Put a defect into the source, in the memory of a child, and run chosen cases before it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from modular_kernel.testing import Case
from modular_kernel.testing.mutation import Coverage, Fate, attempt
from modular_kernel.testing.mutation.coverage import Covered
from modular_kernel.testing.mutation.defects import read_defects

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Wrong:
    """What is wrong, and the piece of a file that is replaced."""

    what: str
    file: str
    old: str
    new: str

    def __str__(self) -> str:
        return self.what.replace(" ", "_")


def fate_of(wrong: Wrong, cases: Sequence[Case], folder: Path) -> Fate:
    """What becomes of a defect before `cases` of one pairing, all of which execute its lines."""
    listed = folder / "defect.json"
    listed.write_text(json.dumps([vars(wrong)]), encoding="utf-8")
    (defect,) = read_defects(listed, ROOT)
    mutant = defect.mutant
    lines = {str(mutant.path): frozenset(range(mutant.first, mutant.last + 1))}
    covered = tuple(Covered(case, 20.0, None, lines) for case in cases)
    pair = cases[0].prepare_finalize, cases[0].experts
    return attempt(mutant, Coverage({}, covered), (pair,), "full")
