"""A mutation score as JSON, for programs and for the page in docs/."""

from collections import Counter
from importlib.metadata import version
from typing import Any

from modular_kernel.testing.mutation.mutant_outcome import MutantOutcome
from modular_kernel.testing.mutation.reviewed_equivalents import Equivalent
from modular_kernel.testing.mutation.score import Score, Survey

Record = dict[str, Any]


def record_of(score: Score) -> Record:
    """Return all data needed to judge the score and to repeat any result in it."""
    survey = score.survey
    return {
        "part": survey.part,
        "seed": score.seed,
        "level": survey.level,
        "world_size": survey.where.world_size,
        "ranks_per_host": survey.where.ranks_per_host,
        "pairings": [" x ".join(pair) for pair in survey.pairs],
        "cases": len(survey.coverage.cases),
        "versions": {name: version(name) for name in ("torch", "triton")},
        "mutants": len(survey.mutants),
        "executed": score.executed,
        "put_in": len(score.fates),
        "killed": len(score.killed),
        "shared": sum(bool(fate.shared) for fate in score.killed),
        "score": round(score.share, 4),
        "killed_by": killers(score.killed),
        "died": {fate.mutant.ident: killer(fate) for fate in score.killed},
        "equivalent": [
            {
                **_describe(fate),
                "reason": why.reason,
                "proof": why.proof,
                **_size(why),
            }
            for fate, why in score.equivalent
        ],
        "survivors": [_survivor(fate, survey) for fate in score.survivors],
        "apart": score.apart,
        "not_executed": score.not_executed,
    }


def killers(killed: tuple[MutantOutcome, ...]) -> dict[str, int]:
    """Return how many mutants each killer killed: a check's name, "hang", "crash" or "refused"."""
    return dict(Counter(map(killer, killed)).most_common())


def killer(fate: MutantOutcome) -> str:
    """Return what killed a mutant: a check's name, "hang", "crash" or "refused"."""
    return fate.by.partition(":")[0] if fate.how == "killed" else fate.how


def recorded_kills(record: Record, found: Survey) -> dict[str, str]:
    """Return {identity: killer} of the mutants killed in a record, to continue from it.

    {} if the record is for another part, level, number of ranks or hosts, or other pairings.
    """
    pairings, where = [" x ".join(pair) for pair in found.pairs], found.where
    recorded = record["part"], record["level"], record["world_size"], record["pairings"]
    current = found.part, found.level, where.world_size, pairings
    is_same = recorded == current and record.get("ranks_per_host") == where.ranks_per_host
    killers_by_ident: dict[str, str] = record.get("died", {})
    return killers_by_ident if is_same else {}


def reproducer(fate: MutantOutcome, found: Survey) -> str:
    """Return the command that runs this mutant again with the same cases."""
    words = ["mk", "test", "--mutate", found.part, "--only", fate.mutant.ident]
    if found.where.world_size > 1:
        words += ["--world-size", str(found.where.world_size)]
    if found.where.ranks_per_host:
        words += ["--ranks-per-host", str(found.where.ranks_per_host)]
    if len(found.pairs) == 1:
        words += ["--pf-type", found.pairs[0][0], "--experts-type", found.pairs[0][1]]
    if found.level != "full":
        words += ["--level", found.level]
    return " ".join(words)


def _survivor(fate: MutantOutcome, found: Survey) -> Record:
    counts = {"cases": fate.ran, "differing": fate.differing}
    return {**_describe(fate), **counts, "command": reproducer(fate, found)}


def _size(why: Equivalent) -> Record:
    """Return the extent of the proof."""
    if why.proof == "code":
        return {"forms": why.forms}
    return {"problems": why.problems, "beside": why.beside}


def _describe(fate: MutantOutcome) -> Record:
    mutant = fate.mutant
    return {
        "id": mutant.ident,
        "place": mutant.place,
        "operator": mutant.edit.operator,
        "diff": mutant.diff(),
    }
