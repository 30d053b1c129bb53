#!/usr/bin/env python3
"""Mutation score of named modules: is a defect in them noticed by named tests, or by cases?

    python tools/mutate_modules.py adapters               # writes docs/mutation/adapters.json
    python tools/mutate_modules.py adapters --resume      # who died by the record is not run again
    python tools/mutate_modules.py adapters --only ID,ID  # these alone; the record stays

`mk test --mutate` scores a part by its cases alone. What no case of a pairing executes, or what
several parts have in common, is a scope of mutation_scopes.json: modules, the tests and pairings
that are to notice, and how many cases of each pairing, those with adapters, drawn by the scope's
name. A mutant meets the tests that execute its line, the fastest first, then the cases.
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
from modular_kernel.testing.mutation.case_runs import case_list
from modular_kernel.testing.mutation.case_steps import run_cases
from modular_kernel.testing.mutation.coverage import (
    Coverage,
    Covered,
    Lines,
    as_lists,
    cover,
    joined,
    united,
    watched,
)
from modular_kernel.testing.mutation.cpu_undetectable import apart
from modular_kernel.testing.mutation.forked_worker import Child, Tell
from modular_kernel.testing.mutation.mutant_outcome import GRACE_S, SLOWER, Fate
from modular_kernel.testing.mutation.one_process import OneProcess
from modular_kernel.testing.mutation.patched_module import dependents, forget, reattach, serve
from modular_kernel.testing.mutation.record import died, record_of
from modular_kernel.testing.mutation.reviewed_equivalents import reviewed
from modular_kernel.testing.mutation.run_mutant import Killers
from modular_kernel.testing.mutation.scope import file_of
from modular_kernel.testing.mutation.score import SAMPLE, Score, Survey, drawn, release
from modular_kernel.testing.mutation.sites import mutants_of
from modular_kernel.testing.mutation.source import Mutant

SCOPES = ROOT / "tools/mutation_scopes.json"
FOLDER = ROOT / "docs/mutation"
CACHE = ROOT / "out"
_LONGEST_S = 8.0  # tests that take longer, watched, stay out
_PROOF_S = 600.0


@dataclass(frozen=True)
class Test:
    """A test, the seconds that it took, watched, and the lines that it executed."""

    __test__ = False

    name: str
    seconds: float
    lines: Lines


@dataclass(frozen=True)
class Scope:
    """Modules, their mutants, and what is to notice them."""

    name: str
    pairs: tuple[tuple[str, str], ...]
    mutants: tuple[Mutant, ...]
    tests: tuple[Test, ...]
    coverage: Coverage

    def met(self, mutant: Mutant) -> tuple[list[Test], list[Covered]]:
        """Return tests and cases that execute it; all of its module's, if its import alone does."""
        file = str(mutant.path)
        lines = {n for first, last in mutant.spans for n in range(first, last + 1)}
        tests = [t for t in self.tests if not t.lines.get(file, frozenset()).isdisjoint(lines)]
        cases = list(self.coverage.executing(mutant))
        if not tests and not cases and self.coverage.loads(mutant):
            tests = [test for test in self.tests if file in test.lines]
            cases = [case for case in self.coverage.cases if file in case.lines]
        return sorted(tests, key=lambda test: test.seconds), Killers().ordered(mutant, cases)


class Watch:
    """Plugin of pytest: tells the lines of every test, and those that importing them executed."""

    def __init__(self, files: set[str], tell: Tell) -> None:
        self._files, self._tell = files, tell
        self._failed = False

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Iterator[None]:
        with watched(self._files) as (lines, loaded):
            found = yield
        self._tell({"lines": as_lists(lines), "loaded": as_lists(loaded)})
        return found

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._failed, start = False, time.perf_counter()
        with watched(self._files) as (lines, loaded):
            found = yield
        told = {"lines": as_lists(lines), "loaded": as_lists(loaded), "failed": self._failed}
        self._tell({"test": item.nodeid, "seconds": time.perf_counter() - start, **told})
        return found

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed = self._failed or not report.passed  # one that is skipped says nothing, either


class Follow:
    """Plugin of pytest: tells which test runs, and the first that fails."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._tell({"test": nodeid})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._tell({"failure": f"test: {report.nodeid}"})


def fresh() -> Any:
    """Import anew what was forgotten, packages of parts first, and how cases are run."""
    importlib.import_module("modular_kernel.catalog").load_catalog()
    runs = importlib.import_module("modular_kernel.testing.mutation.case_runs")
    reattach()
    return runs


def run_tests(names: Sequence[str], plugin: object) -> int:
    """Run tests in this process, up to the first that fails if `plugin` follows; exit status.

    A test module that is loaded already has names of modules as they were: it is imported anew.
    """
    folder = str(ROOT / "tests")
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(folder):
            del sys.modules[name]
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    return int(pytest.main([*options, *(["-x"] * isinstance(plugin, Follow)), *names], [plugin]))


def cover_tests(
    files: set[str], modules: set[str], tests: Sequence[str], but: Sequence[str] = ()
) -> tuple[Lines, tuple[Test, ...]]:
    """Run all tests once, watched: lines executed by imports, and every test that passes in time.

    but: names that the tests left out begin with. ConfigurationError where the run does not end.
    """

    def work(tell: Tell) -> None:
        forget(modules)
        with watched(files) as (lines, loaded):
            fresh()
        tell({"lines": as_lists(lines), "loaded": as_lists(loaded)})
        left = [f"--deselect={name}" for name in but]
        status = run_tests([*left, *(str(ROOT / test) for test in tests)], Watch(files, tell))
        assert status in (0, 1), f"pytest ended with {status}"

    loading, found, left_out = list[Lines](), list[Test](), list[str]()
    child = Child(work, _PROOF_S)
    for message in child:
        loading.append(frozen(message["loaded"]))
        if "test" not in message:
            loading.append(frozen(message["lines"]))
        elif message["failed"] or message["seconds"] > _LONGEST_S:
            left_out.append(message["test"])
        else:
            lines = frozen(message["lines"])
            found.append(Test(message["test"], message["seconds"], lines))
    if child.ended.how != "done":
        need = "tests that pass before anything is changed"
        raise ConfigurationError("tests", got=f"{child.ended.how}: {child.ended.detail}", need=need)
    print(f"{len(found)} tests; slow, skipped or failing ones left out: {left_out}", flush=True)
    return united(loading), tuple(found)


def frozen(lines: Mapping[str, list[int]]) -> Lines:
    return {file: frozenset(numbers) for file, numbers in lines.items()}


def cover_cases(
    name: str, modules: Mapping[str, Path], pairs: Sequence[tuple[str, str]], count: int
) -> Coverage:
    """Call `count` cases with adapters of every pairing, drawn by the scope's name."""

    def key(text: str) -> bytes:
        return hashlib.sha256(f"{name}|{text}".encode()).digest()

    each = []
    for pair in pairs:
        cases = [case for case in case_list((pair,), "full")[0] if case.problem.adapters]
        cases = sorted(cases, key=lambda case: key(str(case)))[:count]
        each.append(cover(modules, (pair,), "full", cases))
        if each[-1].ended:
            need = "cases that pass before anything is changed"
            raise ConfigurationError(" x ".join(pair), got=each[-1].ended, need=need)
        print(" x ".join(pair), len(cases), "cases", flush=True)
    return joined(each)


def read_scope(name: str) -> Scope:
    """Take the modules of a scope apart; what its tests and cases execute is kept in out/."""
    scopes = json.loads(SCOPES.read_text(encoding="utf-8"))
    if name not in scopes:
        raise ConfigurationError("scope", got=repr(name), need=f"one of {', '.join(scopes)}")
    given = scopes[name]
    modules = {module: path for module in given["modules"] if (path := file_of(module))}
    pairs = tuple(tuple(pair) for pair in given["pairings"])
    tests = [ROOT / test for test in given["tests"]]
    text = b"".join(path.read_bytes() for path in (*sorted(modules.values()), *tests, SCOPES))
    kept = CACHE / f"cover-{name}-{hashlib.sha256(text).hexdigest()[:16]}.pickle"
    if kept.exists():
        tests_found, coverage = pickle.loads(kept.read_bytes())
    else:
        files = {str(path) for path in modules.values()}
        loading, tests_found = cover_tests(files, set(modules), given["tests"], given["not"])
        coverage = cover_cases(name, modules, pairs, given["cases"])
        coverage = replace(coverage, loading=united((loading, coverage.loading)))
        CACHE.mkdir(exist_ok=True)
        kept.write_bytes(pickle.dumps((tests_found, coverage)))
    mutants = tuple(m for module, path in modules.items() for m in mutants_of(module, path))
    return Scope(name, pairs, mutants, tests_found, coverage)


def put_in(mutant: Mutant, scope: Scope) -> Fate:
    """Run what executes the mutant in a child that has it, until something fails."""
    tests, cases = scope.met(mutant)
    dependents({mutant.module})
    child = Child(lambda tell: _work(mutant, tests, cases, tell), 4 * GRACE_S)
    seconds = {test.name: test.seconds for test in tests}
    ran, differing, start = 0, 0, time.perf_counter()
    case: int | None = None

    def fate(how: str, by: str) -> Fate:
        met = cases[case].case if case is not None else None
        return Fate(mutant, how, by, met, ran, differing, time.perf_counter() - start)

    for message in child:
        if "failure" in message:
            refused = message["failure"].startswith("refused:")
            return fate("refused" if refused else "killed", message["failure"])
        ran += "test" in message or "case" in message
        differing += "differs" in message
        known = 0.0
        if "test" in message:
            known = seconds.get(message["test"], _LONGEST_S)
        elif "case" in message:
            case = message["case"]
            known = cases[case].seconds
        child.patience = 2 * GRACE_S + SLOWER * known
    if child.ended.how != "done":
        return fate(child.ended.how, child.ended.detail)
    return fate("survived", "")


def _work(mutant: Mutant, tests: Sequence[Test], cases: Sequence[Covered], tell: Tell) -> None:
    """In the child."""
    try:
        serve(mutant)
        runs: Any = fresh()
    # Whatever a mutant raises while it is imported or judged kills it.
    except Exception as error:  # noqa: BLE001
        tell({"failure": f"import: raised {type(error).__name__}: {error}"})
        return
    if tests:
        status = run_tests([str(ROOT / test.name) for test in tests], Follow(tell))
        if status:
            tell({"failure": f"import: pytest ended with {status}"})
            return
    run_cases(cases, None, runs, tell)


def score_of(scope: Scope, only: Sequence[str], dead: Mapping[str, str], told: Any) -> Score:
    """Put the drawn mutants in, or `only` these."""
    executed = tuple(m for m in scope.mutants if apart(m) is None and any(scope.met(m)))
    chosen = drawn(executed, SAMPLE, release())
    if only:
        chosen = tuple(m for m in scope.mutants if m.ident in only)
    chosen = tuple(sorted(chosen, key=lambda m: m.ident not in dead and not _known(m, scope)))
    rest = set(scope.mutants) - set(executed)
    idle = Counter(m.module for m in rest if apart(m) is None)
    reasons = Counter(reason for m in rest if (reason := apart(m)) is not None)
    counts = dict(sorted(idle.items())), dict(sorted(reasons.items()))
    found = Survey(scope.name, scope.pairs, "full", scope.mutants, scope.coverage, OneProcess())
    score = Score(found, release(), (), len(executed), *counts)
    for mutant in chosen:
        if not only and _known(mutant, scope):
            fate = Fate(mutant, "equivalent")
        elif not only and mutant.ident in dead:
            fate = Fate.before(mutant, dead[mutant.ident])
        else:
            fate = put_in(mutant, scope)
            print(f"{fate.how:9} {fate.seconds:5.1f} s {mutant.ident} {mutant.place} "
                  f"{fate.by[:90]}", flush=True)  # fmt: skip
            if fate.how == "survived":
                print(mutant.diff(), f"passed by {fate.ran}", flush=True)
        score = replace(score, fates=(*score.fates, fate))
        told(score)
    return score


def _known(mutant: Mutant, scope: Scope) -> bool:
    return reviewed(mutant.ident, scope.name) is not None


def record(score: Score, scope: Scope) -> dict[str, Any]:
    """Return the record of a part, with the number of tests, and this tool's lines."""
    found = {**record_of(score), "tests": len(scope.tests)}
    for one in found["survivors"]:
        one["command"] = f"python tools/mutate_modules.py {scope.name} --only {one['id']}"
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("scope")
    parser.add_argument("--only", default="")
    parser.add_argument("--resume", action="store_true")
    wanted = parser.parse_args()
    scope, path = read_scope(wanted.scope), FOLDER / f"{wanted.scope}.json"
    only = [ident for ident in wanted.only.split(",") if ident]
    if unknown := set(only) - {mutant.ident for mutant in scope.mutants}:
        need = f"of the {len(scope.mutants)} mutants of {scope.name}"
        raise ConfigurationError("--only", got=", ".join(sorted(unknown)), need=need)
    dead: Mapping[str, str] = {}
    if wanted.resume and path.exists():
        survey = Survey(scope.name, scope.pairs, "full", scope.mutants, scope.coverage)
        dead = died(json.loads(path.read_text(encoding="utf-8")), survey)

    def told(score: Score) -> None:
        if not only:
            path.write_text(json.dumps(record(score, scope), indent=1) + "\n", encoding="utf-8")

    score = score_of(scope, only, dead, told)
    print(
        f"{scope.name}: {len(score.fates)} of {score.executed} mutants put in, seed {score.seed}: "
        f"{len(score.killed)} killed, {len(score.survivors)} survived, "
        f"{len(score.equivalent)} equivalent: score {score.share:.1%}"
    )
    return int(bool(score.survivors))


if __name__ == "__main__":
    sys.exit(main())
