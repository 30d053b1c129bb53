"""Applies a defect to a source file in a forked process and runs cases there."""

import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from modular_kernel.testing import Case
from modular_kernel.testing.mutation.defects import read_defects
from modular_kernel.testing.mutation.forked_worker import ChildProcess, Send
from modular_kernel.testing.mutation.patched_module import (
    patch_modules,
    restore_submodule_attributes,
)

ROOT = Path(__file__).resolve().parents[2]
_CASE_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class SourceDefect:
    """A defect of a source file: `old` is replaced by `new`."""

    description: str
    file: str
    old: str
    new: str

    def __str__(self) -> str:
        return self.description.replace(" ", "_")


def findings(source_defect: SourceDefect, cases: Sequence[Case], folder: Path) -> list[str]:
    """Run `cases` with the defect until one fails, and return ["check: finding"] for this case.

    The list is empty if every case passes. folder: where a file that describes the defect is
    written. Raises AssertionError if the process ends early.
    """
    defect_file = folder / "defect.json"
    record = {
        "what": source_defect.description,
        "file": source_defect.file,
        "old": source_defect.old,
        "new": source_defect.new,
    }
    defect_file.write_text(json.dumps([record]), encoding="utf-8")
    (defect,) = read_defects(defect_file, ROOT)

    def run_cases(send: Send) -> None:
        patch_modules(defect.mutant)
        runner = importlib.import_module("modular_kernel.testing.mutation.case_runs")
        restore_submodule_attributes()
        machine = runner.this_machine()
        for case in cases:
            failure = runner.run_until_failure(case, machine)[0]
            send({"failure": failure})
            if failure is not None:
                return

    child = ChildProcess(run_cases, _CASE_TIMEOUT_S)
    failures = [message["failure"] for message in child]
    assert child.exit.status == "done", child.exit
    return [failure for failure in failures if failure is not None]
