"""Does a mutant change any bit of any result? The second proof that one is equivalent.

Valid problems are drawn from the cases that execute the changed line: their axes as they are, the
number of tokens and the values at random. Each is computed with and without the change.
"""

import importlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from modular_kernel.testing.cases import Case
from modular_kernel.testing.mutation.child import Child, Tell
from modular_kernel.testing.mutation.coverage import Coverage
from modular_kernel.testing.mutation.serve import reattach, serve
from modular_kernel.testing.mutation.source import Mutant

# For each problem, the first one's imports included.
_PATIENCE = 120.0


@dataclass(frozen=True)
class Bits:
    """How many problems were computed both ways, and the first one whose bits differ."""

    problems: int
    differing: Case | None


def compare_bits(mutant: Mutant, coverage: Coverage, problems: int) -> Bits:
    """Compute `problems` random problems with and without the mutant, until a bit differs.

    A problem that fails with the mutant differs. Without a case that executes it there is none.
    """
    place = str(mutant.path), mutant.first, mutant.last
    met = coverage.executing(*place) or (coverage.cases if coverage.loads(*place) else ())
    cases = drawn_problems([covered.case for covered in met], problems, mutant.ident)
    plain, changed = (Child(partial(_work, cases, m), _PATIENCE) for m in (None, mutant))
    count = 0
    for case, one, other in zip(cases, plain, changed, strict=False):
        if one != other:
            return Bits(count, case)
        count += 1
    return Bits(count, cases[count] if count < len(cases) else None)


def drawn_problems(cases: Sequence[Case], count: int, seed: str) -> list[Case]:
    """`count` problems like these cases, with other values and at most as many tokens."""
    drawing = random.Random(seed)
    found = []
    for number in range(count if cases else 0):
        case = cases[number % len(cases)]
        tokens = drawing.randint(min(1, case.problem.tokens), case.problem.tokens)
        found.append(replace(case, problem=case.problem.with_tokens(tokens), seed=1 + number))
    return found


def _work(cases: Sequence[Case], mutant: Mutant | None, tell: Tell) -> None:
    """In a child: one digest for each problem."""
    if mutant is not None:
        serve(mutant)
    runs = importlib.import_module("modular_kernel.testing.mutation.runs")
    reattach()
    machine = runs.this_machine()
    for case in cases:
        tell({"digest": runs.digest(case, machine)})
