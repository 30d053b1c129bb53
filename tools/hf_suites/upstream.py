"""Runs transformers' own tests of models with experts on our implementation.

Every case runs twice, without and with our implementation, on the tests and the source of one
checkout. Only a case that passes without ours and fails with it is our failure.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from hf_suites.outcomes import Case, Outcome
from modular_kernel import errors

SUITE = "transformers' own tests"
# Included cases have a word in their names that suggests that they run experts: forward passes,
# generation, batching, padding, and implementations. Excluded cases need a compiler or several
# processes, or only read and write checkpoints.
INCLUDED_WORDS = (
    *("eager_matches_batched", "generate", "batching_equivalence", "left_padding", "greedy"),
    *("sample", "beam", "assisted", "outputs_equivalence", "forward", "hidden_states_output"),
    *(
        "retain_grad",
        "determinism",
        "logits_to_keep",
        "prompt_lookup",
        "inputs_embeds",
        "load_balanc",
    ),
    *("feed_forward_chunking", "expert", "cache", "continue"),
)
EXCLUDED_WORDS = (
    *("fsdp", "tp_", "ep_", "parallel", "deepspeed", "compile", "compilation", "sdpa", "flash"),
    *("export", "inherits", "integration"),
)
SIDES = ("theirs", "ours")
CHECKOUT = Path(__file__).resolve().parents[2]


def list_test_files(checkout: Path) -> list[str]:
    """Return the test files of the models whose experts transformers can dispatch."""
    files = []
    for path in sorted((checkout / "src/transformers/models").glob("*/modeling_*.py")):
        name = path.parent.name
        tests = checkout / "tests/models" / name / f"test_{path.stem}.py"
        if "@use_experts_implementation" in path.read_text() and tests.exists():
            files.append(str(tests.relative_to(checkout)))
    return files


def make_environment(checkout: Path, site: Path) -> dict[str, str]:
    """Return the environment in which a checkout's tests import its source and this package."""
    paths = [checkout / "src", checkout, site, CHECKOUT, CHECKOUT / "tools"]
    extra = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1"}
    variables = os.environ  # noqa: TID251 (passed to the child process)
    return {**variables, **extra, "CUDA_VISIBLE_DEVICES": ""}


def run(checkout: Path, site: Path, files: Iterable[str], side: str, result_file: Path) -> None:
    """Run transformers' tests on one side, and append a line per case to `result_file`.

    side: "theirs" or "ours".

    Raises RuntimeError if pytest itself fails, because cases would then be missing on both sides.
    """
    result_file.parent.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
    ]
    command += ["-p", "hf_suites.upstream_plugin", *files]
    env = make_environment(checkout, site) | {
        "HF_SUITES_SIDE": side,
        "HF_SUITES_INTO": str(result_file),
    }
    code = subprocess.run(command, cwd=checkout, env=env, check=False).returncode
    # A crash by a signal does not raise, because cases that are missing on one side are a result.
    if code > pytest.ExitCode.TESTS_FAILED and code != pytest.ExitCode.NO_TESTS_COLLECTED:
        raise RuntimeError(f"pytest: got exit code {code} on side {side}, need 0, 1 or 5")


@dataclass(frozen=True)
class ResultFolder:
    """A folder with the results of each side, one line per case, and the list of finished files."""

    folder: Path

    def get_path(self, side: str) -> Path:
        """Return the result file of a side."""
        return self.folder / f"{side}.jsonl"

    @property
    def files(self) -> list[str]:
        """The test files that have been run on both sides."""
        done_file = self.folder / "done.txt"
        return done_file.read_text().splitlines() if done_file.exists() else []

    def finish(self, files: Iterable[str]) -> None:
        """Mark test files as run."""
        with (self.folder / "done.txt").open("a") as done_file:
            done_file.writelines(f"{file}\n" for file in files)

    def list_outcomes(self) -> list[Case]:
        """Return the outcomes of all cases. A test file without cases counts as a case."""
        theirs, ours = map(self._read, SIDES)
        return judge(theirs, ours, self.files)

    def _read(self, side: str) -> dict[str, dict[str, Any]]:
        """Return the results of a side by case, for the included cases of finished files."""
        if not self.get_path(side).exists():
            return {}
        lines = [json.loads(line) for line in self.get_path(side).read_text().splitlines()]
        ran = {line["case"]: line for line in lines if _get_file(line["case"]) in self.files}
        return {case: line for case, line in ran.items() if is_included(case.rpartition("::")[2])}


def _get_file(case: str) -> str:
    return case.partition("::")[0]


def is_included(test: str) -> bool:
    """Return whether a test runs experts, by its name. pytest's -k would also match the file."""
    return any(word in test for word in INCLUDED_WORDS) and not any(
        word in test for word in EXCLUDED_WORDS
    )


def reevaluate(case: Case, checkout: Path, site: Path) -> Case:
    """Judge a failed comparison of implementations again, by the errors against float64."""
    if case.outcome is not Outcome.OURS or "eager_matches_batched" not in case.name:
        return case
    command = [sys.executable, "-m", "hf_suites.float64_errors", f"tests/models/{case.name}"]
    env = make_environment(checkout, site)
    process = subprocess.run(
        command, cwd=checkout, env=env, check=False, capture_output=True, text=True
    )
    if process.returncode:
        return case
    return judge_by_errors(case, json.loads(process.stdout.splitlines()[-1]))


def judge_by_errors(case: Case, errors: Mapping[str, float]) -> Case:
    """Attribute a mismatch to one side. Our error may exceed theirs by at most 25 %."""
    ours, theirs = errors["modular_kernel"], max(errors["eager"], errors["batched_mm"])
    detail = f"against float64 ours {ours:.2e}, eager {errors['eager']:.2e}"
    if ours <= 1.25 * theirs:
        return replace(case, outcome=Outcome.THEIRS, why=f"its tolerance of 1e-4: {detail}")
    return replace(case, why=f"{case.why} {detail}")


def judge(
    theirs: Mapping[str, Mapping[str, Any]],
    ours: Mapping[str, Mapping[str, Any]],
    files: Iterable[str] = (),
) -> list[Case]:
    """Return the outcome of every case of either side, and of every file without cases."""
    names = dict.fromkeys((*theirs, *ours))
    cases = [_judge_case(name, theirs.get(name), ours.get(name)) for name in names]
    without_cases = dict.fromkeys(file for file in files if file not in set(map(_get_file, names)))
    detail = "its tests were not collected"
    return cases + [
        Case(SUITE, _shorten_name(file), Outcome.NOT_USABLE, detail) for file in without_cases
    ]


def _shorten_name(name: str) -> str:
    return name.removeprefix("tests/models/")


def _judge_case(
    name: str, theirs: Mapping[str, Any] | None, ours: Mapping[str, Any] | None
) -> Case:
    short_name = _shorten_name(name)
    if theirs is None or theirs["outcome"] != "passed":
        detail = "not run without ours" if theirs is None else theirs["outcome"]
        return Case(SUITE, short_name, Outcome.NOT_USABLE, detail)
    if ours is None or ours["outcome"] == "lost":
        return Case(SUITE, short_name, Outcome.RAW, "did not finish with ours")
    if ours["outcome"] == "passed":
        return Case(SUITE, short_name, Outcome.AGREE if ours["ran"] else Outcome.NOT_REACHED)
    message = ours["why"].partition("modular_kernel.errors.")[2]
    error_type = getattr(errors, message.partition(":")[0], None)
    # Other errors of this package indicate defects, such as memory corruption or lost ranks.
    if error_type is not None and issubclass(
        error_type, (errors.InputError, errors.IncompatibleError)
    ):
        return Case(SUITE, short_name, Outcome.REFUSED, message)
    return Case(SUITE, short_name, Outcome.OURS, ours["why"])
