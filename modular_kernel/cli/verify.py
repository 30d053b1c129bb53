"""`mk test`: verify one pairing, every pairing, or one case; and the verification itself."""

import os
import sys
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from modular_kernel.cli import output
from modular_kernel.cli.machine_setup import prepare_host, prepare_torch_only, workers_of
from modular_kernel.cli.mutate import Mutating, run_mutation
from modular_kernel.cli.options import AsJson, ExpertsType, PfType, ProblemOptions
from modular_kernel.cli.ranks import Backend, Host, host_of, launched, over_ranks
from modular_kernel.errors import ConfigurationError, IncompatibleError
from modular_kernel.text import counted

if TYPE_CHECKING:
    from modular_kernel.testing.cases.case import Case
    from modular_kernel.testing.cases.path_coverage import PathCell
    from modular_kernel.testing.verify.one_process import Proof


@dataclass(frozen=True, kw_only=True)
class OneCase:
    """Options that replay a single case, beside the problem's."""

    one: Annotated[
        bool, typer.Option("--one", help="Verify one case: the pair, the problem options below.")
    ] = False
    routing: Annotated[str, typer.Option(help="With --one: the kind of routing.")] = "uniform"
    seed: Annotated[int, typer.Option(help="With --one: the seed of the inputs.")] = 0
    layout: Annotated[str, typer.Option(help="With --one: how tensors lie in memory.")] = "plain"
    values: Annotated[str, typer.Option(help="With --one: what x and routing hold.")] = "ordinary"
    named: Annotated[
        str, typer.Option(help="With --one and --lora: mixed, sequences, nobody or without.")
    ] = "mixed"
    nan: Annotated[
        str,
        typer.Option(
            help="With --one: arguments that hold a NaN, such as x+w1_scale.", show_default=False
        ),
    ] = ""
    own_scales: Annotated[
        bool, typer.Option("--own-scales", help="With --one: scales in 16 bits.")
    ] = False
    by_turns: Annotated[
        bool, typer.Option("--by-turns", help="With --one: a second kernel between the calls.")
    ] = False
    rank_tokens: Annotated[
        str | None,
        typer.Option(
            help="With --one and --world-size: tokens of each rank, such as 7,0.",
            show_default=False,
        ),
    ] = None
    fault: Annotated[
        str, typer.Option(help="With --one and --world-size: the scene that ranks play beside.")
    ] = ""


@dataclass(frozen=True, kw_only=True)
class VerifyManner:
    """How cases are chosen and run."""

    level: Annotated[
        str | None,
        typer.Option(help="smoke: some cases; full: all.  [default: smoke; --mutate: full]"),
    ] = None
    torch_only: Annotated[
        bool,
        typer.Option("--torch-only", help="On a CPU: plain torch, without Triton's interpreter."),
    ] = False
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes that share the cases.  [default: --level full on a CPU: one a "
            "processor; else 1]",
            show_default=False,
        ),
    ] = None
    backend: Backend = None


@dataclass(frozen=True)
class VerifyJob:
    """The cases of one pairing, and how many more the rules refuse.

    rest: what the cases leave out, where none were drawn by pairs of values. reachable: cells of
    the experts' paths that the cases should enter; none of experts with one path, or over ranks.
    whole: whether they should enter all.
    """

    prepare_finalize: str
    experts: str
    cases: "tuple[Case, ...]"
    refused: int
    rest: str
    met: int = 0
    impossible: int = 0
    reachable: "frozenset[PathCell]" = frozenset()
    whole: bool = False

    @property
    def covers(self) -> str:
        """What the cases cover, and what they do not."""
        if self.met:
            return f"{self.met} pairs of values of two axes met, {self.impossible} impossible"
        schemes = dict.fromkeys(case.problem.scheme.name for case in self.cases)
        return f"schemes {', '.join(schemes)}; {self.rest}"


@dataclass(frozen=True)
class CaseResult:
    """A job done."""

    job: VerifyJob
    proofs: "tuple[Proof, ...]"

    @property
    def failed(self) -> "list[Proof]":
        return [proof for proof in self.proofs if not proof.passed]

    @cached_property
    def empty(self) -> "list[PathCell]":
        """Cells that a call can enter and no case did."""
        entered = (proof.cells for proof in self.proofs)
        return sorted(self.job.reachable.difference(*entered))

    @property
    def ok(self) -> bool:
        return not self.failed and not (self.job.whole and self.empty)

    @property
    def paths(self) -> str:
        """Say which schemes each path was entered with, and which it was not."""
        return "; ".join(self._path(path) for path in sorted({c.path for c in self.job.reachable}))

    def _path(self, path: str) -> str:
        of_path = {cell for cell in self.job.reachable if cell.path == path}
        left = of_path.intersection(self.empty)
        schemes = {cell.scheme for cell in of_path}
        lost = sorted(schemes - {cell.scheme for cell in of_path - left})
        said = f"{path}: {len(schemes) - len(lost)} of {counted(len(schemes), 'scheme')}"
        said += f", {len(of_path) - len(left)} of {counted(len(of_path), 'cell')}"
        return f"{said}, never {', '.join(lost)}" if lost and self.job.whole else said

    @property
    def worst(self) -> "Proof | None":
        """The proof whose error is nearest to its bound, or furthest beyond."""
        return max(self.proofs, key=_share, default=None)


def verify(
    *,
    replay: OneCase,
    options: ProblemOptions,
    manner: VerifyManner,
    mutating: Mutating,
    pf_type: PfType = None,
    experts_type: ExpertsType = None,
    as_json: AsJson = None,
) -> None:
    """Verify that pairs are right: against a float64 oracle, on hostile inputs and memory.

    --world-size N verifies, over N ranks, every pair that is valid for so many: one GPU a rank, or
    processes on the CPU. With --ranks-per-host M each M of them take themselves for a host.

    --mutate PART measures the proof itself. Defects are put into what goes into and comes out of
    the part; then the source of the part, its kernels and operations is changed, one place at a
    time, and the cases run until one fails. --mutants 0 leaves the source alone: minutes, not
    hours. Name a pair to run its cases alone; for a part over ranks, --world-size 2.

    On a CPU Triton kernels are interpreted, and operations run as kernels. --torch-only verifies
    the torch operations instead that run there without the interpreter.

    Exits with 1 if a check fails, a defect is not noticed, or the pair named is refused.
    """
    alone = replace(options, world_size=None, ranks_per_host=None), replay
    if not replay.one and alone != (ProblemOptions(), OneCase()):
        need = "--one beside them: otherwise the cases choose their own problems"
        raise ConfigurationError("problem, routing or seed options", got="no --one", need=need)
    options = launched(options)
    mutating.check(beside=replay.one)
    unshared = replay.one or mutating.mutate is not None or options.world_size is not None
    if manner.workers is not None and (manner.workers < 1 or unshared):
        need = "1 or more, without --one, --mutate and --world-size"
        raise ConfigurationError("--workers", got=manner.workers, need=need)
    level = _level(manner.level or ("full" if mutating.mutate else "smoke"))
    if manner.torch_only:
        if options.world_size is not None:
            raise ConfigurationError("--torch-only", got="--world-size", need="one rank")
        prepare_torch_only()
    else:
        prepare_host()
    with host_of(options.world_size, manner.backend, options.ranks_per_host) as host:
        if mutating.mutate is not None:
            pairs = _named_pairs(host, pf_type, experts_type, level)
            if not run_mutation(mutating, pairs, host, level, as_json=as_json):
                raise typer.Exit(1)
            return
        if replay.one:
            jobs = [_single_case(options, replay, pf_type, experts_type)]
        else:
            jobs = _jobs(host, pf_type, experts_type, level)
        ok = _verify(jobs, host, _workers(manner, host, level), as_json=as_json)
    if not ok:
        raise typer.Exit(1)


def _level(text: str) -> Literal["smoke", "full"]:
    if text == "smoke":
        return "smoke"
    if text == "full":
        return "full"
    raise ConfigurationError("--level", got=repr(text), need="smoke or full")


def _single_case(
    options: ProblemOptions, replay: OneCase, pf: str | None, experts: str | None
) -> VerifyJob:
    from modular_kernel.testing.cases.case import Case
    from modular_kernel.testing.cases.inputs import ORDINARY, ROUTINGS, Manner

    if pf is None or experts is None:
        raise ConfigurationError("--one", got="no pair", need="--pf-type and --experts-type")
    if replay.routing not in ROUTINGS:
        need = f"one of {', '.join(ROUTINGS)}"
        raise ConfigurationError("--routing", got=repr(replay.routing), need=need)
    manner = Manner(replay.layout, replay.values, replay.own_scales, replay.named, replay.nan)
    problem, turns = options.problem(), replay.by_turns
    case = Case(pf, experts, problem, replay.routing, replay.seed, manner, turns)
    if (options.world_size or 1) > 1:
        if (
            replace(manner, values=ORDINARY.values, named=ORDINARY.named, nan="") != ORDINARY
            or turns
        ):
            need = "the ordinary layout and scales: --world-size"
            raise ConfigurationError("--one", got=str(manner), need=need)
        case = over_ranks(case, replay.rank_tokens, replay.fault)
    elif replay.rank_tokens is not None or replay.fault:
        need = "--world-size beside them"
        raise ConfigurationError("--rank-tokens, --fault", got="one rank", need=need)
    return VerifyJob(pf, experts, (case,), 0, "one case")


def _jobs(
    host: Host, pf: str | None, experts: str | None, level: Literal["smoke", "full"]
) -> list[VerifyJob]:
    """List a job for each pair that the names leave and that has a case.

    A named pair must have one.
    """
    from modular_kernel.catalog import load_catalog

    catalog = load_catalog()
    pfs = [pf] if pf is not None else catalog.names("prepare_finalize")
    all_experts = [experts] if experts is not None else catalog.names("experts")
    jobs = []
    for pf_name in pfs:
        for experts_name in all_experts:
            selection = host.cases(pf_name, experts_name, level)
            if pf is not None and experts is not None and not selection.cases:
                verdict = selection.refused[0][1]
                raise IncompatibleError(verdict.pairing, verdict.rejections)
            if selection.cases:
                refused = len(selection.refused)
                met = getattr(selection, "met", 0)  # over ranks nothing is drawn by pairs
                impossible = len(getattr(selection, "impossible", ()))
                pair, rest = (pf_name, experts_name), _rest(host, level)
                cells = _reachable(host, *pair)
                job = VerifyJob(*pair, selection.cases, refused, rest, met, impossible, cells)
                jobs.append(replace(job, whole=level == "full"))
    return jobs


def _reachable(host: Host, pf: str, experts: str) -> "frozenset[PathCell]":
    """Return the cells of the experts' paths that a call in one process can enter."""
    from modular_kernel.testing.cases.path_coverage import reachable

    return frozenset() if host.pool is not None else frozenset(reachable(pf, experts, host.machine))


def _rest(host: Host, level: str) -> str:
    """Say what the listed cases of this level leave out, and where there are more."""
    if host.pool is None:
        return "not every two values of two axes: --level full"
    chosen = "chosen cases, not every two values of two axes"
    return chosen if level == "full" else f"{chosen}; more of them: --level full"


def _named_pairs(
    host: Host, pf: str | None, experts: str | None, level: Literal["smoke", "full"]
) -> list[tuple[str, str]]:
    """Pairs that the options leave; none if there are no options."""
    if pf is None and experts is None:
        return []
    jobs = _jobs(host, pf, experts, level)
    return [(job.prepare_finalize, job.experts) for job in jobs]


def _workers(manner: VerifyManner, host: Host, level: Literal["smoke", "full"]) -> int:
    """Return how many processes share the cases. Ranks, and calls on a GPU, take turns."""
    if manner.workers is not None:
        return workers_of(manner.workers)
    if level == "smoke" or host.pool is not None or host.machine.device != "cpu":
        return 1
    return len(os.sched_getaffinity(0))


def _verify(jobs: Sequence[VerifyJob], host: Host, workers: int, *, as_json: str | None) -> bool:
    results, begun = list[CaseResult](), [1]
    cases = [case for job in jobs for case in job.cases]
    every = closing(host.prove_all(cases, min(workers, max(1, len(cases)))))
    # Without a bar, which moves by itself: a case of a model's size may take minutes.
    said = output.waiting(lambda: f"case {begun[0]} of {len(cases)}")
    with (
        every as proven,
        nullcontext() if sys.stderr.isatty() else said,
        output.progress(len(cases), "cases") as step,
    ):
        for job in jobs:
            proofs = []
            for case in job.cases:
                proofs.append(proof := next(proven))
                if not proof.passed:  # at once: a run that is cut off has told what it found
                    output.note(f"failed: {case}")
                begun[0] += 1
                step()
            results.append(CaseResult(job, tuple(proofs)))
    ok = bool(results) and all(result.ok for result in results)
    record = {"ok": ok, **host.facts, "pairs": [_record(result) for result in results]}
    output.answer(record, as_json, lambda: _print_text(results))
    return ok


def _share(proof: "Proof") -> float:
    """Error over bound: at most 1 if it is small enough."""
    if proof.error == 0:
        return 0.0
    return proof.error / proof.bound if proof.bound else float("inf")


def _record(result: CaseResult) -> dict[str, object]:
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
        "refused": result.job.refused,
        "covers": result.job.covers,
        "paths": {
            "reachable": len(result.job.reachable),
            "not_entered": [str(cell) for cell in result.empty],
        },
        "failed": len(failures),
        "seconds": sum(proof.seconds for proof in result.proofs),
        "worst": worst and {"case": str(worst.case), "error": worst.error, "bound": worst.bound},
        "failures": failures,
    }


def _print_text(results: Sequence[CaseResult]) -> None:
    columns = ("pairing", "cases", "failed", "unsupported", "error", "bound", "s")
    rows = [_row(result) for result in results]
    output.table(columns, rows, optional=("s", "bound", "error", "unsupported"))
    for result in results:
        if len(result.job.cases) > 1:
            job = result.job
            output.line(f"{job.prepare_finalize} x {job.experts}: {job.covers}")
            if job.reachable:
                output.line(f"paths entered: {result.paths}")
            for cell in result.empty if job.whole else ():
                output.line(f"failed: no case enters {cell}")
        for proof in result.failed:
            output.line(f"{proof}\n")
    count = sum(len(result.proofs) for result in results)
    failed = sum(len(result.failed) for result in results)
    cases, pairs = counted(count, "case"), counted(len(results), "pair")
    output.line(f"{cases} of {pairs}: {count - failed} passed, {failed} failed")


def _row(result: CaseResult) -> tuple[object, ...]:
    """error, bound: of the case whose error is nearest to its bound, or furthest beyond."""
    worst = result.worst
    assert worst is not None
    return (
        f"{result.job.prepare_finalize} x {result.job.experts}",
        len(result.proofs),
        len(result.failed),
        result.job.refused,
        f"{worst.error:.2e}",
        f"{worst.bound:.2e}",
        f"{sum(proof.seconds for proof in result.proofs):.1f}",
    )
