"""Reviewed equivalent mutants, which compute the same and are neither killed nor survivors.

A mutant is equivalent only if the compiled code of every kernel is the same with it, or if no bit
of any result differs in at least 2,000 random valid problems, derived from cases that execute it.
The file reviewed_equivalents.json in this folder lists them by identity.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

MIN_PROBLEMS = 2000


@dataclass(frozen=True)
class Equivalent:
    """Why a mutant changes nothing.

    proof: "code", the same compiled code in all `forms` of kernels that contain its line; or
    "bits", no differing bit in `problems` random problems. beside: number of other mutants applied
    together with it. parts: the parts whose pairings never pass inputs that would reveal it; () for
    all parts.
    """

    reason: str
    proof: Literal["code", "bits"]
    problems: int = 0
    forms: int = 0
    beside: int = 0
    parts: tuple[str, ...] = ()


def _read(path: Path) -> dict[str, Equivalent]:
    entries = json.loads(path.read_text(encoding="utf-8"))
    return {ident: Equivalent(**entry) for ident, entry in entries.items()}


def find_equivalent(ident: str, part: str) -> Equivalent | None:
    """Return why a mutant is equivalent when `part` is scored; None if it is not."""
    entry = EQUIVALENTS.get(ident)
    return entry if entry is not None and (not entry.parts or part in entry.parts) else None


EQUIVALENTS = _read(Path(__file__).with_suffix(".json"))
