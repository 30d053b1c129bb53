"""Compute the mutation score of a part: the fraction of its mutants that its test cases kill.

A part is an experts class, an exchange class or a reducer; its mutants are single changes of its
source. `survey` lists them and traces the cases, and `mutation_score` runs a random sample of them.

    score = mutation_score(survey("TorchExperts"))
    print(score.kill_rate, [outcome.mutant.diff() for outcome in score.survivors])
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from types import MappingProxyType

from modular_kernel.catalog import Catalog, load_catalog
from modular_kernel.errors import ConfigurationError
from modular_kernel.testing.mutation.case_runs import Level, Pair
from modular_kernel.testing.mutation.code_equivalence import prove_by_code
from modular_kernel.testing.mutation.coverage import Coverage, merge_coverage
from modular_kernel.testing.mutation.cpu_undetectable import find_undetectable_reason
from modular_kernel.testing.mutation.mutant_outcome import MutantOutcome
from modular_kernel.testing.mutation.one_process import OneProcess
from modular_kernel.testing.mutation.reviewed_equivalents import Equivalent, find_equivalent
from modular_kernel.testing.mutation.run_mutant import KillHistory, MutationBackend, run_mutant
from modular_kernel.testing.mutation.scope import modules_of
from modular_kernel.testing.mutation.sites import mutants_of
from modular_kernel.testing.mutation.source import Mutant

# Default number of mutants to run. Running all mutants of a part may take hours.
SAMPLE_SIZE = 150
_ONE_PROCESS = OneProcess()


@dataclass(frozen=True)
class Survey:
    """The mutants of a part, and the cases that execute them.

    Attributes:
        part: name of the part.
        pairs: pairings of the part whose cases are run.
        level: level of the cases.
        mutants: all mutants of the part.
        coverage: the lines that the cases execute.
        backend: runs the cases, in one process or on several ranks.
    """

    part: str
    pairs: tuple[Pair, ...]
    level: Level
    mutants: tuple[Mutant, ...]
    coverage: Coverage
    backend: MutationBackend = field(default_factory=OneProcess)

    def executed(self) -> tuple[Mutant, ...]:
        """Return the mutants that are executed and that a test on a CPU might detect."""
        return tuple(
            m for m in self.mutants if self.is_executed(m) and find_undetectable_reason(m) is None
        )

    def mutant(self, ident: str) -> Mutant:
        """Return the mutant with identity `ident`. Raise ConfigurationError if there is none."""
        return find_mutant(self.mutants, self.part, ident)

    def is_executed(self, mutant: Mutant) -> bool:
        """Return whether a case, an import, or the selection of cases executes a mutant."""
        return self.coverage.loads(mutant) or bool(self.coverage.executing(mutant))


@dataclass(frozen=True)
class Score:
    """Outcomes of the mutants that were run, and counts of the others.

    Attributes:
        survey: the mutants and cases.
        seed: the seed of the sample.
        outcomes: the outcome of each mutant of the sample.
        executed: number of mutants from which the sample was drawn.
        not_executed: maps modules to the number of mutants that no case executes.
        undetectable: number of mutants that cannot be detected on a CPU, by reason.
    """

    survey: Survey
    seed: str
    outcomes: tuple[MutantOutcome, ...]
    executed: int
    not_executed: dict[str, int]
    undetectable: dict[str, int]

    @property
    def killed(self) -> tuple[MutantOutcome, ...]:
        return tuple(outcome for outcome in self.outcomes if outcome.killed)

    @property
    def equivalent(self) -> tuple[tuple[MutantOutcome, Equivalent], ...]:
        """The mutants that are equivalent by their code, or were reviewed as equivalent.

        The latter are included whether they were skipped or survived.
        """
        not_killed = [outcome for outcome in self.outcomes if not outcome.killed]
        reviews = ((o, _find_proof(o, self.survey.part)) for o in not_killed)
        return tuple((outcome, review) for outcome, review in reviews if review is not None)

    @property
    def survivors(self) -> tuple[MutantOutcome, ...]:
        """The surviving mutants that are not known to be equivalent."""
        equivalents = {outcome.mutant for outcome, _ in self.equivalent}
        return tuple(o for o in self.outcomes if not o.killed and o.mutant not in equivalents)

    @property
    def kill_rate(self) -> float:
        """Killed mutants divided by killed mutants plus survivors; 1.0 if there are none."""
        counted = len(self.killed) + len(self.survivors)
        return len(self.killed) / counted if counted else 1.0


def _find_proof(outcome: MutantOutcome, part: str) -> Equivalent | None:
    if outcome.forms:
        return Equivalent("The compiled code is the same.", "code", forms=outcome.forms)
    return find_equivalent(outcome.mutant.ident, part)


def survey(
    part: str,
    pairs: Sequence[Pair] = (),
    level: Level = "full",
    *,
    backend: MutationBackend = _ONE_PROCESS,
) -> Survey:
    """Find the mutants of a part, and run its cases once on this CPU.

    pairs: the pairings whose cases are run; () means every pairing of the part.
    level: level of the cases.
    backend: OneProcess or OverRanks.

    Raises ConfigurationError for an unknown part, and for a part without cases on `backend`.
    """
    return surveys((part,), pairs, level, backend=backend)[0]


def surveys(
    parts: Sequence[str],
    pairs: Sequence[Pair] = (),
    level: Level = "full",
    *,
    backend: MutationBackend = _ONE_PROCESS,
) -> tuple[Survey, ...]:
    """Survey several parts. The cases of each pairing run once for all parts.

    Each part uses the pairings in `pairs` that contain it. A TopKWeightAndReduce uses all pairings.
    """
    pairs_by_part = {part: _select_pairs(part, pairs, level, backend) for part in parts}
    catalog = load_catalog()
    modules = {m: path for part in parts for m, path in modules_of(part, catalog).items()}
    coverage_by_pair: dict[Pair, Coverage] = {}
    for pair in dict.fromkeys(pair for part_pairs in pairs_by_part.values() for pair in part_pairs):
        coverage_by_pair[pair] = backend.cover(modules, (pair,), level)
        if coverage_by_pair[pair].error:
            need = "cases that pass before anything is changed"
            raise ConfigurationError("--mutate", got=coverage_by_pair[pair].error, need=need)
    return tuple(
        Survey(
            part,
            part_pairs,
            level,
            list_mutants(part, catalog),
            merge_coverage(coverage_by_pair[p] for p in part_pairs),
            backend,
        )
        for part, part_pairs in pairs_by_part.items()
    )


def _select_pairs(
    part: str, pairs: Sequence[Pair], level: Level, backend: MutationBackend
) -> tuple[Pair, ...]:
    """Return the pairings of a part among `pairs`. Raise ConfigurationError if there are none."""
    if not pairs:
        return pairs_of(part, level, backend=backend)
    catalog = load_catalog()
    modules_of(part, catalog)
    is_reducer = part in catalog.names("topk_reduce")
    selected = tuple(pair for pair in pairs if is_reducer or part in pair)
    if not selected:
        got = ", ".join(" x ".join(pair) for pair in pairs)
        raise ConfigurationError("--mutate", got=got, need=f"a pairing of {part}")
    return selected


def list_mutants(part: str, catalog: Catalog) -> tuple[Mutant, ...]:
    """Return every mutant of a part. Raise ConfigurationError for an unknown part."""
    modules = modules_of(part, catalog)
    return tuple(m for module, path in modules.items() for m in mutants_of(module, path))


def find_mutant(mutants: Sequence[Mutant], part: str, ident: str) -> Mutant:
    """Return the mutant with identity `ident`. Raise ConfigurationError if there is none."""
    mutant = next((m for m in mutants if m.ident == ident), None)
    if mutant is None:
        need = f"the identity of one of the {len(mutants)} mutants of {part}"
        raise ConfigurationError("--only", got=repr(ident), need=need)
    return mutant


def pairs_of(
    part: str, level: Level = "full", *, backend: MutationBackend = _ONE_PROCESS
) -> tuple[Pair, ...]:
    """Return the pairings of the part that have cases.

    For a TopKWeightAndReduce, these are all pairings that have cases. Raises ConfigurationError for
    an unknown part, and for a part without cases on `backend`.
    """
    catalog = load_catalog()
    modules_of(part, catalog)
    all_pairs = (
        (pf, experts)
        for pf in catalog.names("prepare_finalize")
        for experts in catalog.names("experts")
    )
    is_reducer = part in catalog.names("topk_reduce")
    candidates = (pair for pair in all_pairs if is_reducer or part in pair)
    pairs = tuple(pair for pair in candidates if backend.has_cases(pair, level))
    if not pairs:
        raise ConfigurationError(
            "--mutate", got=repr(part), need=_describe_needed_part(part, backend.world_size)
        )
    return pairs


def _describe_needed_part(part: str, world_size: int) -> str:
    if world_size > 1:
        return f"a part with a case over {world_size} ranks on a CPU"
    catalog = load_catalog()
    if part in catalog.names("prepare_finalize"):
        min_ranks, _ = catalog.prepare_finalize(part).requires.world_sizes
        if min_ranks > 1:
            return f"--world-size {min_ranks} as well, since the part needs ranks"
    return "a part with a case in one process on this machine"


def draw_sample(mutants: Sequence[Mutant], count: int | None, seed: str) -> tuple[Mutant, ...]:
    """Draw `count` mutants, which depend only on the seed. None means all mutants, in order."""
    if count is None or count >= len(mutants):
        return tuple(mutants)
    keys = {m: hashlib.sha256(f"{seed}|{m.ident}".encode()).digest() for m in mutants}
    return tuple(sorted(mutants, key=keys.__getitem__)[:count])


def default_seed() -> str:
    """Return the seed of a release, which is its version."""
    return version("modular-kernel")


def _find_shared_outcome(
    outcome: MutantOutcome | None, part_survey: Survey
) -> MutantOutcome | None:
    """Return the outcome of another part if a case of this part killed the mutant there."""
    if outcome is None or not outcome.killed or outcome.case is None:
        return None
    executing = (
        case_coverage.case for case_coverage in part_survey.coverage.executing(outcome.mutant)
    )
    return outcome if outcome.case in executing else None


def mutation_score(
    part_survey: Survey,
    *,
    count: int | None = SAMPLE_SIZE,
    seed: str | None = None,
    ident: str | None = None,
    known_outcomes: dict[str, MutantOutcome] | None = None,
    recorded: Mapping[str, str] = MappingProxyType({}),
    on_progress: Callable[["Score"], None] = lambda _: None,
) -> Score:
    """Run mutants one at a time, each until a case fails.

    Args:
        part_survey: the mutants of a part, and the cases that execute them.
        count: number of mutants to draw among those that some case executes; None means all.
        seed: seed of the draw; None means the version of the package.
        ident: identity of a single mutant to run instead.
        known_outcomes: outcomes by identity, from scores of other parts that share source files;
            updated in place. A mutant that a case of this part has killed is not run again.
        recorded: maps the identities of mutants that an earlier record lists as killed to what
            killed them. They are not run.
        on_progress: called with the score so far after each mutant.
    """
    seed = default_seed() if seed is None else seed
    executed = part_survey.executed()
    if ident is not None:
        selected: tuple[Mutant, ...] = (part_survey.mutant(ident),)
    else:
        selected = draw_sample(executed, count, seed)
        # Known outcomes come first, so that an interrupted run keeps them.
        selected = tuple(
            sorted(selected, key=lambda m: not _is_known(m, part_survey.part, recorded))
        )
    history, score = KillHistory(), _make_initial_score(part_survey, executed, seed)
    known_outcomes = {} if known_outcomes is None else known_outcomes
    for mutant in selected:
        if ident is None and find_equivalent(mutant.ident, part_survey.part):
            outcome = MutantOutcome(mutant, "equivalent")
        elif ident is None and mutant.ident in recorded:
            outcome = MutantOutcome.from_record(mutant, recorded[mutant.ident])
        else:
            args = part_survey.coverage, part_survey.pairs, part_survey.level
            shared = _find_shared_outcome(known_outcomes.get(mutant.ident), part_survey)
            outcome = shared or run_mutant(mutant, *args, history, backend=part_survey.backend)
            if outcome.status == "survived" and ident is None:
                outcome = prove_by_code(outcome)
            known_outcomes.setdefault(mutant.ident, replace(outcome, shared=part_survey.part))
        score = replace(score, outcomes=(*score.outcomes, outcome))
        on_progress(score)
    return score


def _is_known(mutant: Mutant, part: str, recorded: Mapping[str, str]) -> bool:
    return find_equivalent(mutant.ident, part) is not None or mutant.ident in recorded


def _make_initial_score(part_survey: Survey, executed: tuple[Mutant, ...], seed: str) -> Score:
    not_candidates = set(part_survey.mutants) - set(executed)
    reasons = Counter(
        reason for m in not_candidates if (reason := find_undetectable_reason(m)) is not None
    )
    not_executed = Counter(m.module for m in not_candidates if find_undetectable_reason(m) is None)
    counts = dict(sorted(not_executed.items())), dict(sorted(reasons.items()))
    return Score(part_survey, seed, (), len(executed), *counts)
