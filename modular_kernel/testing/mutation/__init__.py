r"""Mutation testing of parts: measure whether a part's cases detect defects in its source.

    surveyed = survey("TorchExperts")
    score = mutation_score(surveyed)
    print(f"{score.share:.1%}", *(outcome.mutant.diff() for outcome in score.survivors), sep="\n")

A mutant is one change to the source of a part, of its kernels, or of the operations that it uses.
Each mutant is applied in a forked process (or in forked ranks), never on disk. The cases that
execute the changed line run there until one of them fails.
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
