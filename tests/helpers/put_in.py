"""Applies a defect to the source in a forked child and runs cases against it."""

import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from modular_kernel.testing import Case
from modular_kernel.testing.mutation.defects import read_defects
from modular_kernel.testing.mutation.forked_worker import ChildProcess, Send
from modular_kernel.testing.mutation.patched_module import patch_modules, reattach

ROOT = Path(__file__).resolve().parents[2]
_CASE_TIMEOUT_S = 300.0  # seconds for a case


@dataclass(frozen=True)
class SourceDefect:
    """A defect: its description, and the text of a file that is replaced."""

    what: str
    file: str
    old: str
    new: str

    def __str__(self) -> str:
        return self.what.replace(" ", "_")


def findings(defect_spec: SourceDefect, cases: Sequence[Case], folder: Path) -> list[str]:
    """Return the finding of the first case that detects the defect, as "check: finding", or [].

    Raises AssertionError if the child ends early.
    """
    defect_file = folder / "defect.json"
    defect_file.write_text(json.dumps([vars(defect_spec)]), encoding="utf-8")
    (defect,) = read_defects(defect_file, ROOT)

    def work(send: Send) -> None:
        patch_modules(defect.mutant)
        runner = importlib.import_module("modular_kernel.testing.mutation.case_runs")
        reattach()
        machine = runner.this_machine()
        for case in cases:
            failure = runner.first_failure(case, machine)[0]
            send({"failure": failure})
            if failure is not None:
                return

    child = ChildProcess(work, _CASE_TIMEOUT_S)
    failures = [message["failure"] for message in child]
    assert child.exit.status == "done", child.exit
    return [failure for failure in failures if failure is not None]
