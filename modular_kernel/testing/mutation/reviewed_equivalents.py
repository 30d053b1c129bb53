"""Mutants that were reviewed and compute the same: they are neither killed nor survivors.

A mutant is equivalent only if the compiled code of every kernel is the same with it, or if no bit
of any result differs in at least 2,000 random valid problems, drawn from cases that execute it.
reviewed_equivalents.json beside this file lists them by identity.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

LEAST_PROBLEMS = 2000


@dataclass(frozen=True)
class Equivalent:
    """Why a mutant changes nothing.

    proof: "code", the same compiled code in all `forms` of kernels that have its line in them; or
    "bits", no differing bit in `problems` random ones.
    beside: how many other mutants were put in together with it. parts: whose pairings never hand
    over what would tell it, () for all parts.
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


def reviewed(ident: str, part: str) -> Equivalent | None:
    """Why the mutant of that identity is equivalent where `part` is scored; None if it is not."""
    found = EQUIVALENT.get(ident)
    return found if found is not None and (not found.parts or part in found.parts) else None


EQUIVALENT = _read(Path(__file__).with_suffix(".json"))
