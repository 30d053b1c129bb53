"""Mutation score of a part: the share of its mutants that the cases kill, and the survivors.

score = mutation_score(survey("TorchExperts"))
print(score.share, [fate.mutant.diff() for fate in score.survivors])
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
from modular_kernel.testing.mutation.coverage import Coverage, merge_coverage
from modular_kernel.testing.mutation.cpu_undetectable import undetectable_reason
from modular_kernel.testing.mutation.mutant_outcome import MutantOutcome
from modular_kernel.testing.mutation.one_process import OneProcess
from modular_kernel.testing.mutation.reviewed_equivalents import Equivalent, find_equivalent
from modular_kernel.testing.mutation.run_mutant import KillHistory, MutationBackend, run_mutant
from modular_kernel.testing.mutation.scope import modules_of
from modular_kernel.testing.mutation.sites import mutants_of
from modular_kernel.testing.mutation.source import Mutant

# Sample size where running all mutants would take more than an hour.
SAMPLE = 150
_HERE = OneProcess()


@dataclass(frozen=True)
class Survey:
    """The mutants of a part and the cases that execute them.

    pairs: the pairings of the part. where: in one process or over ranks.
    """

    part: str
    pairs: tuple[Pair, ...]
    level: Level
    mutants: tuple[Mutant, ...]
    coverage: Coverage
    where: MutationBackend = field(default_factory=OneProcess)

    def executed(self) -> tuple[Mutant, ...]:
        """Return the mutants that some case executes and that a CPU can detect."""
        return tuple(m for m in self.mutants if self.runs(m) and undetectable_reason(m) is None)

    def mutant(self, ident: str) -> Mutant:
        """Return the mutant with an identity. Raise ConfigurationError if there is none."""
        return mutant_of(self.mutants, self.part, ident)

    def runs(self, mutant: Mutant) -> bool:
        return self.coverage.loads(mutant) or bool(self.coverage.executing(mutant))


@dataclass(frozen=True)
class Score:
    """Outcomes of the mutants that were run, with totals.

    seed: the seed of the sample. executed: number of mutants it was drawn from. not_executed:
    module -> number of mutants that no case executes. apart: reason why a CPU cannot detect a
    mutant -> number.
    """

    survey: Survey
    seed: str
    fates: tuple[MutantOutcome, ...]
    executed: int
    not_executed: dict[str, int]
    apart: dict[str, int]

    @property
    def killed(self) -> tuple[MutantOutcome, ...]:
        return tuple(fate for fate in self.fates if fate.killed)

    @property
    def equivalent(self) -> tuple[tuple[MutantOutcome, Equivalent], ...]:
        """The reviewed equivalent mutants, whether they were skipped or survived."""
        alive = [fate for fate in self.fates if not fate.killed]
        reviews = ((f, find_equivalent(f.mutant.ident, self.survey.part)) for f in alive)
        return tuple((fate, why) for fate, why in reviews if why is not None)

    @property
    def survivors(self) -> tuple[MutantOutcome, ...]:
        """The survivors that are not known to be equivalent."""
        equivalents = {fate.mutant for fate, _ in self.equivalent}
        return tuple(f for f in self.fates if not f.killed and f.mutant not in equivalents)

    @property
    def share(self) -> float:
        """Killed divided by killed plus survivors; 1.0 if there are none."""
        counted = len(self.killed) + len(self.survivors)
        return len(self.killed) / counted if counted else 1.0


def survey(
    part: str, pairs: Sequence[Pair] = (), level: Level = "full", *, where: MutationBackend = _HERE
) -> Survey:
    """Find the mutants of a part and run its cases once on this CPU.

    pairs: the pairings whose cases run; () for every pairing of the part. where: in one process, or
    OverRanks. Raises ConfigurationError for an unknown part and for one without cases there.
    """
    return surveys((part,), pairs, level, where=where)[0]


def surveys(
    parts: Sequence[str],
    pairs: Sequence[Pair] = (),
    level: Level = "full",
    *,
    where: MutationBackend = _HERE,
) -> tuple[Survey, ...]:
    """Survey several parts; the cases of each pairing run once for all parts.

    Each part uses those of `pairs` that contain it; a reducer uses all.
    """
    pairs_by_part = {part: _select_pairs(part, pairs, level, where) for part in parts}
    catalog = load_catalog()
    modules = {m: path for part in parts for m, path in modules_of(part, catalog).items()}
    coverage_by_pair: dict[Pair, Coverage] = {}
    for pair in dict.fromkeys(pair for part_pairs in pairs_by_part.values() for pair in part_pairs):
        coverage_by_pair[pair] = where.cover(modules, (pair,), level)
        if coverage_by_pair[pair].ended:
            need = "cases that pass before anything is changed"
            raise ConfigurationError("--mutate", got=coverage_by_pair[pair].ended, need=need)
    return tuple(
        Survey(
            part,
            part_pairs,
            level,
            mutants_in(part, catalog),
            merge_coverage(coverage_by_pair[p] for p in part_pairs),
            where,
        )
        for part, part_pairs in pairs_by_part.items()
    )


def _select_pairs(
    part: str, pairs: Sequence[Pair], level: Level, where: MutationBackend
) -> tuple[Pair, ...]:
    """Return the pairings of a part among `pairs`. Raise ConfigurationError if there are none."""
    if not pairs:
        return pairs_of(part, level, where=where)
    catalog = load_catalog()
    modules_of(part, catalog)
    is_reducer = part in catalog.names("topk_reduce")
    selected = tuple(pair for pair in pairs if is_reducer or part in pair)
    if not selected:
        got = ", ".join(" x ".join(pair) for pair in pairs)
        raise ConfigurationError("--mutate", got=got, need=f"a pairing of {part}")
    return selected


def mutants_in(part: str, catalog: Catalog) -> tuple[Mutant, ...]:
    """Return every mutant of a part. Raise ConfigurationError for an unknown part."""
    modules = modules_of(part, catalog)
    return tuple(m for module, path in modules.items() for m in mutants_of(module, path))


def mutant_of(mutants: Sequence[Mutant], part: str, ident: str) -> Mutant:
    """Return the mutant with an identity. Raise ConfigurationError if there is none."""
    mutant = next((m for m in mutants if m.ident == ident), None)
    if mutant is None:
        need = f"the identity of one of the {len(mutants)} mutants of {part}"
        raise ConfigurationError("--only", got=repr(ident), need=need)
    return mutant


def pairs_of(
    part: str, level: Level = "full", *, where: MutationBackend = _HERE
) -> tuple[Pair, ...]:
    """Return the pairings of the part that have cases; for a reducer all pairings with cases.

    Raises ConfigurationError for an unknown part and for one without cases there.
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
    pairs = tuple(pair for pair in candidates if where.has_cases(pair, level))
    if not pairs:
        raise ConfigurationError("--mutate", got=repr(part), need=_needed(part, where.world_size))
    return pairs


def _needed(part: str, world_size: int) -> str:
    if world_size > 1:
        return f"a part with a case over {world_size} ranks on a CPU"
    catalog = load_catalog()
    if part in catalog.names("prepare_finalize"):
        min_ranks, _ = catalog.prepare_finalize(part).requires.world_sizes
        if min_ranks > 1:
            return f"--world-size {min_ranks} as well, since the part needs ranks"
    return "a part with a case in one process on this machine"


def draw_sample(mutants: Sequence[Mutant], count: int | None, seed: str) -> tuple[Mutant, ...]:
    """Draw `count` of the mutants, the same for the same seed; None returns all in order."""
    if count is None or count >= len(mutants):
        return tuple(mutants)
    keys = {m: hashlib.sha256(f"{seed}|{m.ident}".encode()).digest() for m in mutants}
    return tuple(sorted(mutants, key=keys.__getitem__)[:count])


def default_seed() -> str:
    """Return the seed of a release, which is its version."""
    return version("modular-kernel")


def _shared(before: MutantOutcome | None, found: Survey) -> MutantOutcome | None:
    """Return the outcome from another part's score if a case of this part killed the mutant."""
    if before is None or not before.killed or before.case is None:
        return None
    met = (covered.case for covered in found.coverage.executing(before.mutant))
    return before if before.case in met else None


def mutation_score(
    found: Survey,
    *,
    count: int | None = SAMPLE,
    seed: str | None = None,
    only: str | None = None,
    known: dict[str, MutantOutcome] | None = None,
    dead: Mapping[str, str] = MappingProxyType({}),
    told: Callable[["Score"], None] = lambda _: None,
) -> Score:
    """Run mutants one at a time, each until a case fails.

    count: sample size among the mutants that some case executes; None for all. seed: None for the
    version. only: the identity of a single mutant. known: outcomes by identity for the same source,
    updated in place; mutants that a case of this part killed are not run again. dead: identity ->
    killer of mutants that are not run either. told: called with the score so far after each mutant.
    """
    seed = default_seed() if seed is None else seed
    executed = found.executed()
    if only is not None:
        selected: tuple[Mutant, ...] = (found.mutant(only),)
    else:
        selected = draw_sample(executed, count, seed)
        # Known outcomes first, so that an interrupted run keeps them.
        selected = tuple(sorted(selected, key=lambda m: not _known(m, found.part, dead)))
    killers, score = KillHistory(), _initial_score(found, executed, seed)
    known = {} if known is None else known
    for mutant in selected:
        if only is None and find_equivalent(mutant.ident, found.part):
            fate = MutantOutcome(mutant, "equivalent")
        elif only is None and mutant.ident in dead:
            fate = MutantOutcome.before(mutant, dead[mutant.ident])
        else:
            args = found.coverage, found.pairs, found.level
            before = _shared(known.get(mutant.ident), found)
            fate = before or run_mutant(mutant, *args, killers, where=found.where)
            known.setdefault(mutant.ident, replace(fate, shared=found.part))
        score = replace(score, fates=(*score.fates, fate))
        told(score)
    return score


def _known(mutant: Mutant, part: str, dead: Mapping[str, str]) -> bool:
    return find_equivalent(mutant.ident, part) is not None or mutant.ident in dead


def _initial_score(found: Survey, executed: tuple[Mutant, ...], seed: str) -> Score:
    """Return the score before any mutant has run."""
    others = set(found.mutants) - set(executed)
    reasons = Counter(reason for m in others if (reason := undetectable_reason(m)) is not None)
    not_executed = Counter(m.module for m in others if undetectable_reason(m) is None)
    counts = dict(sorted(not_executed.items())), dict(sorted(reasons.items()))
    return Score(found, seed, (), len(executed), *counts)
