"""`mk test`: verifies pairings against a float64 reference.

A case is a problem with a routing, inputs and memory layouts. `modular_kernel.testing` selects the
cases of a pairing and runs them. This module groups them into jobs, one for each pairing, and
prints the results.
"""

import difflib
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal

from click.exceptions import Exit

from modular_kernel.cli import output
from modular_kernel.cli.command import IntegerRange, option
from modular_kernel.cli.engine import EngineOptions, judge_engine
from modular_kernel.cli.machine_setup import check_torch_only, limit_workers, prepare_host
from modular_kernel.cli.mutate import MutationOptions, run_mutation
from modular_kernel.cli.options import (
    AsJson,
    ExpertsType,
    PfType,
    ProblemOptions,
    refuse_combination,
)
from modular_kernel.cli.ranks import (
    Backend,
    Executor,
    apply_launcher,
    make_rank_case,
    open_executor,
)
from modular_kernel.cli.refusals import make_refusal
from modular_kernel.errors import ConfigurationError
from modular_kernel.text import format_count

if TYPE_CHECKING:
    from modular_kernel.compatibility.support import Verdict
    from modular_kernel.testing.cases.case import Case
    from modular_kernel.testing.cases.path_coverage import PathCombination
    from modular_kernel.testing.verify.one_process import Proof

# Rules about the sizes, the dtype and the scheme of a case.
_CASE_RULES = frozenset(
    {"dtype", "hidden", "intermediate", "top_k", "quant", "quant_block", "packing", "blocks"}
    | {"min_tokens", "max_experts", "addressing", "capacity", "capacity_multiple"}
)


@dataclass(frozen=True, kw_only=True)
class SingleCaseOptions:
    """Options that describe a single case, in addition to the options of its problem."""

    one: Annotated[
        bool, option("Verify one case: a pairing on the problem that the options describe.")
    ] = False
    routing: Annotated[str, option("With --one: routing pattern.")] = "uniform"
    seed: Annotated[int, option("With --one: seed of the inputs.")] = 0
    layout: Annotated[str, option("With --one: memory layout of the tensors.")] = "plain"
    values: Annotated[str, option("With --one: kind of values in x and in the router weights.")] = (
        "ordinary"
    )
    named: Annotated[
        str,
        option(
            "With --one and --lora: which adapters the tokens use: mixed, sequences, nobody or "
            "without."
        ),
    ] = "mixed"
    nan: Annotated[str, option("With --one: arguments that contain a NaN, such as x+w1_scale.")] = (
        ""
    )
    own_scales: Annotated[bool, option("With --one: weight scales are 16-bit.")] = False
    by_turns: Annotated[bool, option("With --one: alternate with calls of a second kernel.")] = (
        False
    )
    rank_tokens: Annotated[
        str | None, option("With --one and --world-size: tokens of each rank, such as 7,0.")
    ] = None
    fault: Annotated[str, option("With --one and --world-size: fault scenario of the ranks.")] = ""
    unchecked: Annotated[
        bool,
        option(
            "With --one and --world-size: only the first call of each layer has a handshake on the "
            "host."
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(EngineOptions):
    """Options that select and run cases."""

    level: Annotated[
        Literal["smoke", "full"] | None,
        option("Run few cases (smoke) or all (full).  [default: smoke; with --mutate: full]"),
    ] = None
    path: Annotated[
        str | None,
        option(
            "With --experts-type: run only the cases whose calls enter this code path of the part, "
            "such as gemv."
        ),
    ] = None
    torch_only: Annotated[bool, option("On a CPU: verify only parts that do not use Triton.")] = (
        False
    )
    workers: Annotated[
        int | None,
        option(
            "Number of worker processes.  [default: one per CPU if --level is full and there is no "
            "GPU, else 1]",
            type=IntegerRange(1),
        ),
    ] = None
    backend: Backend = None


@dataclass(frozen=True)
class VerifyJob:
    """The cases of one pairing.

    skipped: number of other cases, which the compatibility rules refuse.
    skipped_by_rule: for each rule, the number of skipped cases that violate it.
    omitted: description of what the cases do not cover; unused if `covered_pairs` is positive.
    covered_pairs: number of pairs of axis values that occur together in some case, if the cases are
        a pairwise selection.
    impossible_pairs: number of pairs of axis values that no valid case can have.
    reachable: the (code path, scheme, value of one property) combinations that calls of the pairing
        can enter (see testing.cases.path_coverage). Empty for experts with a single path, and for
        cases over ranks.
    requires_all_combinations: whether the cases must enter all reachable combinations.
    """

    prepare_finalize: str
    experts: str
    cases: "tuple[Case, ...]"
    skipped: int
    omitted: str
    covered_pairs: int = 0
    impossible_pairs: int = 0
    reachable: "frozenset[PathCombination]" = frozenset()
    requires_all_combinations: bool = False
    skipped_by_rule: Mapping[str, int] = field(default_factory=dict)

    @property
    def coverage(self) -> str:
        """Description of the coverage of the cases."""
        if self.covered_pairs:
            covered = f"{self.covered_pairs} pairs of axis values covered"
            return f"pairwise coverage: {covered}, {self.impossible_pairs} impossible"
        schemes = dict.fromkeys(case.problem.scheme.name for case in self.cases)
        return f"schemes {', '.join(schemes)}; {self.omitted}"


@dataclass(frozen=True)
class JobResult:
    """A job with the results of its cases, which are called proofs."""

    job: VerifyJob
    proofs: "tuple[Proof, ...]"

    @property
    def failed(self) -> "list[Proof]":
        return [proof for proof in self.proofs if not proof.passed]

    @cached_property
    def missed_combinations(self) -> "list[PathCombination]":
        """Reachable (path, scheme, value) combinations that no case entered."""
        entered = (proof.path_combinations for proof in self.proofs)
        return sorted(self.job.reachable.difference(*entered))

    @property
    def ok(self) -> bool:
        return not self.failed and not (
            self.job.requires_all_combinations and self.missed_combinations
        )

    @property
    def paths(self) -> str:
        """For each code path, the number of its schemes and combinations that were entered."""
        return "; ".join(
            self._format_path(path) for path in sorted({c.path for c in self.job.reachable})
        )

    def _format_path(self, path: str) -> str:
        combinations = {
            combination for combination in self.job.reachable if combination.path == path
        }
        missed = combinations.intersection(self.missed_combinations)
        schemes = {combination.scheme for combination in combinations}
        missed_schemes = sorted(
            schemes - {combination.scheme for combination in combinations - missed}
        )
        summary = (
            f"{path}: {len(schemes) - len(missed_schemes)} of "
            f"{format_count(len(schemes), 'scheme')}"
        )
        num_entered = len(combinations) - len(missed)
        summary += f", {num_entered} of {format_count(len(combinations), 'combination')}"
        return (
            f"{summary}, never {', '.join(missed_schemes)}"
            if missed_schemes and self.job.requires_all_combinations
            else summary
        )

    @property
    def worst(self) -> "Proof | None":
        """The result with the largest ratio of error to bound."""
        return max(self.proofs, key=_compute_error_ratio, default=None)


def verify(
    *,
    single_case: SingleCaseOptions,
    options: ProblemOptions,
    execution: VerifyOptions,
    mutation: MutationOptions,
    pf_type: PfType = None,
    experts_type: ExpertsType = None,
    as_json: AsJson = None,
) -> None:
    """Verify pairings against a float64 reference, with adversarial inputs and memory layouts.

    Without --pf-type and --experts-type, verifies every pairing that can run on this machine. On a
    CPU, Triton kernels run in Triton's interpreter. --torch-only skips parts that use Triton.

    --world-size N verifies every pairing that is valid over N ranks, with one GPU per rank or with
    CPU processes. --ranks-per-host M simulates hosts of M ranks each.

    --mutate PART tests the verification itself: a defect in the part must make a case fail. First,
    the inputs and outputs of the part are corrupted. Then the source of the part, its kernels and
    its operations is mutated, one place at a time, and cases run until one fails. --mutants 0 skips
    the source mutations, and takes minutes instead of hours. With --pf-type and --experts-type,
    only the cases of this pairing run. For a part over ranks, add --world-size 2.

    --engine vllm or sglang judges the experts classes of the installed vLLM or SGLang instead of
    our parts, each against the reference of the quantization scheme that it computes.
    --experts-type names one of them (see mk list --engine), --model gives the sizes of a model, and
    --quant selects one scheme.

    Exits with 1 if a check fails, a mutant survives, or the pairing is refused.
    """
    if execution.engine is not None:
        _check_engine_options(options, single_case, execution, mutation, pf_type)
        arguments = experts_type, execution.level or "smoke", execution.workers, as_json
        raise Exit(0 if judge_engine(execution, options, *arguments) else 1)
    one_case_options = replace(options, world_size=None, ranks_per_host=None), single_case
    if not single_case.one and one_case_options != (ProblemOptions(), SingleCaseOptions()):
        need = "--one in addition; without it the cases define their own problems"
        raise ConfigurationError("options of a problem or a case", got="no --one", need=need)
    options = apply_launcher(options)
    mutation.check(single_case=single_case.one)
    has_no_case_list = (
        single_case.one or mutation.mutate is not None or options.world_size is not None
    )
    if has_no_case_list and execution.workers is not None:
        need = "no --one, --mutate or --world-size"
        raise ConfigurationError("--workers", got=execution.workers, need=need)
    level = execution.level or ("full" if mutation.mutate else "smoke")
    if execution.torch_only:
        if options.world_size is not None:
            raise ConfigurationError("--torch-only", got="--world-size", need="a single rank")
        check_torch_only()
    else:
        prepare_host()
    _check_path(execution, experts_type, has_no_case_list=has_no_case_list)
    with open_executor(options.world_size, execution.backend, options.ranks_per_host) as executor:
        if mutation.mutate is not None:
            pairs = _select_pairings(executor, pf_type, experts_type, level)
            if not run_mutation(mutation, pairs, executor, level, as_json=as_json):
                raise Exit(1)
            return
        if single_case.one:
            jobs = [_make_single_case_job(options, single_case, pf_type, experts_type)]
        else:
            jobs = _make_jobs(executor, pf_type, experts_type, level, execution.path)
        ok = _verify(jobs, executor, _count_workers(execution, executor, level), as_json=as_json)
    if not ok:
        raise Exit(1)


def _check_path(
    execution: VerifyOptions, experts_type: str | None, *, has_no_case_list: bool
) -> None:
    """Raise ConfigurationError if --path is set but is not a code path, or does not apply.

    has_no_case_list: whether there is a single case, a mutation run, or several ranks.
    """
    path = execution.path
    if path is None:
        return
    from modular_kernel.catalog import load_catalog

    catalog = load_catalog()
    parts = catalog.names("experts") if experts_type is None else (experts_type,)
    parts_by_path: dict[str, list[str]] = {}
    for part in parts:
        for info in catalog.experts(part).paths():
            parts_by_path.setdefault(info.name, []).append(part)
    if path not in parts_by_path:
        need = f"one of {', '.join(parts_by_path)}"
        if nearest := difflib.get_close_matches(path, parts_by_path, n=1, cutoff=0.4):
            need += f" (did you mean {nearest[0]}?)"
        if not parts_by_path:
            need = f"no --path: {experts_type} has a single code path"
        raise ConfigurationError("--path", got=path, need=need)
    if has_no_case_list:
        need = "no --one, --mutate or --world-size"
        raise ConfigurationError("--path", got=path, need=need)
    if experts_type is None:
        need = f"--experts-type {' or '.join(parts_by_path[path])} in addition"
        raise ConfigurationError("--path", got=path, need=need)


def _check_engine_options(
    options: ProblemOptions,
    single_case: SingleCaseOptions,
    execution: VerifyOptions,
    mutation: MutationOptions,
    pf_type: str | None,
) -> None:
    """Raise ConfigurationError for options that do not apply to the classes of an engine."""
    if pf_type is not None:
        raise ConfigurationError(
            "--pf-type", got="--pf-type together with --engine", need="only one of them"
        )
    refuse_combination("--engine", (options,), allowed=("model", "quant"))
    refuse_combination("--engine", (single_case, mutation))
    allowed = {field.name for field in fields(EngineOptions)} | {"level", "workers"}
    refuse_combination("--engine", (execution,), allowed=allowed)


def _make_single_case_job(
    options: ProblemOptions, single_case: SingleCaseOptions, pf: str | None, experts: str | None
) -> VerifyJob:
    from modular_kernel.testing.cases.case import Case
    from modular_kernel.testing.cases.inputs import ORDINARY, ROUTING_KINDS, InputVariation

    if pf is None or experts is None:
        raise ConfigurationError("--one", got="no pairing", need="--pf-type and --experts-type")
    if single_case.routing not in ROUTING_KINDS:
        need = f"one of {', '.join(ROUTING_KINDS)}"
        raise ConfigurationError("--routing", got=repr(single_case.routing), need=need)
    variation = InputVariation(
        single_case.layout,
        single_case.values,
        single_case.own_scales,
        single_case.named,
        single_case.nan,
    )
    problem, interleaved = options.problem(), single_case.by_turns
    case = Case(pf, experts, problem, single_case.routing, single_case.seed, variation, interleaved)
    if (options.world_size or 1) > 1:
        if (
            replace(variation, values=ORDINARY.values, slot_pattern=ORDINARY.slot_pattern, nan="")
            != ORDINARY
            or interleaved
        ):
            need = "ordinary inputs with --world-size"
            raise ConfigurationError("--one", got=str(variation), need=need)
        rank_case = make_rank_case(case, single_case.rank_tokens, single_case.fault)
        case = replace(rank_case, checked=not single_case.unchecked)
    elif single_case.rank_tokens is not None or single_case.fault or single_case.unchecked:
        names, need = "--rank-tokens, --fault, --unchecked", "--world-size N in addition"
        raise ConfigurationError(names, got="a single rank", need=need)
    return VerifyJob(pf, experts, (case,), 0, "one case")


def _make_jobs(
    executor: Executor,
    pf: str | None,
    experts: str | None,
    level: Literal["smoke", "full"],
    path: str | None = None,
) -> list[VerifyJob]:
    """Return a job for each pairing of these parts that has a valid case.

    pf, experts: names of parts; None stands for all.
    path: only cases that enter this code path; None stands for all.

    Raises IncompatibleError if no pairing has a case.
    """
    from modular_kernel.catalog import load_catalog

    catalog = load_catalog()
    pfs = [pf] if pf is not None else catalog.names("prepare_finalize")
    all_experts = [experts] if experts is not None else catalog.names("experts")
    jobs: list[VerifyJob] = []
    refused_pairings: list[Verdict] = []
    for pf_name in pfs:
        for experts_name in all_experts:
            selection = executor.select_cases(pf_name, experts_name, level)
            verdicts = [verdict for _, verdict in selection.refused]
            if not selection.cases and verdicts:
                refused_pairings.append(_select_common_rejections(verdicts))
            if selection.cases:
                # A RankSelection has neither field, because its cases are not selected pairwise.
                covered_pairs = getattr(selection, "num_covered", 0)
                impossible_pairs = len(getattr(selection, "impossible", ()))
                pair, omitted = (pf_name, experts_name), _describe_omitted(executor, level)
                combinations = _find_reachable_combinations(executor, *pair)
                job = VerifyJob(
                    *pair,
                    selection.cases,
                    len(verdicts),
                    omitted,
                    covered_pairs,
                    impossible_pairs,
                    combinations,
                    requires_all_combinations=level == "full",
                    skipped_by_rule=_count_rules(verdicts),
                )
                jobs.append(job)
    if not jobs and refused_pairings:
        subject = f"every pairing with {pf or experts}" if pf or experts else "every pairing"
        raise make_refusal(subject, refused_pairings)
    return jobs if path is None else _select_path(jobs, path)


def _select_common_rejections(verdicts: "Sequence[Verdict]") -> "Verdict":
    """Return the verdict of a pairing whose cases are all refused.

    It has the rejections by the rules that every case violates, without those about the sizes and
    the dtype of a case, which the user did not choose. If there are none, it is the verdict with
    the fewest rejections.
    """
    common = set.intersection(*({r.rule for r in verdict.rejections} for verdict in verdicts))
    fewest = min(verdicts, key=lambda verdict: len(verdict.rejections))
    rejections = tuple(r for r in fewest.rejections if r.rule in common - _CASE_RULES)
    return replace(fewest, rejections=rejections or fewest.rejections)


def _count_rules(verdicts: "Iterable[Verdict]") -> dict[str, int]:
    """Return the number of verdicts in which each rule is violated."""
    rules = (rule for v in verdicts for rule in {r.rule for r in v.rejections})
    return dict(Counter(rules).most_common())


def _select_path(jobs: Sequence[VerifyJob], path: str) -> list[VerifyJob]:
    """Return the jobs with only those cases whose calls enter a code path.

    Raises ConfigurationError if no call of the pairings can enter it.
    """
    from modular_kernel.testing.cases.path_coverage import predict_combinations

    paths = sorted({combination.path for job in jobs for combination in job.reachable})
    if path not in paths:
        names = f"one of {', '.join(paths)}, which calls on this machine can enter"
        need = names if paths else "a part with several code paths"
        raise ConfigurationError("--path", got=path, need=need)
    selected_jobs = []
    for job in jobs:
        cases = tuple(
            case
            for case in job.cases
            if any(combination.path == path for combination in predict_combinations(case))
        )
        reachable = frozenset(
            combination for combination in job.reachable if combination.path == path
        )
        omitted = f"only cases that enter {path}"
        job = replace(job, cases=cases, reachable=reachable, omitted=omitted, covered_pairs=0)
        if cases or (reachable and job.requires_all_combinations):
            selected_jobs.append(job)
    return selected_jobs


def _find_reachable_combinations(
    executor: Executor, pf: str, experts: str
) -> "frozenset[PathCombination]":
    """Return the (path, scheme, value) combinations that calls in a single process can enter."""
    from modular_kernel.testing.cases.path_coverage import reachable_combinations

    return (
        frozenset()
        if executor.pool is not None
        else frozenset(reachable_combinations(pf, experts, executor.machine))
    )


def _describe_omitted(executor: Executor, level: str) -> str:
    if executor.pool is None:
        return "no pairwise coverage (see --level full)"
    description = "hand-picked cases without pairwise coverage"
    return description if level == "full" else f"{description}; --level full has more"


def _select_pairings(
    executor: Executor, pf: str | None, experts: str | None, level: Literal["smoke", "full"]
) -> list[tuple[str, str]]:
    """Return the pairings of these parts that have a case; [] if neither part is named."""
    if pf is None and experts is None:
        return []
    jobs = _make_jobs(executor, pf, experts, level)
    return [(job.prepare_finalize, job.experts) for job in jobs]


def _count_workers(
    execution: VerifyOptions, executor: Executor, level: Literal["smoke", "full"]
) -> int:
    """Return the number of worker processes, which is 1 for cases over ranks or on a GPU."""
    if execution.workers is not None:
        return limit_workers(execution.workers)
    if level == "smoke" or executor.pool is not None or executor.machine.device != "cpu":
        return 1
    return len(os.sched_getaffinity(0))


def _verify(
    jobs: Sequence[VerifyJob], executor: Executor, workers: int, *, as_json: str | None
) -> bool:
    """Verify all cases, print the results, and return whether all passed."""
    results, case_number = list[JobResult](), [1]
    cases = [case for job in jobs for case in job.cases]
    closing_proofs = closing(executor.verify_cases(cases, min(workers, max(1, len(cases)))))
    # Without a progress bar, print which case runs, because a case with a large problem may take
    # minutes.
    status = output.show_activity(lambda: f"case {case_number[0]} of {len(cases)}")
    with (
        closing_proofs as proof_iterator,
        nullcontext() if sys.stderr.isatty() else status,
        output.show_progress(len(cases), "cases") as advance,
    ):
        for job in jobs:
            proofs = []
            for case in job.cases:
                proofs.append(proof := next(proof_iterator))
                if not proof.passed:  # printed at once, in case the run is interrupted
                    output.print_note(f"failed: {case}")
                case_number[0] += 1
                advance()
            results.append(JobResult(job, tuple(proofs)))
    ok = bool(results) and all(result.ok for result in results)
    record = {
        "ok": ok,
        **executor.record_fields,
        "pairs": [_make_record(result) for result in results],
    }
    output.print_result(record, as_json, lambda: _print_text(results))
    return ok


def _compute_error_ratio(proof: "Proof") -> float:
    """Return error / bound, which is at most 1 for a case that passed."""
    if proof.error == 0:
        return 0.0
    return proof.error / proof.bound if proof.bound else float("inf")


def _make_record(result: JobResult) -> dict[str, object]:
    from modular_kernel.testing.cases.case import command

    worst = result.worst
    failures = [
        {"case": str(proof.case), "failures": proof.failures, "command": command(proof.case)}
        for proof in result.failed
    ]
    return {
        "prepare_finalize": result.job.prepare_finalize,
        "experts": result.job.experts,
        "cases": len(result.proofs),
        "skipped": result.job.skipped,
        "skipped_by_rule": result.job.skipped_by_rule,
        "covers": result.job.coverage,
        "paths": {
            "reachable": len(result.job.reachable),
            "not_entered": [str(combination) for combination in result.missed_combinations],
        },
        "failed": len(failures),
        "seconds": sum(proof.seconds for proof in result.proofs),
        "worst": worst and {"case": str(worst.case), "error": worst.error, "bound": worst.bound},
        "failures": failures,
    }


def _print_text(results: Sequence[JobResult]) -> None:
    columns = ("pairing", "cases", "failed", "skipped", "error", "bound", "s")
    rows = [_format_row(result) for result in results]
    output.print_table(columns, rows, optional=("s", "bound", "error", "skipped"))
    for result in results:
        job, missed = result.job, result.missed_combinations
        if len(job.cases) > 1 or (job.requires_all_combinations and missed):
            output.print_line(f"{job.prepare_finalize} x {job.experts}: {job.coverage}")
            if job.reachable:
                output.print_line(f"paths entered: {result.paths}")
            for combination in missed if job.requires_all_combinations else ():
                output.print_line(f"failed: no case covers {combination}")
        for proof in result.failed:
            output.print_line(f"{proof}\n")
    count = sum(len(result.proofs) for result in results)
    failed = sum(len(result.failed) for result in results)
    cases, pairings = format_count(count, "case"), format_count(len(results), "pairing")
    if skipped := _describe_skipped([result.job for result in results]):
        output.print_line(skipped)
    output.print_line(f"{cases} of {pairings}: {count - failed} passed, {failed} failed")


def _describe_skipped(jobs: Sequence[VerifyJob]) -> str:
    """Describe how many cases were skipped, and because of which rules; "" if there are none."""
    count = sum(job.skipped for job in jobs)
    if not count:
        return ""
    counts = Counter[str]()
    for job in jobs:
        counts.update(job.skipped_by_rule)
    rules = ", ".join(f"{rule} {number}" for rule, number in counts.most_common())
    subject = "the parts do not declare " + ("it" if count == 1 else "them")
    return (
        f"{format_count(count, 'case')} skipped: {subject} (by rule: {rules}). To run "
        f"{'it' if count == 1 else 'them'}, declare support in `requires` of the part"
    )


def _format_row(result: JobResult) -> tuple[object, ...]:
    """Format a table row. Its error and bound are from the worst case, if there is a case."""
    worst = result.worst
    return (
        f"{result.job.prepare_finalize} x {result.job.experts}",
        len(result.proofs),
        len(result.failed),
        result.job.skipped,
        f"{worst.error:.2e}" if worst else "",
        f"{worst.bound:.2e}" if worst else "",
        f"{sum(proof.seconds for proof in result.proofs):.1f}",
    )
