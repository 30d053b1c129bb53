r"""Mutation testing: measure whether the test cases of a part detect defects in its source code.

A part is an experts class, an exchange (prepare/finalize) class or a reducer.

    score = mutation_score(survey("TorchExperts"))
    print(f"{score.kill_rate:.1%}")
    print("\n".join(outcome.mutant.diff() for outcome in score.survivors))

A mutant is one change to the source of a part, of its kernels, or of the operations that it uses. A
survey lists the mutants of a part and traces which cases execute their lines. Each mutant is then
applied in a forked process (or in forked ranks), never on disk, and the cases that execute the
changed line run there. The mutant is killed if a case fails, and survives otherwise.

`mk test --mutate` and tools/mutate_modules.py use this package. `sites`, `operators` and `source`
make the mutants; `run_mutant` and the backends `one_process` and `over_ranks` run them; `score`
counts the outcomes.
"""

from modular_kernel.testing.mutation.coverage import Coverage, cover
from modular_kernel.testing.mutation.mutant_outcome import MutantOutcome
from modular_kernel.testing.mutation.one_process import OneProcess
from modular_kernel.testing.mutation.over_ranks import OverRanks
from modular_kernel.testing.mutation.run_mutant import MutationBackend, run_mutant
from modular_kernel.testing.mutation.score import (
    SAMPLE_SIZE,
    Score,
    Survey,
    default_seed,
    draw_sample,
    mutation_score,
    pairs_of,
    survey,
    surveys,
)
from modular_kernel.testing.mutation.sites import mutants_of
from modular_kernel.testing.mutation.source import Edit, Mutant

__all__ = [
    "SAMPLE_SIZE",
    "Coverage",
    "Edit",
    "Mutant",
    "MutantOutcome",
    "MutationBackend",
    "OneProcess",
    "OverRanks",
    "Score",
    "Survey",
    "cover",
    "default_seed",
    "draw_sample",
    "mutants_of",
    "mutation_score",
    "pairs_of",
    "run_mutant",
    "survey",
    "surveys",
]
