#!/usr/bin/env python3
"""Put the defects of source_defects.json into the source, one at a time: does `mk test` notice?

    python tools/source_defects.py smoke            # or full; writes docs/source-defects.json
    python tools/source_defects.py tests   # what full leaves, before the tests of operations

For each level a defect is killed, survives, or is met by no case on a CPU. The cases are those of
every pairing in one process. A level forgets its own results first, for lists of cases change, and
leaves the other's as they are: what smoke killed is not run again by full.
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
from modular_kernel.settings import environment_of_child

prepare_host()

from modular_kernel.catalog import this_machine
from modular_kernel.testing import pairings
from modular_kernel.testing.mutation import cover, run_mutant
from modular_kernel.testing.mutation.defects import Defect, read_defects
from modular_kernel.testing.mutation.run_mutant import Killers
from modular_kernel.testing.mutation.source import Mutant

LIST = ROOT / "tools/source_defects.json"
RECORD = ROOT / "docs/source-defects.json"

Record = dict[str, dict[str, str]]


def main(level: str, names: list[str]) -> None:
    """names: experts parts whose pairings run; none takes all."""
    if level not in ("smoke", "full", "tests"):
        raise ConfigurationError("level", got=level, need="smoke, full or tests")
    defects = read_defects(LIST, ROOT)
    found = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    record = {d.what: found.get(d.what, {"file": d.mutant.module}) for d in defects}
    if level == "tests":
        before_tests(defects, record)
    else:
        before_cases(defects, record, level, names)
    fates = [told[level] for told in record.values() if level in told]
    killed = sum(fate.startswith("killed") for fate in fates)
    lived = fates.count("survived")
    print(f"{level}: {killed} killed, {lived} survived, {len(fates) - killed - lived} not executed")


def before_cases(
    defects: Sequence[Defect], record: Record, level: Literal["smoke", "full"], names: list[str]
) -> None:
    """Run the cases of a level; write the record after each pairing.

    A kill of an earlier run in one of these pairings is forgotten before.
    """
    modules = {d.mutant.module: d.mutant.path for d in defects}
    killers = Killers()
    for told in record.values():
        if not names or told.get(level, "").rpartition(" x ")[2] in names:
            told.pop(level, None)
    for pair in pairings(this_machine(), level):
        if names and pair[1] not in names:
            continue
        coverage = cover(modules, (pair,), level)
        print(" x ".join(pair), len(coverage.cases), "cases", coverage.ended, flush=True)
        for defect in defects:
            told = record[defect.what]
            before = told.get("smoke", "") if level == "full" else ""
            if before.startswith("killed"):  # not run again
                told[level] = before
            if told.get(level, "").startswith("killed"):
                continue
            fate = run_mutant(defect.mutant, coverage, (pair,), level, killers)
            if fate.killed:
                check = fate.by.partition(":")[0] if fate.how == "killed" else fate.how
                told[level] = f"killed by {check} in {' x '.join(pair)}"
            elif fate.how == "survived":
                told[level] = "survived"
            else:
                told.setdefault(level, "not executed")
            print(f"  {defect.what}: {told[level]}", flush=True)
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def before_tests(defects: Sequence[Defect], record: Record) -> None:
    """Run the tests of operations on what full has not killed; write the record after each.

    RuntimeError if they fail without a defect: then they would notice every one.
    """
    sound = by_tests(None)
    if sound != "survived":
        raise RuntimeError(f"without a defect: {sound}")
    for defect in defects:
        told = record[defect.what]
        told.pop("tests", None)  # of a defect that full has killed since, too
        if not told.get("full", "").startswith("killed"):
            told["tests"] = by_tests(defect.mutant)
            print(f"  {defect.what}: {told['tests']}", flush=True)
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def by_tests(mutant: Mutant | None) -> str:
    """Run the whole tests of operations in a copy of the checkout with a defect in it, or none."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        left = shutil.ignore_patterns(".*", "out", "build", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=left)
        if mutant is not None:
            (copy / mutant.path.relative_to(ROOT)).write_text(mutant.text(), encoding="utf-8")
        tests = sorted(str(path) for path in (copy / "tests/ops").glob("test_ops_*.py"))
        words = ["-m", "pytest", "-q", "-x", "--whole", "-p", "no:cacheprovider", *tests]
        child = environment_of_child(interpreted=True) | {"PYTHONPATH": str(copy)}
        done = subprocess.run(
            [sys.executable, *words],
            cwd=copy,
            env=child,
            capture_output=True,
            text=True,
            check=False,
        )
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode == 1 and failed:
        return f"killed by {failed[0].split()[1].partition('[')[0]}"
    if done.returncode == 0:
        return "survived"
    raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout[-2000:]}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
