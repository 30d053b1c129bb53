"""Write a mutation score as JSON, for programs and for a page in docs/.

`mk test --mutate` writes such a record. It can also read an earlier record, and skip the mutants
that it lists as killed.
"""

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
        "world_size": survey.backend.world_size,
        "ranks_per_host": survey.backend.ranks_per_host,
        "pairings": [" x ".join(pair) for pair in survey.pairs],
        "cases": len(survey.coverage.cases),
        "versions": {name: version(name) for name in ("torch", "triton")},
        "mutants": len(survey.mutants),
        "executed": score.executed,
        "put_in": len(score.outcomes),
        "killed": len(score.killed),
        "shared": sum(bool(outcome.shared) for outcome in score.killed),
        "score": round(score.kill_rate, 4),
        "killed_by": count_killers(score.killed),
        "died": {outcome.mutant.ident: get_killer(outcome) for outcome in score.killed},
        "equivalent": [
            {
                **_describe_mutant(outcome),
                "reason": review.reason,
                "proof": review.proof,
                **_describe_proof(review),
            }
            for outcome, review in score.equivalent
        ],
        "survivors": [_describe_survivor(outcome, survey) for outcome in score.survivors],
        "apart": score.undetectable,
        "not_executed": score.not_executed,
    }


def count_killers(killed: tuple[MutantOutcome, ...]) -> dict[str, int]:
    """Count the killed mutants by what killed them, as returned by `get_killer`."""
    return dict(Counter(map(get_killer, killed)).most_common())


def get_killer(outcome: MutantOutcome) -> str:
    """Return what killed a mutant: the name of a check, "hang", "crash" or "refused"."""
    return outcome.finding.partition(":")[0] if outcome.status == "killed" else outcome.status


def recorded_kills(record: Record, survey: Survey) -> dict[str, str]:
    """Return {identity: killer} of the mutants that a record lists as killed.

    Returns {} if the record is for another part, level, number of ranks or hosts, or other
    pairings.
    """
    pairings, backend = [" x ".join(pair) for pair in survey.pairs], survey.backend
    recorded = record["part"], record["level"], record["world_size"], record["pairings"]
    current = survey.part, survey.level, backend.world_size, pairings
    is_same = recorded == current and record.get("ranks_per_host") == backend.ranks_per_host
    killer_by_ident: dict[str, str] = record.get("died", {})
    return killer_by_ident if is_same else {}


def format_reproducer(outcome: MutantOutcome, survey: Survey) -> str:
    """Return the command that runs this mutant again with the same cases."""
    arguments = ["mk", "test", "--mutate", survey.part, "--only", outcome.mutant.ident]
    if survey.backend.world_size > 1:
        arguments += ["--world-size", str(survey.backend.world_size)]
    if survey.backend.ranks_per_host:
        arguments += ["--ranks-per-host", str(survey.backend.ranks_per_host)]
    if len(survey.pairs) == 1:
        arguments += ["--pf-type", survey.pairs[0][0], "--experts-type", survey.pairs[0][1]]
    if survey.level != "full":
        arguments += ["--level", survey.level]
    return " ".join(arguments)


def _describe_survivor(outcome: MutantOutcome, survey: Survey) -> Record:
    counts = {"cases": outcome.num_cases, "differing": outcome.differing}
    return {**_describe_mutant(outcome), **counts, "command": format_reproducer(outcome, survey)}


def _describe_proof(review: Equivalent) -> Record:
    """Return the counts that a proof of equivalence reports."""
    if review.proof == "code":
        return {"forms": review.forms}
    return {"problems": review.problems, "beside": review.beside}


def _describe_mutant(outcome: MutantOutcome) -> Record:
    mutant = outcome.mutant
    return {
        "id": mutant.ident,
        "place": mutant.location,
        "operator": mutant.edit.operator,
        "diff": mutant.diff(),
    }
