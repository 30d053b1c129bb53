"""The mutation score of a part: which share of its mutants the case list kills, and what survives.

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
from modular_kernel.testing.mutation.coverage import Coverage, joined
from modular_kernel.testing.mutation.cpu_undetectable import apart
from modular_kernel.testing.mutation.mutant_outcome import Fate
from modular_kernel.testing.mutation.one_process import OneProcess
from modular_kernel.testing.mutation.reviewed_equivalents import Equivalent, reviewed
from modular_kernel.testing.mutation.run_mutant import Killers, Where, attempt
from modular_kernel.testing.mutation.scope import modules_of
from modular_kernel.testing.mutation.sites import mutants_of
from modular_kernel.testing.mutation.source import Mutant

# Where all mutants would take longer than an hour, so many are drawn.
SAMPLE = 150
_HERE = OneProcess()


@dataclass(frozen=True)
class Survey:
    """A part taken apart: its mutants, and which cases execute them. pairs: those it is in. where:
    its cases run."""

    part: str
    pairs: tuple[Pair, ...]
    level: Level
    mutants: tuple[Mutant, ...]
    coverage: Coverage
    where: Where = field(default_factory=OneProcess)

    def executed(self) -> tuple[Mutant, ...]:
        """Mutants that some case executes, and that a CPU can tell."""
        return tuple(m for m in self.mutants if self.runs(m) and apart(m) is None)

    def mutant(self, ident: str) -> Mutant:
        """Return the mutant of that identity; ConfigurationError if there is none."""
        return mutant_of(self.mutants, self.part, ident)

    def runs(self, mutant: Mutant) -> bool:
        return self.coverage.loads(mutant) or bool(self.coverage.executing(mutant))


@dataclass(frozen=True)
class Score:
    """What became of the mutants that were put in, and how many there are.

    seed: what the sample was drawn with. executed: how many it was drawn from. not_executed:
    module -> mutants that no case executes. apart: why no CPU can tell a mutant -> how many.
    """

    survey: Survey
    seed: str
    fates: tuple[Fate, ...]
    executed: int
    not_executed: dict[str, int]
    apart: dict[str, int]

    @property
    def killed(self) -> tuple[Fate, ...]:
        return tuple(fate for fate in self.fates if fate.killed)

    @property
    def equivalent(self) -> tuple[tuple[Fate, Equivalent], ...]:
        """Mutants that were reviewed, and compute the same: not run, or survivors."""
        alive = [fate for fate in self.fates if not fate.killed]
        found = ((f, reviewed(f.mutant.ident, self.survey.part)) for f in alive)
        return tuple((fate, why) for fate, why in found if why is not None)

    @property
    def survivors(self) -> tuple[Fate, ...]:
        """Survivors that are not known to be equivalent."""
        known = {fate.mutant for fate, _ in self.equivalent}
        return tuple(f for f in self.fates if not f.killed and f.mutant not in known)

    @property
    def share(self) -> float:
        """Killed over killed and survivors; 1.0 where there are none."""
        counted = len(self.killed) + len(self.survivors)
        return len(self.killed) / counted if counted else 1.0


def survey(
    part: str, pairs: Sequence[Pair] = (), level: Level = "full", *, where: Where = _HERE
) -> Survey:
    """Find the mutants of a part and run its cases once, on this CPU.

    pairs: the pairings whose cases are run; () takes every one that the part is in. where: in one
    process, or OverRanks. Raises ConfigurationError for an unknown part, and one that no case there
    serves.
    """
    return surveys((part,), pairs, level, where=where)[0]


def surveys(
    parts: Sequence[str], pairs: Sequence[Pair] = (), level: Level = "full", *, where: Where = _HERE
) -> tuple[Survey, ...]:
    """Take several parts apart as `survey` does one; the cases of a pairing are run once for all.

    Of given pairs a part gets those that it is in; a reducer all.
    """
    of = {part: _mine(part, pairs, level, where) for part in parts}
    catalog = load_catalog()
    modules = {m: path for part in parts for m, path in modules_of(part, catalog).items()}
    each: dict[Pair, Coverage] = {}
    for pair in dict.fromkeys(pair for mine in of.values() for pair in mine):
        each[pair] = where.cover(modules, (pair,), level)
        if each[pair].ended:
            need = "cases that pass before anything is changed"
            raise ConfigurationError("--mutate", got=each[pair].ended, need=need)
    return tuple(
        Survey(part, mine, level, mutants_in(part, catalog), joined(each[p] for p in mine), where)
        for part, mine in of.items()
    )


def _mine(part: str, pairs: Sequence[Pair], level: Level, where: Where) -> tuple[Pair, ...]:
    """Return the pairings of a part, of those given; ConfigurationError if it is in none of
    them.
    """
    if not pairs:
        return pairs_of(part, level, where=where)
    catalog = load_catalog()
    modules_of(part, catalog)
    reducer = part in catalog.names("topk_reduce")
    found = tuple(pair for pair in pairs if reducer or part in pair)
    if not found:
        got = ", ".join(" x ".join(pair) for pair in pairs)
        raise ConfigurationError("--mutate", got=got, need=f"a pairing of {part}")
    return found


def mutants_in(part: str, catalog: Catalog) -> tuple[Mutant, ...]:
    """Every mutant of a part; ConfigurationError if no part has the name."""
    modules = modules_of(part, catalog)
    return tuple(m for module, path in modules.items() for m in mutants_of(module, path))


def mutant_of(mutants: Sequence[Mutant], part: str, ident: str) -> Mutant:
    """Return the mutant of that identity; ConfigurationError if there is none."""
    found = next((m for m in mutants if m.ident == ident), None)
    if found is None:
        need = f"the identity of one of the {len(mutants)} mutants of {part}"
        raise ConfigurationError("--only", got=repr(ident), need=need)
    return found


def pairs_of(part: str, level: Level = "full", *, where: Where = _HERE) -> tuple[Pair, ...]:
    """Find the pairings with the part that have cases; for a reducer all, as any may end in it.

    Raises ConfigurationError for an unknown part, and one that no case there serves.
    """
    catalog = load_catalog()
    modules_of(part, catalog)
    every = (
        (pf, experts)
        for pf in catalog.names("prepare_finalize")
        for experts in catalog.names("experts")
    )
    reducer = part in catalog.names("topk_reduce")
    mine = (pair for pair in every if reducer or part in pair)
    pairs = tuple(pair for pair in mine if where.has_cases(pair, level))
    if not pairs:
        raise ConfigurationError("--mutate", got=repr(part), need=_needed(part, where.world_size))
    return pairs


def _needed(part: str, world_size: int) -> str:
    if world_size > 1:
        return f"a part that some pairing has a case for over {world_size} ranks on a CPU"
    catalog = load_catalog()
    if part in catalog.names("prepare_finalize"):
        least, _ = catalog.prepare_finalize(part).requires.world_sizes
        if least > 1:
            return f"--world-size {least} beside it: it is a part over ranks"
    return "a part that some pairing has a case for in one process here"


def drawn(mutants: Sequence[Mutant], count: int | None, seed: str) -> tuple[Mutant, ...]:
    """`count` of the mutants, the same for the same seed; all in their order if None."""
    if count is None or count >= len(mutants):
        return tuple(mutants)
    keys = {m: hashlib.sha256(f"{seed}|{m.ident}".encode()).digest() for m in mutants}
    return tuple(sorted(mutants, key=keys.__getitem__)[:count])


def release() -> str:
    """Return the seed of a release: its version."""
    return version("modular-kernel")


def _shared(before: Fate | None, found: Survey) -> Fate | None:
    """Return the fate of a mutant that died before a case of this part, in the score of another."""
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
    known: dict[str, Fate] | None = None,
    dead: Mapping[str, str] = MappingProxyType({}),
    told: Callable[["Score"], None] = lambda _: None,
) -> Score:
    """Put mutants in, one at a time, each until a case fails.

    count: how many are drawn of those that some case executes; None for all. seed: None for the
    release. only: the identity of a single one. known: fates by identity, of the same source, to
    which these are added: who died before a case of this part is not run again. dead: nor are
    these, identity -> what killed them before. told: called with the score so far after each.
    """
    seed = release() if seed is None else seed
    executed = found.executed()
    if only is not None:
        chosen: tuple[Mutant, ...] = (found.mutant(only),)
    else:
        chosen = drawn(executed, count, seed)
        # Who is known comes first: a run that is stopped then leaves nothing out that it knew.
        chosen = tuple(sorted(chosen, key=lambda m: not _known(m, found.part, dead)))
    killers, score = Killers(), _nothing_yet(found, executed, seed)
    known = {} if known is None else known
    for mutant in chosen:
        if only is None and reviewed(mutant.ident, found.part):
            fate = Fate(mutant, "equivalent")
        elif only is None and mutant.ident in dead:
            fate = Fate.before(mutant, dead[mutant.ident])
        else:
            met = found.coverage, found.pairs, found.level
            before = _shared(known.get(mutant.ident), found)
            fate = before or attempt(mutant, *met, killers, where=found.where)
            known.setdefault(mutant.ident, replace(fate, shared=found.part))
        score = replace(score, fates=(*score.fates, fate))
        told(score)
    return score


def _known(mutant: Mutant, part: str, dead: Mapping[str, str]) -> bool:
    return reviewed(mutant.ident, part) is not None or mutant.ident in dead


def _nothing_yet(found: Survey, executed: tuple[Mutant, ...], seed: str) -> Score:
    """Return the score before any mutant is put in."""
    rest = set(found.mutants) - set(executed)
    reasons = Counter(reason for m in rest if (reason := apart(m)) is not None)
    idle = Counter(m.module for m in rest if apart(m) is None)
    counts = dict(sorted(idle.items())), dict(sorted(reasons.items()))
    return Score(found, seed, (), len(executed), *counts)
