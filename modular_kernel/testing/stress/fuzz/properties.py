"""Targets as Hypothesis properties: one configuration, saved failures, and shrinking."""

from collections.abc import Iterator
from random import Random
from typing import Any
from unittest import SkipTest

from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis.database import DirectoryBasedExampleDatabase, ExampleDatabase

from modular_kernel.testing.stress.fuzz.outcome import BAD, GOOD, RAW, FuzzOutcome, run_or_outcome
from modular_kernel.testing.stress.fuzz.target import Target

# Hypothesis tells failures apart by their exception type, so that it never shrinks a crash of one
# kind to a failure of another.
_FAILURES: dict[str, type[AssertionError]] = {
    kind: type(kind.title().replace(" ", ""), (AssertionError,), {}) for kind in BAD
}
_BUFFER_BYTES = 8192  # far more than the choices of one input
DATABASE = ".hypothesis/examples"


class TargetProperty:
    """The property that every input of a target has a good outcome.

    database: where failing inputs are kept for later runs; None keeps them nowhere.
    """

    def __init__(self, target: Target[Any], database: ExampleDatabase | None = None) -> None:
        self.target = target
        self.last = FuzzOutcome(GOOD[0])

        self._database = database
        self._fuzz = self._test().hypothesis.fuzz_one_input

    def _test(self, *phases: Phase) -> Any:
        """Return the Hypothesis test. Hypothesis accepts one set of settings per test."""

        def holds(case: Any) -> None:
            self.last = run_or_outcome(self.target.name, lambda: self.target.check(case))
            if self.last.kind in BAD:
                raise _FAILURES[self.last.kind](self.last.what)

        # The key of the database is made of the name and the source.
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
        """Return the outcome of the input that the bytes of `rng` stand for.

        A failing input is saved in the database.
        """
        failures = tuple(_FAILURES.values())
        while True:
            try:
                if self._fuzz(rng.randbytes(_BUFFER_BYTES)) is not None:
                    return self.last
            except failures:
                return self.last

    def failures(self) -> Iterator[FuzzOutcome]:
        """Run the explicit examples, then the saved failures; yield one shrunk failure at most."""
        phases = Phase.explicit, Phase.reuse, Phase.shrink
        try:
            self._test(*phases)()
        except SkipTest:  # neither explicit examples nor saved failures
            return
        except Exception as error:  # noqa: BLE001 (Hypothesis reports a failure in several ways)
            unstable = FuzzOutcome(RAW, f"{self.target.name}: not reproducible: {error!r}")
            yield self.last if self.last.kind in BAD else unstable


def directory_database() -> ExampleDatabase:
    """Return the database of failing inputs in the working directory."""
    return DirectoryBasedExampleDatabase(DATABASE)
