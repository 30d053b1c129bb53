"""`mk test --mutate PART`: mutation testing, which shows whether the cases detect defects.

A mutant is the part with one defect. A call mutation corrupts an input or output of the part, and a
source mutation changes its code. A mutant is killed if a case fails. Otherwise it survives. A
mutant is equivalent if it cannot change the output. The score is the number of killed mutants
divided by the number of mutants that are not equivalent. `modular_kernel.testing` implements the
mutations.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from modular_kernel.cli import output
from modular_kernel.cli.command import IntegerRange, option
from modular_kernel.cli.file_options import FilePath, FileUse
from modular_kernel.cli.ranks import Executor
from modular_kernel.errors import ConfigurationError
from modular_kernel.text import format_count

if TYPE_CHECKING:
    from modular_kernel.testing.input_mutations.run import CallMutantResult
    from modular_kernel.testing.mutation import Mutant, MutationBackend, Score, Survey

Pair = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class MutationOptions:
    """Options of mutation testing."""

    mutate: Annotated[
        str | None,
        option(
            "Inject defects into the calls and the source of this part, and check that each makes "
            "a case fail. Several parts (PART,PART) share results for common code.",
            metavar="PART",
        ),
    ] = None
    only: Annotated[str | None, option("With --mutate: run only this mutant.", metavar="ID")] = None
    mutants: Annotated[
        str,
        option(
            "With --mutate: number of source mutants to sample, or all. 0 samples none.",
            metavar="N",
        ),
    ] = "150"
    sample_seed: Annotated[
        str | None,
        option("With --mutate: seed of the sample.  [default: the version]", metavar="TEXT"),
    ] = None
    bits: Annotated[
        int | None,
        option(
            "With --only ID or ID,ID: compare output bits with and without the mutants in N random "
            "problems.",
            metavar="N",
            type=IntegerRange(1),
        ),
    ] = None
    code: Annotated[
        bool,
        option("With --only ID or ID,ID: compare the compiled code with and without the mutants."),
    ] = False
    save: Annotated[
        Path | None,
        option(
            "With --mutate: also write PART.json to this folder.",
            type=FilePath(FileUse.WRITE_FOLDER),
        ),
    ] = None
    resume: Annotated[
        bool,
        option("With --save: do not rerun mutants that the saved record lists as killed."),
    ] = False

    def check(self, *, single_case: bool) -> None:
        """Raise ConfigurationError for options that require --mutate or cannot be combined with it.

        single_case: whether --one is set.
        """
        options = (self.only, self.mutants, self.sample_seed, self.save)
        if self.mutate is None and options != (None, "150", None, None):
            names, need = "--only, --mutants, --sample-seed, --save", "--mutate PART in addition"
            raise ConfigurationError(names, got="no --mutate", need=need)
        if self.sample_seed is not None and self.only is not None:
            raise ConfigurationError("--sample-seed", got="--only too", need="only one of them")
        if self.resume and self.save is None:
            raise ConfigurationError("--resume", got="no --save", need="--save FOLDER in addition")
        if self.bits is not None and self.only is None:
            raise ConfigurationError("--bits", got=self.bits, need="--only ID in addition")
        if self.code and (self.only is None or self.bits is not None):
            raise ConfigurationError(
                "--code",
                got="no --only, or both --code and --bits",
                need="--only ID, without --bits",
            )
        if self.mutate is not None and "," in self.mutate and self.only is not None:
            raise ConfigurationError("--mutate", got=self.mutate, need="one part with --only")
        if self.mutate is not None and single_case:
            raise ConfigurationError("--mutate", got="--one too", need="only one of them")

    def count(self) -> int | None:
        """Return the number of source mutants to sample; None means all."""
        if self.mutants == "all":
            return None
        if not (self.mutants.isascii() and self.mutants.isdecimal()):
            raise ConfigurationError("--mutants", got=repr(self.mutants), need="a number, or all")
        return int(self.mutants)


def require_no_gpu() -> None:
    """Raise ConfigurationError if torch finds a GPU, because mutants run in forked processes."""
    import torch

    if torch.cuda.is_available():
        need = "CUDA_VISIBLE_DEVICES= in the environment, because CUDA does not survive a fork"
        raise ConfigurationError("--mutate", got="a GPU", need=need)


def run_mutation(
    options: MutationOptions,
    pairs: Sequence[tuple[str, str]],
    executor: Executor,
    level: Literal["smoke", "full"],
    *,
    as_json: str | None,
) -> bool:
    """Run mutation testing and print the results.

    Without --only, the inputs and outputs of smoke cases are mutated first, and then the source.

    pairs: the pairings whose cases run; () stands for all pairings that contain the part.

    Returns whether every mutant that is not equivalent was killed.
    """
    from modular_kernel.testing.mutation import OneProcess, OverRanks, pairs_of, surveys

    assert options.mutate is not None
    mutants = _select_mutants(options)
    if options.code:
        return _compare_code(mutants, as_json=as_json)
    count, parts = options.count(), options.mutate.split(",")
    if executor.pool is not None and executor.pool.backend != "gloo":
        raise ConfigurationError("--mutate", got="ranks over nccl", need="--backend gloo")
    if count:
        require_no_gpu()
    print_position = output.PositionPrinter("cases")
    backend: MutationBackend = OneProcess(print_position)
    if executor.pool is not None:
        pool = executor.pool
        backend = OverRanks(pool.world_size, pool.ranks_per_host, print_position)
    pairs_by_part = (pairs_of(part, level, backend=backend) for part in parts)
    pairs = pairs or tuple(
        dict.fromkeys(pair for part_pairs in pairs_by_part for pair in part_pairs)
    )
    results = [] if options.only else run_call_mutations(pairs, executor)
    all_killed = all(result.ok for result in results)
    call_record = {
        "ok": all_killed,
        **executor.record_fields,
        "calls": [make_result_record(result) for result in results],
    }
    if count == 0:
        output.print_result(call_record, as_json, lambda: print_call_results(results))
        return all_killed
    if as_json != output.STDOUT and results:
        print_call_results(results)
    output.print_note("finding the cases that execute each line of the source")
    part_surveys = surveys(parts, pairs, level, backend=backend)
    if options.bits is not None:
        return _compare_bits(mutants, part_surveys[0], options.bits, as_json=as_json)
    scores, records = _compute_scores(part_surveys, options)
    ok = all_killed and not any(score.survivors for score in scores)
    record = records[0] if options.only else {**call_record, "ok": ok, **_combine_records(records)}

    def print_text() -> None:
        for score in scores:
            _print_score(score)

    output.print_result(record, as_json, print_text)
    return ok


def run_call_mutations(pairs: Sequence[Pair], executor: Executor) -> "list[CallMutantResult]":
    """Run every mutation of inputs and outputs on every pairing, and return the outcomes.

    Prints a line for each pairing to stderr.
    """
    results: list[CallMutantResult] = []
    pairings = format_count(len(pairs), "pairing")
    output.print_note(f"mutating inputs and outputs of {pairings}")
    print_position = output.PositionPrinter("mutations")
    with output.show_steps(len(pairs), "pairings") as report:
        for number, pair in enumerate(pairs, 1):
            start = time.monotonic()
            name = f"pairing {number} of {len(pairs)}, {' x '.join(pair)}"
            pair_results = executor.run_input_mutations(*pair, partial(print_position, name))
            results += pair_results
            killed = sum(result.killed_by is not None for result in pair_results)
            count = format_count(len(pair_results), "input mutation")
            report(f"{name}: {count}, {killed} killed, {time.monotonic() - start:.0f} s")
    return results


def make_result_record(result: "CallMutantResult") -> dict[str, object]:
    """Return the JSON record of the outcome of an input or output mutation."""
    return {
        "mutant": result.mutant,
        "prepare_finalize": result.case.prepare_finalize,
        "experts": result.case.experts,
        "case": str(result.case),
        "ok": result.ok,
        "unsound": result.failure_without_mutant,
        "killed_by": result.killed_by,
        "changes_nothing": result.no_effect_reason,
    }


def print_call_results(results: Sequence["CallMutantResult"]) -> None:
    """Print a table of the mutations of each pairing, and a line for each surviving mutant."""
    groups: dict[Pair, list[CallMutantResult]] = {}
    for result in results:
        key = (result.mutant, f"{result.case.prepare_finalize} x {result.case.experts}")
        groups.setdefault(key, []).append(result)
    rows = [
        (*key, len(group), _format_killing_checks(group), _format_verdict(group))
        for key, group in groups.items()
    ]
    columns = ("input mutation", "pairing", "cases", "killed by", "verdict")
    pairings = {pairing for _, pairing in groups}
    if len(pairings) == 1:  # rows fit on a line without a column for its long name
        output.print_line(f"{pairings.pop()}:")
        output.print_table((columns[0], *columns[2:]), [(name, *cells) for name, _, *cells in rows])
    else:
        output.print_table(columns, rows)
    for result in results:
        if not result.ok or result.no_effect_reason:
            output.print_line(str(result))
    num_missed = sum(not result.ok for result in results)
    num_not_applicable = sum(
        result.ok and result.no_effect_reason is not None for result in results
    )
    num_killed = len(results) - num_missed - num_not_applicable
    not_applicable = f", {num_not_applicable} not applicable" if num_not_applicable else ""
    output.print_line(
        f"{format_count(len(results), 'input mutation')}: {num_killed} killed, {num_missed} missed"
        f"{not_applicable}"
    )


def _format_killing_checks(results: Sequence["CallMutantResult"]) -> str:
    names = [
        result.killed_by.partition(":")[0] for result in results if result.killed_by is not None
    ]
    return ", ".join(dict.fromkeys(names))


def _format_verdict(results: Sequence["CallMutantResult"]) -> str:
    if any(result.failure_without_mutant is not None for result in results):
        return "fails without the mutation"
    if not all(result.ok for result in results):
        return "MISSED"
    return "killed" if any(result.killed_by for result in results) else "not applicable"


def _select_mutants(options: MutationOptions) -> "list[Mutant]":
    """Return the mutants of --only, or [] without --only.

    Raises ConfigurationError for an unknown mutant.
    """
    from modular_kernel.catalog import load_catalog
    from modular_kernel.testing.mutation.score import find_mutant, list_mutants

    if options.mutate is None or options.only is None:
        return []
    part_mutants = list_mutants(options.mutate, load_catalog())
    accepts_several = options.code or options.bits is not None
    ids = options.only.split(",") if accepts_several else [options.only]
    return [find_mutant(part_mutants, options.mutate, ident) for ident in ids]


def _compute_scores(
    part_surveys: "Sequence[Survey]", options: MutationOptions
) -> "tuple[list[Score], list[dict[str, object]]]":
    """Compute the mutation score of each part, and save its record after each mutant."""
    from modular_kernel.testing.mutation import MutantOutcome, mutation_score
    from modular_kernel.testing.mutation.record import record_of, recorded_kills

    count, outcome_by_mutant = options.count(), dict[str, MutantOutcome]()
    scores = list["Score"]()
    for survey in part_surveys:
        total = 1 if options.only else min(count or len(survey.mutants), len(survey.executed()))
        previous = _load_record(options, survey.part)
        saved_kills = {} if previous is None else recorded_kills(previous, survey)
        output.print_note(f"running {format_count(total, 'mutant')} of {survey.part}")
        with output.show_steps(total, "mutants") as report:

            def report_progress(
                score: "Score", report: Callable[[str], None] = report, total: int = total
            ) -> None:
                report(_describe_outcome(score, total))
                _save_record(score, options.save)

            scores.append(
                mutation_score(
                    survey,
                    count=count,
                    seed=options.sample_seed,
                    ident=options.only,
                    known_outcomes=outcome_by_mutant,
                    recorded=saved_kills,
                    on_progress=report_progress,
                )
            )
    return scores, [record_of(score) for score in scores]


def _describe_outcome(score: "Score", total: int) -> str:
    """Describe the last outcome of a score of `total` mutants."""
    outcome = score.outcomes[-1]
    check = f" by {outcome.finding.partition(':')[0]}" if outcome.status == "killed" else ""
    number = f"mutant {len(score.outcomes)} of {total}, {outcome.mutant.ident}"
    return f"{number}: {outcome.status}{check}, {outcome.seconds:.0f} s"


def _save_record(score: "Score", folder: Path | None) -> None:
    """Write the record of a part atomically, so that --resume can continue an interrupted run."""
    from modular_kernel.testing.mutation.record import record_of

    if folder is None:
        return
    record = json.dumps(record_of(score), indent=1) + "\n"
    output.write_file(folder / f"{score.survey.part}.json", record)


def _load_record(options: MutationOptions, part: str) -> dict[str, Any] | None:
    """Return the saved record to resume from; None without --resume or if there is no record."""
    path = None if options.save is None else options.save / f"{part}.json"
    if not options.resume or path is None or not path.is_file():
        return None
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def _combine_records(records: list[dict[str, object]]) -> dict[str, object]:
    """Return a single record unchanged, and several as one record with the records by part."""
    if len(records) == 1:
        return records[0]
    return {"parts": {str(record["part"]): record for record in records}}


def _compare_bits(
    mutants: "list[Mutant]", survey: "Survey", problems: int, *, as_json: str | None
) -> bool:
    """Compare the output bits with and without the mutants, and print the result.

    The mutants are applied together. Returns whether no bit differs, in which case the mutants can
    be considered equivalent.
    """
    from modular_kernel.testing.cases.lists import command
    from modular_kernel.testing.mutation.bitwise_equivalence import compare_bits

    bits = compare_bits(mutants, survey.coverage, problems, backend=survey.backend)
    differing = command(bits.differing) if bits.differing else None

    def print_text() -> None:
        for mutant in mutants:
            output.print_line(mutant.diff())
        equal_problems = format_count(bits.problems, "problem")
        if differing:
            output.print_line(f"no bit differs in the first {equal_problems}")
            output.print_line(f"a bit differs in: {differing}")
        else:
            output.print_line(f"no bit differs in {equal_problems}")

    record = {"id": _join_ids(mutants), "problems": bits.problems, "differing": differing}
    output.print_result(record, as_json, print_text)
    return differing is None


def _join_ids(mutants: "list[Mutant]") -> str:
    return ",".join(mutant.ident for mutant in mutants)


def _compare_code(mutants: "list[Mutant]", *, as_json: str | None) -> bool:
    """Compare the compiled kernels with and without the mutants, and print the result.

    The mutants are applied together. Returns whether all compiled code is unchanged.
    """
    from modular_kernel.testing.mutation.code_equivalence import compare_code

    comparison = compare_code(mutants)

    def print_text() -> None:
        for mutant, reached in zip(mutants, comparison.reached, strict=True):
            output.print_line(
                f"{mutant.diff()}\nin {format_count(reached, 'compiled form')} of kernels"
            )
        verb = "is" if comparison.differing == 1 else "are"
        output.print_line(
            f"{format_count(comparison.differing, 'form')} {verb} compiled to different code"
        )

    record = {
        "id": _join_ids(mutants),
        "reached": comparison.reached,
        "differing": comparison.differing,
    }
    output.print_result(record, as_json, print_text)
    return comparison.proven


def _print_score(score: "Score") -> None:
    from modular_kernel.testing.mutation.record import count_killers, format_reproducer

    survey = score.survey
    for outcome in score.survivors:
        ran = format_count(outcome.num_cases, "case")
        cases = "no case executes it" if outcome.status == "not executed" else f"passed by {ran}"
        output.print_line(f"SURVIVED {outcome.mutant.edit.operator}: {cases}")
        output.print_line(f"{outcome.mutant.diff()}\n  {format_reproducer(outcome, survey)}\n")
    for outcome, equivalence in score.equivalent:
        bits = f"no bit differs in {equivalence.problems} problems"
        proof = (
            bits
            if equivalence.problems
            else f"same code in {format_count(equivalence.forms, 'form')}"
        )
        output.print_line(f"equivalent {outcome.mutant.ident}, {proof}: {equivalence.reason}")
    rows = count_killers(score.killed).items()
    output.print_table(("killed by", "mutants"), rows)
    output.print_table(("excluded, because", "mutants"), score.undetectable.items())
    output.print_table(("no case executes", "mutants"), score.not_executed.items())
    output.print_line(
        f"{survey.part}: {len(score.outcomes)} of {score.executed} mutants run (seed "
        f"{score.seed}): {len(score.killed)} killed, {len(score.survivors)} survived, "
        f"{len(score.equivalent)} equivalent: score {score.kill_rate:.1%}"
    )
