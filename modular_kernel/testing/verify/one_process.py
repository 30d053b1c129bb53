"""`prove`: run every check on one case and say what failed, how exact it was, and how to repeat it.

Used alike by the test suite, by `mk test` and by a part's author.
"""

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from modular_kernel.catalog import this_machine
from modular_kernel.errors import CorruptionError, ModularKernelError
from modular_kernel.path_log import EnteredPath, watched_paths
from modular_kernel.replay.launch.runtime import known_launches
from modular_kernel.spec.problem import Machine
from modular_kernel.testing.cases.case import Case, command
from modular_kernel.testing.cases.path_coverage import PathCell, cells_of
from modular_kernel.testing.verify.checks import CHECKS, Check
from modular_kernel.testing.verify.trial import Build, Trial, build_kernel


@dataclass(frozen=True)
class Proof:
    """What came out of one case.

    error, bound: relative root mean square error of the first call, and how large it may be.
    failures: one line for each broken promise, "check: what"; empty if the case is proven.
    cells: what its calls entered, of a part with several paths.
    """

    case: Case
    machine: Machine
    error: float
    bound: float
    failures: tuple[str, ...]
    seconds: float
    invalid_ids: int = 0
    cells: frozenset[PathCell] = frozenset()

    @property
    def passed(self) -> bool:
        return not self.failures

    def __str__(self) -> str:
        accuracy = f"error {self.error:.2e} of {self.bound:.2e}"
        head = f"{self.case}: {'proven' if self.passed else 'FAILED'}, {accuracy}"
        if self.passed:
            return head
        lines = [f"  - {failure}" for failure in self.failures]
        return "\n".join([head, *lines, f"  {command(self.case)}"])


def prove(case: Case, machine: Machine | None = None, build: Build = build_kernel) -> Proof:
    """Run all checks. Raises IncompatibleError if the pairing is refused for this case.

    machine: None means this one. build: makes the kernel from (case, machine, poison).
    """
    machine = machine or this_machine()
    start = time.perf_counter()
    try:
        build(case, machine, False)  # refused pairings end here
    except ModularKernelError:
        raise
    except Exception as why:  # noqa: BLE001 (another's part may fail as it is made, too)
        seconds = time.perf_counter() - start
        return Proof(case, machine, math.inf, 0.0, (raised("build", why),), seconds)
    trial = Trial(case, machine, build)
    with (
        known_launches(),
        watched_paths() as entered,
    ):  # calls on equal inputs differ, if at all, in what launches are given
        failures = tuple(dict.fromkeys(findings(trial)))
    error, bound = _accuracy(trial)
    seconds = time.perf_counter() - start
    ids = trial.first.invalid_ids
    return Proof(case, machine, error, bound, failures, seconds, ids, _cells(entered))


def _cells(entered: Iterable[EnteredPath]) -> frozenset[PathCell]:
    """Return the cells of all the calls."""
    of_calls = (cells_of(call.path, call.problem, call.weights) for call in entered)
    return frozenset[PathCell]().union(*of_calls)


def findings(trial: Trial) -> Iterator[str]:
    """Failures of every check in order, as they are found; a check that raises has failed."""
    for check in CHECKS:
        yield from _run(check, trial)


def _accuracy(trial: Trial) -> tuple[float, float]:
    """Error and bound of the first call, if there was one."""
    if "first_call" not in trial.__dict__:
        return math.inf, 0.0
    comparison = trial.first.compare(trial.eager)
    return comparison.error, comparison.bound


def _run(check: Check, trial: Trial) -> Iterator[str]:
    name = check.__name__
    try:
        for finding in check(trial):
            yield f"{name}: {finding}"
    # A faulty part can fail in any way; that is a finding about it, not the end of the proof.
    except Exception as error:  # noqa: BLE001
        yield raised(name, error)


def raised(check: str, error: Exception) -> str:
    """Return the finding that a check raised."""
    if isinstance(error, CorruptionError):
        return f"red_zones: {error}"
    return f"{check}: raised {type(error).__name__}: {error}"
