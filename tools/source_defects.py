#!/usr/bin/env python3
"""Apply the defects of source_defects.json one at a time and check whether `mk test` detects them.

    python tools/source_defects.py smoke  # or full; writes docs/source-defects.json
    python tools/source_defects.py tests  # runs the tests of operations on survivors of full

At each level, a defect is killed, survives, or is not executed by any case on a CPU. The cases are
those of every pairing in one process. A run discards the previous results of its level, because
lists of cases change, and keeps those of other levels. The level full does not rerun defects that
smoke has killed.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from modular_kernel.cli.machine_setup import prepare_host
from modular_kernel.errors import ConfigurationError
from modular_kernel.settings import make_child_environment

prepare_host()

from modular_kernel.catalog import this_machine
from modular_kernel.testing import pairings
from modular_kernel.testing.mutation import cover, run_mutant
from modular_kernel.testing.mutation.defects import Defect, read_defects
from modular_kernel.testing.mutation.run_mutant import KillHistory
from modular_kernel.testing.mutation.source import Mutant

LIST = ROOT / "tools/source_defects.json"
RECORD = ROOT / "docs/source-defects.json"

Record = dict[str, dict[str, str]]


def main(level: str, names: list[str]) -> None:
    """Run a level and print the counts.

    names: experts parts whose pairings are run; [] stands for all.
    """
    if level not in ("smoke", "full", "tests"):
        raise ConfigurationError("level", got=level, need="smoke, full or tests")
    defects = read_defects(LIST, ROOT)
    previous = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    record = {
        d.description: previous.get(d.description, {"file": d.mutant.module}) for d in defects
    }
    if level == "tests":
        run_tests(defects, record)
    else:
        run_cases(defects, record, level, names)
    outcomes = [results[level] for results in record.values() if level in results]
    killed = sum(outcome.startswith("killed") for outcome in outcomes)
    num_survived = outcomes.count("survived")
    num_idle = len(outcomes) - killed - num_survived
    print(f"{level}: {killed} killed, {num_survived} survived, {num_idle} not executed")


def run_cases(
    defects: Sequence[Defect], record: Record, level: Literal["smoke", "full"], names: list[str]
) -> None:
    """Discard the results of these pairings, run their cases, and write the record after each."""
    modules = {d.mutant.module: d.mutant.path for d in defects}
    history = KillHistory()
    for results in record.values():
        if not names or results.get(level, "").rpartition(" x ")[2] in names:
            results.pop(level, None)
    for pair in pairings(this_machine(), level):
        if names and pair[1] not in names:
            continue
        coverage = cover(modules, (pair,), level)
        print(" x ".join(pair), len(coverage.cases), "cases", coverage.error, flush=True)
        for defect in defects:
            results = record[defect.description]
            smoke_result = results.get("smoke", "") if level == "full" else ""
            if smoke_result.startswith("killed"):  # do not run it again
                results[level] = smoke_result
            if results.get(level, "").startswith("killed"):
                continue
            outcome = run_mutant(defect.mutant, coverage, (pair,), level, history)
            if outcome.killed:
                check = (
                    outcome.finding.partition(":")[0]
                    if outcome.status == "killed"
                    else outcome.status
                )
                results[level] = f"killed by {check} in {' x '.join(pair)}"
            elif outcome.status == "survived":
                results[level] = "survived"
            else:
                results.setdefault(level, "not executed")
            print(f"  {defect.description}: {results[level]}", flush=True)
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def run_tests(defects: Sequence[Defect], record: Record) -> None:
    """Run the tests of operations on defects that full does not kill; write the record after each.

    Raises RuntimeError if the tests fail without a defect.
    """
    baseline = run_operation_tests(None)
    if baseline != "survived":
        raise RuntimeError(f"without a defect: {baseline}")
    for defect in defects:
        results = record[defect.description]
        results.pop("tests", None)  # also if full kills the defect
        if not results.get("full", "").startswith("killed"):
            results["tests"] = run_operation_tests(defect.mutant)
            print(f"  {defect.description}: {results['tests']}", flush=True)
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def run_operation_tests(mutant: Mutant | None) -> str:
    """Run all tests of operations in a copy of the checkout, with a mutant applied if given.

    Returns "survived" or "killed by TEST". Raises RuntimeError if pytest itself fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        excluded = shutil.ignore_patterns(".*", "out", "build", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=excluded)
        if mutant is not None:
            (copy / mutant.path.relative_to(ROOT)).write_text(mutant.text(), encoding="utf-8")
        tests = sorted(str(path) for path in (copy / "tests/ops").glob("test_ops_*.py"))
        arguments = ["-m", "pytest", "-q", "-x", "--whole", "-p", "no:cacheprovider", *tests]
        environment = make_child_environment(interpreted=True) | {"PYTHONPATH": str(copy)}
        process = subprocess.run(
            [sys.executable, *arguments],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    failed = [line for line in process.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if process.returncode == 1 and failed:
        return f"killed by {failed[0].split()[1].partition('[')[0]}"
    if process.returncode == 0:
        return "survived"
    raise RuntimeError(f"pytest ended with {process.returncode}: {process.stdout[-2000:]}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
