"""Read the list of mutants that were reviewed and found to be equivalent to the original.

No test can detect them, so mutation scores do not count them. A mutant is accepted as equivalent
only with a proof. Either it does not change the compiled code of any kernel (`code_equivalence`),
or no bit of a result differs in at least 2,000 random valid problems, which are derived from cases
that execute the changed line (`bitwise_equivalence`). reviewed_equivalents.json in this folder
lists the mutants by identifier.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

MIN_PROBLEMS = 2000


@dataclass(frozen=True)
class Equivalent:
    """The proof that a mutant is equivalent.

    Attributes:
        reason: why the mutant does not change results.
        proof: "code" if compiled kernels that contain the line are unchanged, "bits" if no bit
            differs in random problems.
        problems: number of random problems.
        forms: number of compiled variants of the kernels.
        beside: number of other mutants that were applied at the same time.
        left_out: whether the mutant is no longer made, because no such mutant has an effect. The
            entry remains for the records that list it.
        parts: names of the experts or exchange classes ("parts") for which the mutant is
            equivalent, because their pairings never pass inputs that would reveal it; () means all.
        detected_by: name of the check that was added later and detects the mutant, for example
            because it makes calls slower without a change of results; "" if there is none. Mutation
            scores run such a mutant. The entry remains for the records that list it.
    """

    reason: str
    proof: Literal["code", "bits"]
    problems: int = 0
    forms: int = 0
    beside: int = 0
    left_out: bool = False
    parts: tuple[str, ...] = ()
    detected_by: str = ""


def _read(path: Path) -> dict[str, Equivalent]:
    entries = json.loads(path.read_text(encoding="utf-8"))
    return {ident: Equivalent(**fields) for ident, fields in entries.items()}


def find_equivalent(ident: str, part: str) -> Equivalent | None:
    """Return the proof that no check detects a mutant of `part`, or None if there is none."""
    review = find_review(ident, part)
    return None if review is None or review.detected_by else review


def find_review(ident: str, part: str) -> Equivalent | None:
    """Return the proof that a mutant of `part` changes no result, or None if there is none.

    Included are mutants that a check has detected since, because records may list them.
    """
    review = EQUIVALENTS.get(ident)
    return review if review is not None and (not review.parts or part in review.parts) else None


EQUIVALENTS = _read(Path(__file__).with_suffix(".json"))
