"""Run every check on one test case in this process.

A test case is a pairing (an exchange component and an experts component, called "parts") with a
problem (the shapes, dtypes and options of a layer) and the kind of inputs.
"""

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from modular_kernel.catalog import this_machine
from modular_kernel.errors import CorruptionError, ModularKernelError
from modular_kernel.path_log import EnteredPath, record_paths
from modular_kernel.replay.launch.runtime import cache_interpreted_launches
from modular_kernel.spec.problem import Machine
from modular_kernel.testing.cases.case import Case, command
from modular_kernel.testing.cases.path_coverage import PathCombination, list_combinations
from modular_kernel.testing.verify.checks import CHECKS, Check
from modular_kernel.testing.verify.trial import Build, Trial, build_kernel


@dataclass(frozen=True)
class Proof:
    """Result of one case.

    Attributes:
        error: relative root mean square error of the first call.
        bound: maximum allowed `error`.
        failures: one line "check: finding" for each failure; empty if the case passed.
        seconds: wall-clock time of all checks.
        invalid_ids: number of invalid ids in the first call.
        path_combinations: the (code path, scheme, property) combinations that the calls entered,
            for experts parts with several code paths.
    """

    case: Case
    machine: Machine
    error: float
    bound: float
    failures: tuple[str, ...]
    seconds: float
    invalid_ids: int = 0
    path_combinations: frozenset[PathCombination] = frozenset()

    @property
    def passed(self) -> bool:
        return not self.failures

    def __str__(self) -> str:
        accuracy = f"error {self.error:.2e} of {self.bound:.2e}"
        summary = f"{self.case}: {'proven' if self.passed else 'FAILED'}, {accuracy}"
        if self.passed:
            return summary
        lines = [f"  - {failure}" for failure in self.failures]
        return "\n".join([summary, *lines, f"  {command(self.case)}"])


def prove(case: Case, machine: Machine | None = None, build: Build = build_kernel) -> Proof:
    """Run all checks on a case. Raises IncompatibleError if the pairing is refused for this case.

    machine: the machine to run on; None means the current one.
    build: makes the kernel from (case, machine, poison). With poison, the kernel fills its buffers
        with invalid values before each call.
    """
    machine = machine or this_machine()
    start = time.perf_counter()
    try:
        build(case, machine, False)  # raises if the pairing is refused
    except ModularKernelError:
        raise
    except Exception as build_error:  # noqa: BLE001 (a third-party part may raise anything)
        seconds = time.perf_counter() - start
        return Proof(
            case, machine, math.inf, 0.0, (format_raised_error("build", build_error),), seconds
        )
    trial = Trial(case, machine, build)
    # The launch cache skips interpreted launches that repeat an earlier one.
    with cache_interpreted_launches(), record_paths() as entered_paths:
        failures = tuple(dict.fromkeys(run_all_checks(trial)))
    error, bound = _measure_accuracy(trial)
    seconds = time.perf_counter() - start
    num_invalid_ids = trial.first.invalid_ids
    return Proof(
        case,
        machine,
        error,
        bound,
        failures,
        seconds,
        num_invalid_ids,
        _collect_combinations(entered_paths),
    )


def _collect_combinations(entered_paths: Iterable[EnteredPath]) -> frozenset[PathCombination]:
    combinations = (
        list_combinations(call.path, call.problem, call.weights) for call in entered_paths
    )
    return frozenset[PathCombination]().union(*combinations)


def run_all_checks(trial: Trial) -> Iterator[str]:
    """Yield the failures of every check in order. A check that raises an error fails."""
    for check in CHECKS:
        yield from _run_check(check, trial)


def _measure_accuracy(trial: Trial) -> tuple[float, float]:
    """Return the error and bound of the first call, or (inf, 0) if the call did not complete."""
    if "first_call" not in trial.__dict__:
        return math.inf, 0.0
    comparison = trial.first.compare(trial.eager_output)
    return comparison.error, comparison.bound


def _run_check(check: Check, trial: Trial) -> Iterator[str]:
    name = name_check(check)
    try:
        for finding in check(trial):
            yield f"{name}: {finding}"
    # A faulty part may raise anything; report it as a finding and run the remaining checks.
    except Exception as error:  # noqa: BLE001
        yield format_raised_error(name, error)


def name_check(check: Check) -> str:
    """Return the name of the check's function without "check_"."""
    return check.__name__.removeprefix("check_")


def format_raised_error(check: str, error: Exception) -> str:
    """Format the finding for a check that raised `error`."""
    if isinstance(error, CorruptionError):
        return f"red_zones: {error}"
    return f"{check}: raised {type(error).__name__}: {error}"
