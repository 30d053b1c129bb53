"""Mutants that were reviewed and compute the same: they are neither killed nor survivors.

A mutant is equivalent only if the compiled code of every kernel is the same with it, or if no bit
of any result differs in at least 2,000 random valid problems that execute it.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Equivalent:
    """Why a mutant changes nothing.

    proof: "code", the same compiled code; or "bits", no differing bit in `problems` random ones.
    """

    reason: str
    proof: Literal["code", "bits"]
    problems: int = 0


EQUIVALENT: dict[str, Equivalent] = {}
