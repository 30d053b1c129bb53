#!/usr/bin/env python3
"""Compute mutation scores of modules that are covered by tests as well as by cases.

    python tools/mutate_modules.py adapters               # writes docs/mutation/adapters.json
    python tools/mutate_modules.py adapters --resume      # keeps the kills in the record
    python tools/mutate_modules.py adapters --only ID,ID  # only these; leaves the record unchanged

`mk test --mutate` scores a part with its cases only. Code that no case of a pairing executes, or
that several parts share, belongs to a scope in mutation_scopes.json. A scope has modules, the tests
and pairings that should kill their mutants, and the number of cases with adapters to sample for
each pairing, with the scope's name as seed. A mutant is run with the tests that execute its lines,
fastest first, and then with the cases.
"""

import argparse
import hashlib
import importlib
import json
import pickle
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

from modular_kernel.cli.machine_setup import prepare_host

prepare_host(quiet=True)

import pytest

from modular_kernel.errors import ConfigurationError
from modular_kernel.testing.mutation.case_runs import list_cases
from modular_kernel.testing.mutation.case_steps import run_cases
from modular_kernel.testing.mutation.coverage import (
    CaseCoverage,
    Coverage,
    Lines,
    convert_to_lists,
    cover,
    merge_coverage,
    merge_lines,
    trace_lines,
)
from modular_kernel.testing.mutation.cpu_undetectable import find_undetectable_reason
from modular_kernel.testing.mutation.forked_worker import ChildProcess, Send
from modular_kernel.testing.mutation.mutant_outcome import GRACE_S, SLOWDOWN, MutantOutcome
from modular_kernel.testing.mutation.one_process import OneProcess
from modular_kernel.testing.mutation.patched_module import (
    find_dependents,
    patch_modules,
    restore_submodule_attributes,
    unload,
)
from modular_kernel.testing.mutation.record import record_of, recorded_kills
from modular_kernel.testing.mutation.reviewed_equivalents import find_equivalent
from modular_kernel.testing.mutation.run_mutant import KillHistory
from modular_kernel.testing.mutation.scope import find_file
from modular_kernel.testing.mutation.score import (
    SAMPLE_SIZE,
    Score,
    Survey,
    default_seed,
    draw_sample,
)
from modular_kernel.testing.mutation.sites import mutants_of
from modular_kernel.testing.mutation.source import Mutant

SCOPES = ROOT / "tools/mutation_scopes.json"
FOLDER = ROOT / "docs/mutation"
CACHE = ROOT / "out"
_MAX_TEST_S = 8.0  # tests that take longer under coverage are excluded
_RUN_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Test:
    """A test, its duration under coverage in seconds, and the lines that it executed."""

    __test__ = False

    name: str
    seconds: float
    lines: Lines


@dataclass(frozen=True)
class Scope:
    """The mutants of a scope's modules, and the tests and cases that should kill them."""

    name: str
    pairs: tuple[tuple[str, str], ...]
    mutants: tuple[Mutant, ...]
    tests: tuple[Test, ...]
    coverage: Coverage

    def executing(self, mutant: Mutant) -> tuple[list[Test], list[CaseCoverage]]:
        """Return the tests and cases that execute the mutant.

        If only the import of its module executes it, these are all tests and cases of the module.
        """
        file = str(mutant.path)
        lines = {n for first, last in mutant.spans for n in range(first, last + 1)}
        tests = [t for t in self.tests if not t.lines.get(file, frozenset()).isdisjoint(lines)]
        cases = list(self.coverage.executing(mutant))
        if not tests and not cases and self.coverage.loads(mutant):
            tests = [test for test in self.tests if file in test.lines]
            cases = [case for case in self.coverage.cases if file in case.lines]
        return sorted(tests, key=lambda test: test.seconds), KillHistory().order(mutant, cases)


class CoveragePlugin:
    """A pytest plugin that reports the lines executed by each test and by their collection."""

    def __init__(self, files: set[str], send: Send) -> None:
        self._files, self._send = files, send
        self._failed = False

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Iterator[None]:
        with trace_lines(self._files) as (lines, loaded):
            result = yield
        self._send({"lines": convert_to_lists(lines), "loaded": convert_to_lists(loaded)})
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._failed, start = False, time.perf_counter()
        with trace_lines(self._files) as (lines, loaded):
            result = yield
        coverage = {
            "lines": convert_to_lists(lines),
            "loaded": convert_to_lists(loaded),
            "failed": self._failed,
        }
        self._send({"test": item.nodeid, "seconds": time.perf_counter() - start, **coverage})
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed = self._failed or not report.passed  # a skipped test counts as failed


class ReportPlugin:
    """A pytest plugin that reports the running test and failures."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._send({"test": nodeid})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._send({"failure": f"test: {report.nodeid}"})


def reimport_modules() -> Any:
    """Reimport the unloaded modules, packages of parts first. Returns the module `case_runs`."""
    importlib.import_module("modular_kernel.catalog").load_catalog()
    runs = importlib.import_module("modular_kernel.testing.mutation.case_runs")
    restore_submodule_attributes()
    return runs


def run_tests(names: Sequence[str], plugin: object) -> int:
    """Run tests in this process and return the exit status. A ReportPlugin stops at a failure.

    Loaded test modules are imported again, because they refer to the unpatched modules.
    """
    folder = str(ROOT / "tests")
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(folder):
            del sys.modules[name]
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    return int(
        pytest.main([*options, *(["-x"] * isinstance(plugin, ReportPlugin)), *names], [plugin])
    )


def cover_tests(
    files: set[str],
    modules: set[str],
    tests: Sequence[str],
    deselected_prefixes: Sequence[str] = (),
) -> tuple[Lines, tuple[Test, ...]]:
    """Run all tests once under coverage.

    deselected_prefixes: prefixes of the names of tests to exclude.

    Returns the lines executed by imports, and the tests that pass within the time limit. Raises
    ConfigurationError if the run fails.
    """

    def work(send: Send) -> None:
        unload(modules)
        with trace_lines(files) as (lines, loaded):
            reimport_modules()
        send({"lines": convert_to_lists(lines), "loaded": convert_to_lists(loaded)})
        options = [f"--deselect={name}" for name in deselected_prefixes]
        status = run_tests(
            [*options, *(str(ROOT / test) for test in tests)], CoveragePlugin(files, send)
        )
        assert status in (0, 1), f"pytest ended with {status}"

    import_lines, covered, excluded = list[Lines](), list[Test](), list[str]()
    child = ChildProcess(work, _RUN_TIMEOUT_S)
    for message in child:
        import_lines.append(freeze_lines(message["loaded"]))
        if "test" not in message:
            import_lines.append(freeze_lines(message["lines"]))
        elif message["failed"] or message["seconds"] > _MAX_TEST_S:
            excluded.append(message["test"])
        else:
            lines = freeze_lines(message["lines"])
            covered.append(Test(message["test"], message["seconds"], lines))
    if child.exit.status != "done":
        need = "tests that pass without a mutant"
        raise ConfigurationError(
            "tests", got=f"{child.exit.status}: {child.exit.detail}", need=need
        )
    print(f"{len(covered)} tests; slow, skipped or failing ones left out: {excluded}", flush=True)
    return merge_lines(import_lines), tuple(covered)


def freeze_lines(lines: Mapping[str, list[int]]) -> Lines:
    return {file: frozenset(numbers) for file, numbers in lines.items()}


def cover_cases(
    name: str, modules: Mapping[str, Path], pairs: Sequence[tuple[str, str]], count: int
) -> Coverage:
    """Run `count` cases with adapters of every pairing under coverage, sampled by scope name.

    Raises ConfigurationError if a case fails.
    """

    def hash_with_scope(text: str) -> bytes:
        return hashlib.sha256(f"{name}|{text}".encode()).digest()

    coverages = []
    for pair in pairs:
        cases = [case for case in list_cases((pair,), "full")[0] if case.problem.adapters]
        cases = sorted(cases, key=lambda case: hash_with_scope(str(case)))[:count]
        coverages.append(cover(modules, (pair,), "full", cases))
        if coverages[-1].error:
            need = "cases that pass without a mutant"
            raise ConfigurationError(" x ".join(pair), got=coverages[-1].error, need=need)
        print(" x ".join(pair), len(cases), "cases", flush=True)
    return merge_coverage(coverages)


def read_scope(name: str) -> Scope:
    """Read a scope and its mutants. The coverage of its tests and cases is cached in out/.

    Raises ConfigurationError for an unknown scope.
    """
    scopes = json.loads(SCOPES.read_text(encoding="utf-8"))
    if name not in scopes:
        raise ConfigurationError("scope", got=repr(name), need=f"one of {', '.join(scopes)}")
    scope_entry = scopes[name]
    modules = {module: path for module in scope_entry["modules"] if (path := find_file(module))}
    pairs = tuple(tuple(pair) for pair in scope_entry["pairings"])
    tests = [ROOT / test for test in scope_entry["tests"]]
    source_bytes = b"".join(
        path.read_bytes() for path in (*sorted(modules.values()), *tests, SCOPES)
    )
    cache_file = CACHE / f"cover-{name}-{hashlib.sha256(source_bytes).hexdigest()[:16]}.pickle"
    if cache_file.exists():
        covered_tests, coverage = pickle.loads(cache_file.read_bytes())
    else:
        files = {str(path) for path in modules.values()}
        import_lines, covered_tests = cover_tests(
            files, set(modules), scope_entry["tests"], scope_entry["not"]
        )
        coverage = cover_cases(name, modules, pairs, scope_entry["cases"])
        coverage = replace(coverage, loading=merge_lines((import_lines, coverage.loading)))
        CACHE.mkdir(exist_ok=True)
        cache_file.write_bytes(pickle.dumps((covered_tests, coverage)))
    mutants = tuple(m for module, path in modules.items() for m in mutants_of(module, path))
    return Scope(name, pairs, mutants, covered_tests, coverage)


def run_mutant(mutant: Mutant, scope: Scope) -> MutantOutcome:
    """Run the tests and cases that execute the mutant in a child process, until one fails."""
    tests, cases = scope.executing(mutant)
    find_dependents({mutant.module})
    child = ChildProcess(lambda send: _run_in_child(mutant, tests, cases, send), 4 * GRACE_S)
    seconds = {test.name: test.seconds for test in tests}
    num_run, differing, start = 0, 0, time.perf_counter()
    case: int | None = None

    def make_outcome(status: str, finding: str) -> MutantOutcome:
        last_case = cases[case].case if case is not None else None
        return MutantOutcome(
            mutant, status, finding, last_case, num_run, differing, time.perf_counter() - start
        )

    for message in child:
        if "failure" in message:
            is_refused = message["failure"].startswith("refused:")
            return make_outcome("refused" if is_refused else "killed", message["failure"])
        num_run += "test" in message or "case" in message
        differing += "differs" in message
        expected_s = 0.0
        if "test" in message:
            expected_s = seconds.get(message["test"], _MAX_TEST_S)
        elif "case" in message:
            case = message["case"]
            expected_s = cases[case].seconds
        child.timeout_s = 2 * GRACE_S + SLOWDOWN * expected_s
    if child.exit.status != "done":
        return make_outcome(child.exit.status, child.exit.detail)
    return make_outcome("survived", "")


def _run_in_child(
    mutant: Mutant, tests: Sequence[Test], cases: Sequence[CaseCoverage], send: Send
) -> None:
    try:
        patch_modules(mutant)
        runner: Any = reimport_modules()
    # Any exception during import kills the mutant.
    except Exception as error:  # noqa: BLE001
        send({"failure": f"import: raised {type(error).__name__}: {error}"})
        return
    if tests:
        status = run_tests([str(ROOT / test.name) for test in tests], ReportPlugin(send))
        if status:
            send({"failure": f"import: pytest ended with {status}"})
            return
    run_cases(cases, None, runner, send)


def compute_score(
    scope: Scope, idents: Sequence[str], recorded: Mapping[str, str], on_progress: Any
) -> Score:
    """Run the sampled mutants, or those in `idents`, and return the score.

    recorded: kills of an earlier run, by mutant. These mutants are not run again.
    on_progress: called with the score so far after each mutant.
    """
    executed = tuple(
        m for m in scope.mutants if find_undetectable_reason(m) is None and any(scope.executing(m))
    )
    selected = draw_sample(executed, SAMPLE_SIZE, default_seed())
    if idents:
        selected = tuple(m for m in scope.mutants if m.ident in idents)
    selected = tuple(
        sorted(selected, key=lambda m: m.ident not in recorded and not _is_equivalent(m, scope))
    )
    not_executed = set(scope.mutants) - set(executed)
    by_module = Counter(m.module for m in not_executed if find_undetectable_reason(m) is None)
    reasons = Counter(
        reason for m in not_executed if (reason := find_undetectable_reason(m)) is not None
    )
    counts = dict(sorted(by_module.items())), dict(sorted(reasons.items()))
    survey = Survey(scope.name, scope.pairs, "full", scope.mutants, scope.coverage, OneProcess())
    score = Score(survey, default_seed(), (), len(executed), *counts)
    for mutant in selected:
        if not idents and _is_equivalent(mutant, scope):
            outcome = MutantOutcome(mutant, "equivalent")
        elif not idents and mutant.ident in recorded:
            outcome = MutantOutcome.from_record(mutant, recorded[mutant.ident])
        else:
            outcome = run_mutant(mutant, scope)
            print(f"{outcome.status:9} {outcome.seconds:5.1f} s {mutant.ident} {mutant.location} "
                  f"{outcome.finding[:90]}", flush=True)  # fmt: skip
            if outcome.status == "survived":
                print(mutant.diff(), f"passed by {outcome.num_cases}", flush=True)
        score = replace(score, outcomes=(*score.outcomes, outcome))
        on_progress(score)
    return score


def _is_equivalent(mutant: Mutant, scope: Scope) -> bool:
    return find_equivalent(mutant.ident, scope.name) is not None


def record(score: Score, scope: Scope) -> dict[str, Any]:
    """Return the record of the score, with the number of tests and commands of this tool."""
    result = {**record_of(score), "tests": len(scope.tests)}
    for survivor in result["survivors"]:
        survivor["command"] = f"python tools/mutate_modules.py {scope.name} --only {survivor['id']}"
    return result


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("scope")
    parser.add_argument("--only", default="")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    scope, path = read_scope(args.scope), FOLDER / f"{args.scope}.json"
    idents = [ident for ident in args.only.split(",") if ident]
    if unknown := set(idents) - {mutant.ident for mutant in scope.mutants}:
        need = f"of the {len(scope.mutants)} mutants of {scope.name}"
        raise ConfigurationError("--only", got=", ".join(sorted(unknown)), need=need)
    recorded: Mapping[str, str] = {}
    if args.resume and path.exists():
        survey = Survey(scope.name, scope.pairs, "full", scope.mutants, scope.coverage)
        recorded = recorded_kills(json.loads(path.read_text(encoding="utf-8")), survey)

    def report_progress(score: Score) -> None:
        if not idents:
            path.write_text(json.dumps(record(score, scope), indent=1) + "\n", encoding="utf-8")

    score = compute_score(scope, idents, recorded, report_progress)
    print(
        f"{scope.name}: {len(score.outcomes)} of {score.executed} mutants run, "
        f"seed {score.seed}: "
        f"{len(score.killed)} killed, {len(score.survivors)} survived, "
        f"{len(score.equivalent)} equivalent: score {score.kill_rate:.1%}"
    )
    return int(bool(score.survivors))


if __name__ == "__main__":
    sys.exit(main())
