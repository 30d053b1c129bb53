"""Put a defect into the source, in the memory of a child, and run chosen cases before it."""

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
_PATIENCE = 300.0  # seconds for a case


@dataclass(frozen=True)
class Wrong:
    """What is wrong, and the piece of a file that is replaced."""

    what: str
    file: str
    old: str
    new: str

    def __str__(self) -> str:
        return self.what.replace(" ", "_")


def findings(wrong: Wrong, cases: Sequence[Case], folder: Path) -> list[str]:
    """What the first case that notices a defect says, as "check: finding"; empty if none does.

    Raises AssertionError if the child ends before its time, which would tell nothing.
    """
    listed = folder / "defect.json"
    listed.write_text(json.dumps([vars(wrong)]), encoding="utf-8")
    (defect,) = read_defects(listed, ROOT)

    def work(tell: Send) -> None:
        patch_modules(defect.mutant)
        runs = importlib.import_module("modular_kernel.testing.mutation.case_runs")
        reattach()
        machine = runs.this_machine()
        for case in cases:
            failure = runs.first_failure(case, machine)[0]
            tell({"failure": failure})
            if failure is not None:
                return

    child = ChildProcess(work, _PATIENCE)
    said = [message["failure"] for message in child]
    assert child.exit.status == "done", child.exit
    return [failure for failure in said if failure is not None]
