#!/usr/bin/env python3
"""Score fresh samples of mutants of many parts in parallel; an interrupted run can be continued.

    python tools/sample_mutants.py --seed fresh-1 --folder out/fresh-1 --workers 12 --minutes 9
    python tools/sample_mutants.py --seed fresh-1 --folder out/fresh-1 --record fresh-1.json

`mk test --mutate` runs the mutants of a part one after another. This tool draws the same samples
and runs the same cases, with `--workers` mutants at a time, in the order of the draw. The folder
keeps the coverage of the cases (coverage-N.pickle), which holds for one commit, machine and path of
the checkout, and a line for each finished mutant (results.jsonl). A second call with the same
folder continues. `--record` writes the records of all parts in the format of
`modular_kernel.testing.mutation.record`; mutants without a result are listed as unfinished.

On a machine with a GPU, set CUDA_VISIBLE_DEVICES= and TRITON_INTERPRET=1.
"""

import hashlib
import json
import os
import pickle
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import in_checkout  # adds the checkout to sys.path

from modular_kernel.cli.machine_setup import prepare_host

prepare_host(quiet=True)

from modular_kernel.catalog import load_catalog
from modular_kernel.testing.mutation.code_equivalence import prove_by_code
from modular_kernel.testing.mutation.coverage import Coverage, merge_coverage
from modular_kernel.testing.mutation.mutant_outcome import MutantOutcome
from modular_kernel.testing.mutation.one_process import OneProcess
from modular_kernel.testing.mutation.over_ranks import OverRanks
from modular_kernel.testing.mutation.record import record_of
from modular_kernel.testing.mutation.reviewed_equivalents import find_equivalent
from modular_kernel.testing.mutation.run_mutant import KillHistory, MutationBackend, run_mutant
from modular_kernel.testing.mutation.scope import modules_of
from modular_kernel.testing.mutation.score import Score, Survey, draw_sample, list_mutants
from modular_kernel.testing.mutation.source import Mutant

LEVEL = "full"
PACKAGES = ("modular_kernel", "prepare_finalize", "experts", "topk_reduce")


@dataclass(frozen=True)
class Cases:
    """The cases of a pairing, in one process or over ranks.

    pair: names of the PrepareAndFinalize and the experts class.
    world_size, ranks_per_host: as of `OverRanks`; a world size of 1 means one process.
    """

    pair: tuple[str, str]
    world_size: int = 1
    ranks_per_host: int | None = None

    def backend(self) -> MutationBackend:
        if self.world_size == 1:
            return OneProcess()
        return OverRanks(self.world_size, self.ranks_per_host)


TORCH = Cases(("MoEPrepareAndFinalizeNoEP", "TorchExperts"))
NAIVE_BATCHED = Cases(("BatchedPrepareAndFinalize", "NaiveBatchedExperts"))
# Part -> the cases that its mutants run with. Those of all its pairings would take hours.
CASES: dict[str, tuple[Cases, ...]] = {
    "KeepTopK": (TORCH, NAIVE_BATCHED),
    "TopKWeightAndReduceContiguous": (TORCH, NAIVE_BATCHED),
    "TopKWeightAndReduceNaiveBatched": (TORCH, NAIVE_BATCHED),
    "MoEPrepareAndFinalizeNoEP": (TORCH,),
    "TorchExperts": (TORCH,),
    "BatchedPrepareAndFinalize": (NAIVE_BATCHED,),
    "NaiveBatchedExperts": (NAIVE_BATCHED,),
    "GroupedGemmExperts": (Cases(("MoEPrepareAndFinalizeNoEP", "GroupedGemmExperts")),),
    "BatchedTritonExperts": (Cases(("BatchedPrepareAndFinalize", "BatchedTritonExperts")),),
    "TritonExperts": (Cases(("MoEPrepareAndFinalizeNoEP", "TritonExperts")),),
    **{
        name: (Cases((name, experts), world_size, ranks_per_host),)
        for name, experts, world_size, ranks_per_host in (
            ("AllGatherReduceScatterPrepareAndFinalize", "TorchExperts", 2, None),
            ("ReplicatedEPPrepareAndFinalize", "TorchExperts", 2, None),
            ("TorchAll2AllPrepareAndFinalize", "TorchExperts", 2, None),
            ("TorchAll2AllBatchedPrepareAndFinalize", "NaiveBatchedExperts", 2, None),
            ("SymmMemPrepareAndFinalize", "TorchExperts", 2, None),
            ("HostThenRankPrepareAndFinalize", "TorchExperts", 4, 2),
        )
    },
}


class Children:
    """Runs functions in forked children, several at a time.

    A child returns its result, which must be picklable, through a file. If it raises an error, its
    traceback is printed and there is no result.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._running: dict[int, tuple[str, Callable[[Any], None]]] = {}  # by process id
        self._folder = tempfile.TemporaryDirectory()

    def start(self, work: Callable[[], object], receive: Callable[[Any], None]) -> None:
        """Wait until fewer than `workers` children run, then start another one.

        receive: called in this process with the result of `work`.
        """
        while len(self._running) >= self._workers:
            self._wait_for_one()
        file = str(Path(self._folder.name) / str(time.monotonic_ns()))
        pid = os.fork()
        if not pid:
            os.setsid()  # so that `stop` also ends the processes that the child starts
            try:
                Path(file).write_bytes(pickle.dumps(work()))
            except BaseException:  # noqa: BLE001  the child must not return
                sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
                os._exit(1)
            os._exit(0)
        self._running[pid] = file, receive

    def finish(self, deadline: float) -> None:
        """Wait until all children have ended, or until the deadline. Stop the others."""
        while self._running and time.monotonic() < deadline:
            if not self._wait_for_one(block=False):
                time.sleep(0.2)
        self.stop()

    def stop(self) -> None:
        for pid in self._running:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._running.clear()

    def has_free_worker(self) -> bool:
        while self._running and self._wait_for_one(block=False):
            pass
        return len(self._running) < self._workers

    def _wait_for_one(self, *, block: bool = True) -> bool:
        """Receive the result of a child that has ended. Return whether there was one."""
        pid, status = os.waitpid(-1, 0 if block else os.WNOHANG)
        if pid not in self._running:
            return False
        file, receive = self._running.pop(pid)
        if not status:
            receive(pickle.loads(Path(file).read_bytes()))
        return True


def hash_sources() -> str:
    """Return a hash of the packages' Python files, for which a coverage holds."""
    files = sorted(file for name in PACKAGES for file in (in_checkout.ROOT / name).rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def cover_cases(folder: Path, parts: Sequence[str], children: Children) -> dict[Cases, Coverage]:
    """Return the coverage of all cases of the parts: that in the folder, or a new one."""
    catalog, current = load_catalog(), hash_sources()
    coverages, parts_by_cases = dict[Cases, Coverage](), defaultdict[Cases, list[str]](list)
    for part in parts:
        for cases in CASES[part]:
            parts_by_cases[cases].append(part)
    for cases, cases_parts in parts_by_cases.items():
        file = folder / f"coverage-{list(parts_by_cases).index(cases)}.pickle"
        key = cases, tuple(cases_parts), str(in_checkout.ROOT), current
        if file.is_file():
            saved_key, coverage = pickle.loads(file.read_bytes())
            if saved_key != key:
                need = "an empty folder, or the same parts, sources and path of the checkout"
                raise click.UsageError(f"{file}: got the coverage of another run, need {need}")
            coverages[cases] = coverage
            continue
        modules = {m: path for part in cases_parts for m, path in modules_of(part, catalog).items()}

        def trace(cases: Cases = cases, modules: Mapping[str, Path] = modules) -> Coverage:
            return cases.backend().cover(modules, (cases.pair,), LEVEL)

        def receive(
            coverage: Coverage, cases: Cases = cases, file: Path = file, key: object = key
        ) -> None:
            pairing = " x ".join(cases.pair)
            if coverage.error:
                raise click.ClickException(f"{pairing}: a case fails: {coverage.error}")
            coverages[cases] = coverage
            file.write_bytes(pickle.dumps((key, coverage)))
            click.echo(f"traced {len(coverage.cases)} cases of {pairing}", err=True)

        children.start(trace, receive)
    children.finish(float("inf"))
    missing = [" x ".join(cases.pair) for cases in parts_by_cases if cases not in coverages]
    if missing:
        raise click.ClickException(f"no coverage of {', '.join(missing)}")
    return coverages


def make_survey(part: str, coverages: Mapping[Cases, Coverage]) -> Survey:
    cases = CASES[part]
    return Survey(
        part,
        tuple(each.pair for each in cases),
        LEVEL,
        list_mutants(part, load_catalog()),
        merge_coverage(coverages[each] for each in cases),
        cases[0].backend(),
    )


def run_in_parts(
    ident: str,
    surveys: Sequence[Survey],
    histories: Mapping[str, KillHistory],
    write: Callable[[str, MutantOutcome], None],
) -> list[tuple[str, MutantOutcome]]:
    """Run a mutant with the cases of each part. Return (part, outcome) of each.

    A part does not run a mutant that another part has killed with a case that both have.

    write: called with each part and outcome as soon as it is known.
    """
    outcomes = list[tuple[str, MutantOutcome]]()
    for survey in surveys:
        outcome = run_in_part(ident, survey, histories[survey.part], outcomes)
        write(survey.part, outcome)
        outcomes.append((survey.part, outcome))
    return outcomes


def run_in_part(
    ident: str,
    survey: Survey,
    history: KillHistory,
    known_outcomes: Sequence[tuple[str, MutantOutcome]],
) -> MutantOutcome:
    """Return the outcome of a mutant in a part.

    known_outcomes: (part, outcome) of the mutant in other parts.
    """
    mutant = survey.mutant(ident)
    if find_equivalent(ident, survey.part):
        return MutantOutcome(mutant, "equivalent")
    executing = [covered.case for covered in survey.coverage.executing(mutant)]
    for part, known in known_outcomes:
        if known.killed and known.case is not None and known.case in executing:
            return replace(known, shared=part)
    args = survey.coverage, survey.pairs, survey.level, history
    outcome = run_mutant(mutant, *args, backend=survey.backend)
    return prove_by_code(outcome) if outcome.status == "survived" else outcome


def describe(part: str, outcome: MutantOutcome) -> dict[str, Any]:
    """Return the line of results.jsonl of an outcome."""
    return {
        "part": part,
        "id": outcome.mutant.ident,
        "status": outcome.status,
        "finding": outcome.finding[:400],
        "case": None if outcome.case is None else str(outcome.case),
        "cases": outcome.num_cases,
        "differing": outcome.differing,
        "seconds": round(outcome.seconds, 1),
        "shared": outcome.shared,
        "forms": outcome.forms,
    }


def restore_outcome(mutant: Mutant, result: Mapping[str, Any]) -> MutantOutcome:
    return MutantOutcome(
        mutant,
        result["status"],
        result["finding"],
        None,
        result["cases"],
        result["differing"],
        result["seconds"],
        result["shared"],
        result["forms"],
    )


def read_results(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the finished results by (part, identity of the mutant)."""
    file = folder / "results.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    results = [json.loads(line) for line in lines]
    return {(result["part"], result["id"]): result for result in results}


def order_mutants(samples: Mapping[str, Sequence[Mutant]]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each drawn mutant, in the order of the draws, with the parts that drew it."""
    positions, parts = dict[str, int](), defaultdict[str, list[str]](list)
    for part, sample in samples.items():
        for position, mutant in enumerate(sample):
            positions[mutant.ident] = min(position, positions.get(mutant.ident, position))
            parts[mutant.ident].append(part)
    for ident in sorted(positions, key=lambda each: (positions[each], each)):
        yield ident, tuple(parts[ident])


def run_samples(
    folder: Path,
    surveys: Mapping[str, Survey],
    samples: Mapping[str, Sequence[Mutant]],
    children: Children,
    deadline: float,
) -> None:
    """Run the mutants that have no result yet, until the deadline."""
    results, histories = read_results(folder), {part: KillHistory() for part in surveys}

    def write(part: str, outcome: MutantOutcome) -> None:
        """Append a result, in a child. Several children may do so at the same time."""
        line = json.dumps(describe(part, outcome)) + "\n"
        file = os.open(folder / "results.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, line.encode())
        os.close(file)

    def receive(outcomes: list[tuple[str, MutantOutcome]]) -> None:
        for part, outcome in outcomes:
            if outcome.killed and outcome.case is not None and not outcome.shared:
                histories[part].add(outcome.mutant, outcome.case)
        (part, outcome), *_ = outcomes
        click.echo(
            f"{outcome.mutant.ident}: {outcome.status} in {part}, {outcome.seconds:.0f} s", err=True
        )

    for ident, parts in order_mutants(samples):
        missing = [surveys[part] for part in parts if (part, ident) not in results]
        if not missing:
            continue
        while not children.has_free_worker() and time.monotonic() < deadline:
            time.sleep(0.05)
        if time.monotonic() >= deadline:
            break
        children.start(
            lambda ident=ident, missing=missing: run_in_parts(ident, missing, histories, write),
            receive,
        )
    children.finish(deadline)


def make_records(
    folder: Path,
    seed: str,
    surveys: Mapping[str, Survey],
    samples: Mapping[str, Sequence[Mutant]],
) -> dict[str, Any]:
    """Return the record of each part."""
    results, records = read_results(folder), dict[str, Any]()
    for part, sample in samples.items():
        finished = [mutant for mutant in sample if (part, mutant.ident) in results]
        outcomes = (restore_outcome(m, results[part, m.ident]) for m in finished)
        executed = len(surveys[part].executed())
        score = Score(surveys[part], seed, tuple(outcomes), executed, {}, {})
        unfinished = [mutant.ident for mutant in sample if mutant not in finished]
        records[part] = {**record_of(score), "unfinished": unfinished}
    return records


def print_scores(records: Mapping[str, Mapping[str, Any]]) -> None:
    killed = survived = 0
    for part, record in records.items():
        survivors = len(record["survivors"])
        killed, survived = killed + record["killed"], survived + survivors
        counts = f"{record['killed']} killed, {survivors} survived"
        others = f"{len(record['equivalent'])} equivalent, {len(record['unfinished'])} unfinished"
        score = f"{record['score']:.1%}" if record["killed"] or survivors else "no score"
        click.echo(f"{part}: {counts}, {others}, {score}")
    if killed + survived:
        click.echo(f"all: {killed} killed, {survived} survived, {killed / (killed + survived):.1%}")


@click.command(context_settings={"show_default": True})
@click.option("--seed", required=True, help="Seed of the draws.")
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="Results so far.")
@click.option("--parts", default=",".join(CASES), help="Parts.")
@click.option("--count", default=100, help="Number of mutants to draw for each part.")
@click.option("--workers", default=os.cpu_count() or 1, help="Mutants to run at a time.")
@click.option("--minutes", default=60.0, help="Time limit for starting and ending mutants.")
@click.option("--record", type=click.Path(path_type=Path), help="Write records and run nothing.")
def sample_mutants(
    *,
    seed: str,
    folder: Path,
    parts: str,
    count: int,
    workers: int,
    minutes: float,
    record: Path | None,
) -> None:
    """Run a fresh sample of mutants of each part, or write its records."""
    deadline = time.monotonic() + 60 * minutes
    names = parts.split(",")
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise click.BadParameter(f"got {', '.join(unknown)}, need some of {', '.join(CASES)}")
    folder.mkdir(parents=True, exist_ok=True)
    children = Children(workers)
    coverages = cover_cases(folder, names, children)
    surveys = {name: make_survey(name, coverages) for name in names}
    samples = {
        name: draw_sample(survey.executed(), count, seed) for name, survey in surveys.items()
    }
    if record is None:
        run_samples(folder, surveys, samples, children, deadline)
    records = make_records(folder, seed, surveys, samples)
    if record is not None:
        record.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    print_scores(records)


if __name__ == "__main__":
    sample_mutants()
