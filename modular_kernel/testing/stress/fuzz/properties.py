"""Run fuzz targets with Hypothesis: a single configuration, or saved failures with shrinking.

A target has a Hypothesis strategy for inputs and a check of the outcome. A configuration is one
input, made from random bytes that a seed determines. Hypothesis saves failing inputs and shrinks
them, that is, it searches for simpler inputs that also fail.
"""

from collections.abc import Iterator
from random import Random
from typing import Any
from unittest import SkipTest

from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis.database import DirectoryBasedExampleDatabase, ExampleDatabase

from modular_kernel.testing.stress.fuzz.outcome import (
    FAILURE_KINDS,
    SUCCESS_KINDS,
    UNTYPED_ERROR,
    FuzzOutcome,
    run_or_classify,
)
from modular_kernel.testing.stress.fuzz.target import Target

# One exception type for each kind of failure, because Hypothesis does not shrink an input to one
# whose exception has another type.
_FAILURE_TYPES: dict[str, type[AssertionError]] = {
    kind: type(kind.title().replace(" ", ""), (AssertionError,), {}) for kind in FAILURE_KINDS
}
_BUFFER_BYTES = 8192  # far more than are needed to make one input
DATABASE = ".hypothesis/examples"


class TargetProperty:
    """The property that every input of a target has an outcome in SUCCESS_KINDS.

    database: saves failing inputs for later runs; None means that they are not saved.
    """

    def __init__(self, target: Target[Any], database: ExampleDatabase | None = None) -> None:
        self.target = target
        self.last = FuzzOutcome(SUCCESS_KINDS[0])  # outcome of the last input
        self._database = database
        self._fuzz = self._make_test().hypothesis.fuzz_one_input

    def _make_test(self, *phases: Phase) -> Any:
        """Make a new Hypothesis test, because a test accepts settings only once."""

        def holds(case: Any) -> None:
            self.last = run_or_classify(self.target.name, lambda: self.target.check(case))
            if self.last.kind in FAILURE_KINDS:
                raise _FAILURE_TYPES[self.last.kind](self.last.description)

        # Hypothesis derives the key of the database from the name and the source of the function.
        holds.__name__ = holds.__qualname__ = self.target.name
        test = given(case=self.target.cases)(holds)
        for case in self.target.examples:
            test = example(case=case)(test)
        return settings(
            database=self._database,
            deadline=None,
            phases=phases,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )(test)

    def run(self, rng: Random) -> FuzzOutcome:
        """Run the input that Hypothesis derives from the bytes of `rng`; return its outcome.

        Bytes from which no input can be made are skipped. Failing inputs are saved in the database.
        """
        failure_types = tuple(_FAILURE_TYPES.values())
        while True:
            try:
                if self._fuzz(rng.randbytes(_BUFFER_BYTES)) is not None:
                    return self.last
            except failure_types:
                return self.last

    def failures(self) -> Iterator[FuzzOutcome]:
        """Run the explicit examples and the saved failures; yield at most one shrunk failure."""
        phases = Phase.explicit, Phase.reuse, Phase.shrink
        try:
            self._make_test(*phases)()
        except SkipTest:  # there are no explicit examples or saved failures
            return
        except Exception as error:  # noqa: BLE001 (Hypothesis reports a failure in several ways)
            unstable_failure = FuzzOutcome(
                UNTYPED_ERROR, f"{self.target.name}: not reproducible: {error!r}"
            )
            yield self.last if self.last.kind in FAILURE_KINDS else unstable_failure


def open_directory_database() -> ExampleDatabase:
    """Open the database of failing inputs in the working directory."""
    return DirectoryBasedExampleDatabase(DATABASE)
