"""`mk test --mutate PART`: mutation testing of the inputs, outputs and source of a part."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from modular_kernel.cli import output
from modular_kernel.cli.call_defects import print_kills, record_of_kill, run_input_mutations
from modular_kernel.cli.command import IntegerRange, option
from modular_kernel.cli.file_options import FilePath, FileUse
from modular_kernel.cli.ranks import Host
from modular_kernel.errors import ConfigurationError
from modular_kernel.text import counted

if TYPE_CHECKING:
    from modular_kernel.testing.mutation import Mutant, MutationBackend, Score, Survey


@dataclass(frozen=True, kw_only=True)
class MutationOptions:
    """Options of mutation testing."""

    mutate: Annotated[
        str | None,
        option(
            "Mutate the calls and the source of this part and check that each mutant is "
            "killed. PART,PART: several parts, which share results for common code.",
            metavar="PART",
        ),
    ] = None
    only: Annotated[str | None, option("With --mutate: run only this mutant.", metavar="ID")] = None
    mutants: Annotated[
        str, option("With --mutate: number of source mutants to sample, all, or 0.", metavar="N")
    ] = "150"
    bits: Annotated[
        int | None,
        option(
            "With --only ID or ID,ID: compare output bits in N random problems.",
            metavar="N",
            type=IntegerRange(1),
        ),
    ] = None
    code: Annotated[bool, option("With --only ID or ID,ID: compare the compiled code.")] = False
    save: Annotated[
        Path | None,
        option(
            "With --mutate: write PART.json into this folder, too.",
            type=FilePath(FileUse.WRITE_FOLDER),
        ),
    ] = None
    resume: Annotated[
        bool,
        option("With --save: do not rerun mutants that the saved record lists as killed."),
    ] = False

    def check(self, *, beside: bool) -> None:
        """Raise ConfigurationError for options that require --mutate or cannot be combined with it.

        beside: whether --one is set.
        """
        if self.mutate is None and (self.only, self.mutants, self.save) != (None, "150", None):
            need = "--mutate PART beside them"
            raise ConfigurationError("--only, --mutants, --save", got="no --mutate", need=need)
        if self.resume and self.save is None:
            raise ConfigurationError("--resume", got="no --save", need="--save FOLDER in addition")
        if self.bits is not None and self.only is None:
            raise ConfigurationError("--bits", got=self.bits, need="--only ID in addition")
        if self.code and (self.only is None or self.bits is not None):
            raise ConfigurationError("--code", got="other words", need="--only ID, and no --bits")
        if self.mutate is not None and "," in self.mutate and self.only is not None:
            raise ConfigurationError("--only", got=self.mutate, need="one part")
        if self.mutate is not None and beside:
            raise ConfigurationError("--mutate", got="--one", need="cases of its own choice")

    def count(self) -> int | None:
        """Return the number of source mutants to sample; None means all."""
        if self.mutants == "all":
            return None
        if not (self.mutants.isascii() and self.mutants.isdecimal()):
            raise ConfigurationError("--mutants", got=repr(self.mutants), need="a number or all")
        return int(self.mutants)


def run_mutation(
    wanted: MutationOptions,
    pairs: Sequence[tuple[str, str]],
    host: Host,
    level: Literal["smoke", "full"],
    *,
    as_json: str | None,
) -> bool:
    """Run mutation testing and print the results.

    Input and output mutations run first, on smoke cases (not with --only), then source mutations.
    pairs: the pairings whose cases run; () means all pairings that contain the part. Returns
    whether every mutant was killed, except equivalent ones.
    """
    from modular_kernel.testing.mutation import OneProcess, OverRanks, pairs_of, surveys

    assert wanted.mutate is not None
    mutants = _named(wanted)
    if wanted.code:
        return _print_code(mutants, as_json=as_json)
    count, parts = wanted.count(), wanted.mutate.split(",")
    if host.pool is not None and host.pool.backend != "gloo":
        raise ConfigurationError("--mutate", got="ranks over nccl", need="--backend gloo")
    execution: MutationBackend = OneProcess()
    if host.pool is not None:
        execution = OverRanks(host.pool.world_size, host.pool.ranks_per_host)
    pairs_by_part = (pairs_of(part, level, backend=execution) for part in parts)
    pairs = pairs or tuple(
        dict.fromkeys(pair for part_pairs in pairs_by_part for pair in part_pairs)
    )
    kills = [] if wanted.only else run_input_mutations(pairs, host)
    all_killed = all(kill.ok for kill in kills)
    calls = {"ok": all_killed, **host.facts, "calls": [record_of_kill(kill) for kill in kills]}
    if count == 0:
        output.print_result(calls, as_json, lambda: print_kills(kills))
        return all_killed
    if as_json != output.STDOUT and kills:
        print_kills(kills)
    part_surveys = surveys(parts, pairs, level, backend=execution)
    if wanted.bits is not None:
        return _print_bits(mutants, part_surveys[0], wanted.bits, as_json=as_json)
    scores, records = _scored(part_surveys, wanted)
    ok = all_killed and not any(score.survivors for score in scores)
    record = records[0] if wanted.only else {**calls, "ok": ok, **_of_parts(records)}

    def show() -> None:
        for score in scores:
            _print_text(score)

    output.print_result(record, as_json, show)
    return ok


def _named(wanted: MutationOptions) -> "list[Mutant]":
    """Return the mutants of --only; [] without it.

    Raises ConfigurationError for an unknown mutant, before any case runs.
    """
    from modular_kernel.catalog import load_catalog
    from modular_kernel.testing.mutation.score import mutant_of, mutants_in

    if wanted.mutate is None or wanted.only is None:
        return []
    known = mutants_in(wanted.mutate, load_catalog())
    several = wanted.code or wanted.bits is not None
    idents = wanted.only.split(",") if several else [wanted.only]
    return [mutant_of(known, wanted.mutate, ident) for ident in idents]


def _scored(
    found: "Sequence[Survey]", wanted: MutationOptions
) -> "tuple[list[Score], list[dict[str, object]]]":
    """Compute the mutation score of each part, saving its record after every mutant."""
    from modular_kernel.testing.mutation import MutantOutcome, mutation_score
    from modular_kernel.testing.mutation.record import record_of, recorded_kills

    count, known = wanted.count(), dict[str, MutantOutcome]()
    scores = list["Score"]()
    for survey in found:
        total = 1 if wanted.only else min(count or len(survey.mutants), len(survey.executed()))
        previous = _before(wanted, survey.part)
        dead = {} if previous is None else recorded_kills(previous, survey)
        with output.progress(total, "mutants") as advance:

            def report_progress(so_far: "Score", advance: Callable[[], None] = advance) -> None:
                advance()
                _save(so_far, wanted.save)

            scores.append(
                mutation_score(
                    survey,
                    count=count,
                    ident=wanted.only,
                    known_outcomes=known,
                    recorded=dead,
                    on_progress=report_progress,
                )
            )
    return scores, [record_of(score) for score in scores]


def _save(score: "Score", folder: Path | None) -> None:
    """Write the record of a part atomically, so that --resume can continue an interrupted run."""
    from modular_kernel.testing.mutation.record import record_of

    if folder is None:
        return
    text = json.dumps(record_of(score), indent=1) + "\n"
    output.write_file(folder / f"{score.survey.part}.json", text)


def _before(wanted: MutationOptions, part: str) -> dict[str, Any] | None:
    """Return the saved record to resume from; None without --resume or without a record."""
    path = None if wanted.save is None else wanted.save / f"{part}.json"
    if not wanted.resume or path is None or not path.is_file():
        return None
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def _of_parts(records: list[dict[str, object]]) -> dict[str, object]:
    """Return the record of a single part, or a dict of records by part name."""
    if len(records) == 1:
        return records[0]
    return {"parts": {str(record["part"]): record for record in records}}


def _print_bits(
    mutants: "list[Mutant]", found: "Survey", problems: int, *, as_json: str | None
) -> bool:
    """Compare output bits with all mutants applied together, and print the result.

    Returns whether no bit differs, that is, whether the mutants can be considered equivalent.
    """
    from modular_kernel.testing.cases.lists import command
    from modular_kernel.testing.mutation.bitwise_equivalence import compare_bits

    bits = compare_bits(mutants, found.coverage, problems, backend=found.backend)
    differing = command(bits.differing) if bits.differing else None

    def show() -> None:
        for mutant in mutants:
            output.line(mutant.diff())
        output.line(f"no bit differs in {bits.problems} problems")
        output.line(f"then a bit differs: {differing}" if differing else "then there were no more")

    record = {"id": _ids(mutants), "problems": bits.problems, "differing": differing}
    output.print_result(record, as_json, show)
    return differing is None


def _ids(mutants: "list[Mutant]") -> str:
    return ",".join(mutant.ident for mutant in mutants)


def _print_code(mutants: "list[Mutant]", *, as_json: str | None) -> bool:
    """Compare compiled kernels with all mutants applied together, and print the result.

    Returns whether the mutants leave all compiled code unchanged.
    """
    from modular_kernel.testing.mutation.code_equivalence import same_code

    same = same_code(mutants)

    def show() -> None:
        for mutant, reached in zip(mutants, same.reached, strict=True):
            output.line(f"{mutant.diff()}\nin {counted(reached, 'compiled form')} of kernels")
        are = "is" if same.differing == 1 else "are"
        output.line(f"{counted(same.differing, 'form')} {are} compiled to different code")

    record = {"id": _ids(mutants), "reached": same.reached, "differing": same.differing}
    output.print_result(record, as_json, show)
    return same.proven


def _print_text(score: "Score") -> None:
    from modular_kernel.testing.mutation.record import killers, reproducer

    survey = score.survey
    for fate in score.survivors:
        ran = counted(fate.num_cases, "case")
        cases = "no case executes it" if fate.status == "not executed" else f"passed by {ran}"
        output.line(f"SURVIVED {fate.mutant.edit.operator}: {cases}")
        output.line(f"{fate.mutant.diff()}\n  {reproducer(fate, survey)}\n")
    for fate, equivalence in score.equivalent:
        bits = f"no bit differs in {equivalence.problems} problems"
        proof = (
            bits if equivalence.problems else f"same code in {counted(equivalence.forms, 'form')}"
        )
        output.line(f"equivalent {fate.mutant.ident}, {proof}: {equivalence.reason}")
    rows = killers(score.killed).items()
    output.table(("killed by", "mutants"), rows)
    output.table(("excluded, because", "mutants"), score.undetectable.items())
    output.table(("no case executes", "mutants"), score.not_executed.items())
    output.line(
        f"{survey.part}: {len(score.outcomes)} of {score.executed} mutants put in, seed "
        f"{score.seed}: {len(score.killed)} killed, {len(score.survivors)} survived, "
        f"{len(score.equivalent)} equivalent: score {score.share:.1%}"
    )
