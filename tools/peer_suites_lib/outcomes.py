"""Outcomes of the cases of other projects' test suites, and the counts of these outcomes.

A comparison with a float64 result determines which side of a mismatch is wrong.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random

import torch

from modular_kernel.errors import IncompatibleError, InputError
from peer_suites_lib.checkout import Params

AGREE = "agree"
REFUSED = "refused"
MISSING = "feature missing"
THEIRS = "mismatch: theirs"
ROUNDING_MISMATCH = "mismatch: roundings"
OURS = "mismatch: ours"
RAW = "raw exception"
REFERENCE_RAISED = "their reference raises"
REPEATED = "the same after shrinking"
SKIPPED = "skipped by their test"
LEFT_OUT = "left out of the sample"
FAILURES = OURS, RAW
OUTCOMES = (
    AGREE,
    REFUSED,
    MISSING,
    SKIPPED,
    REPEATED,
    LEFT_OUT,
    THEIRS,
    ROUNDING_MISMATCH,
    REFERENCE_RAISED,
    OURS,
    RAW,
)
_BY_SEVERITY = (OURS, RAW, ROUNDING_MISMATCH, THEIRS, REFUSED, AGREE)


# Exception classes with which our parts refuse a case before they run. Any other exception of our
# parts is a defect.
REFUSAL_ERRORS = (InputError, IncompatibleError)


class MissingError(Exception):
    """The case requires a feature that we do not have."""


class SkippedError(Exception):
    """The other project's test skips the case."""


class TheirError(Exception):
    """The other project's reference implementation raised an exception."""


@dataclass(frozen=True)
class CaseOutcome:
    """Outcome of a case.

    why: the reason, without details of the case, so that equal reasons can be counted.
    shrunk: sizes that were reduced.
    compared: names of the parts that returned a result.
    key: identity of the case after shrinking; None if no other case can equal it.
    """

    outcome: str
    why: str = ""
    shrunk: str = ""
    compared: tuple[str, ...] = ()
    key: object = None


@dataclass(frozen=True)
class Suite:
    """A parameter grid of another project, and the check of a case.

    group: name of the project.
    """

    group: str
    name: str
    cases: Callable[[], Iterator[Params]]
    check: Callable[[Params], CaseOutcome]


@dataclass
class Tally:
    """Counts of the outcomes of a suite."""

    suite: str
    cases: int = 0
    shrunk: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    compared: Counter[str] = field(default_factory=Counter)

    def add(self, case: CaseOutcome) -> None:
        self.cases += 1
        self.shrunk += bool(case.shrunk)
        self.outcomes[case.outcome] += 1
        self.compared.update(case.compared)
        if case.why:
            self.reasons[case.outcome, case.why] += 1

    @property
    def failed(self) -> bool:
        """Whether a case failed because of a defect of ours."""
        return any(self.outcomes[outcome] for outcome in FAILURES)


def run_suite(suite: Suite, max_cases: int) -> Tally:
    """Run the cases of a suite, or a random sample of `max_cases` of them, and count all outcomes.

    The sample depends only on the suite and its number of cases. The remaining cases are counted as
    left out.
    """
    tally = Tally(f"{suite.group} {suite.name}")
    cases = list(suite.cases())
    sampled = set(range(len(cases)))
    if len(cases) > max_cases:
        sampled = set(Random(suite.name).sample(range(len(cases)), max_cases))
    keys: set[object] = set()
    for index, params in enumerate(cases):
        case = _run_case(suite, params) if index in sampled else CaseOutcome(LEFT_OUT)
        is_repeated = case.key is not None and case.key in keys
        if is_repeated and case.outcome not in FAILURES:  # failures are never counted as repeated
            case = CaseOutcome(REPEATED, shrunk=case.shrunk)
        keys.add(case.key)
        tally.add(case)
    return tally


def _run_case(suite: Suite, params: Params) -> CaseOutcome:
    try:
        with torch.no_grad():
            return suite.check(params)
    except MissingError as error:
        return CaseOutcome(MISSING, str(error))
    except SkippedError as error:
        return CaseOutcome(SKIPPED, str(error))
    except TheirError as error:
        return CaseOutcome(REFERENCE_RAISED, str(error))
    except REFUSAL_ERRORS as error:
        return make_refusal_outcome(error)
    except Exception as error:  # noqa: BLE001  (every other exception is a defect)
        return CaseOutcome(
            RAW, f"{type(error).__name__}: {error} at {_format_params(params)}"[:300]
        )


def _format_error(error: Exception) -> str:
    """Format a refusal as one line.

    The message of an IncompatibleError lists its reasons from the second line on. Only the first
    reason is used.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[min(1, len(lines) - 1)]}"[:160]


def _format_params(params: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={value}" for key, value in params.items())


def call_reference(reference: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Call another project's reference. Raises TheirError for any exception in it."""
    try:
        return reference(*args, **kwargs)
    except Exception as error:
        raise TheirError(f"{type(error).__name__}: {error}"[:200]) from error


def make_refusal_outcome(error: Exception) -> CaseOutcome:
    """Return the outcome of a part that refuses with a typed error."""
    return CaseOutcome(REFUSED, _format_error(error))


def find_worst_outcome(
    outcomes: Mapping[str, CaseOutcome], shrunk: str = "", key: object = None
) -> CaseOutcome:
    """Return the outcome of a case, which is the worst outcome of its parts.

    The case counts as refused only if no part returned a result.
    """
    compared = tuple(name for name, part in outcomes.items() if part.outcome != REFUSED)
    for outcome in _BY_SEVERITY:
        matching = {name: part for name, part in outcomes.items() if part.outcome == outcome}
        if matching and (outcome != REFUSED or not compared):
            name, part = next(iter(matching.items()))
            reason = part.why if outcome in (AGREE, REFUSED) else f"{name}: {part.why}"
            return CaseOutcome(outcome, reason, shrunk, compared, key)
    raise ValueError("no outcomes")


@dataclass(frozen=True)
class Tolerance:
    """Tolerance of another project's test.

    atol, rtol: bounds for each element, as in torch.testing.assert_close. Ignored if `mean` is set.
    mean: bound on the mean difference divided by the mean magnitude.
    """

    atol: float = 0.0
    rtol: float = 0.0
    mean: float | None = None

    def accepts(self, ours: torch.Tensor, other: torch.Tensor) -> bool:
        """Return whether `ours` is close enough to `other` for their test."""
        a, b = ours.double(), other.double()
        if a.shape != b.shape:
            return False
        if self.mean is not None:
            return bool((a - b).abs().mean() <= self.mean * b.abs().mean() + 1e-30)
        return bool(((a - b).abs() <= self.atol + self.rtol * b.abs()).all())


def compute_relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative error in norm, or infinity if there is a NaN or the shapes differ."""
    if actual.shape != exact.shape:
        return float("inf")
    error = float((actual.double() - exact).norm() / exact.norm().clamp(min=1e-30))
    return error if error == error else float("inf")


def compare_with_exact(
    ours: torch.Tensor, other: torch.Tensor, exact: torch.Tensor, tolerance: Tolerance, limit: float
) -> CaseOutcome:
    """Compare our result with theirs, and both with float64.

    limit: largest relative error in norm that rounding can cause. Our error is compared with it
        first, because their tolerance may be larger than the values.
    """
    our_error, their_error = (
        compute_relative_error(ours, exact),
        compute_relative_error(other, exact),
    )
    description = f"error to float64: ours {_round_up(our_error)}, theirs {_round_up(their_error)}"
    if not our_error <= limit:
        return CaseOutcome(OURS, f"{description}; limit {limit:.2g}")
    if tolerance.accepts(ours, other):
        return CaseOutcome(AGREE)
    if their_error >= our_error:
        return CaseOutcome(THEIRS, f"their error is larger; {description}")
    return CaseOutcome(
        ROUNDING_MISMATCH, f"our error is larger, but within the limit for rounding; {description}"
    )


def _round_up(error: float) -> str:
    """Round an error up to a power of two, so that many cases share the same reason."""
    if not 0 < error < float("inf"):
        return str(error)
    return f"2^{math.ceil(math.log2(error))}"
