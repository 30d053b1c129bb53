"""How a case can end, who is to blame for a difference, and the counts of all of them."""

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
ROUNDED = "mismatch: roundings"
OURS = "mismatch: ours"
RAW = "raw exception"
NO_REFERENCE = "their reference raises"
REPEATED = "the same after shrinking"
SKIPPED = "skipped by their test"
LEFT_OUT = "left out of the sample"
FAILURES = OURS, RAW
ENDINGS = (
    AGREE,
    REFUSED,
    MISSING,
    SKIPPED,
    REPEATED,
    LEFT_OUT,
    THEIRS,
    ROUNDED,
    NO_REFERENCE,
    OURS,
    RAW,
)
_WORST = (OURS, RAW, ROUNDED, THEIRS, REFUSED, AGREE)


# What our parts raise before anything runs; other errors of ours are defects.
Refusal = (InputError, IncompatibleError)


class MissingError(Exception):
    """What a case asks for has no expression in our words."""


class SkippedError(Exception):
    """Their test skips the case itself."""


class TheirError(Exception):
    """Their reference raised."""


@dataclass(frozen=True)
class Ending:
    """How one case ended. why: in words that many cases share. shrunk: what was made smaller.

    key: the case as it was computed; None if it is no other's.
    """

    outcome: str
    why: str = ""
    shrunk: str = ""
    compared: tuple[str, ...] = ()  # the parts that gave a number
    key: object = None


@dataclass(frozen=True)
class Suite:
    """A grid of theirs and what to do with a case of it. group: whose it is."""

    group: str
    name: str
    cases: Callable[[], Iterator[Params]]
    check: Callable[[Params], Ending]


@dataclass
class Tally:
    """What a suite came to."""

    suite: str
    cases: int = 0
    shrunk: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    compared: Counter[str] = field(default_factory=Counter)

    def add(self, ending: Ending) -> None:
        """Count one case."""
        self.cases += 1
        self.shrunk += bool(ending.shrunk)
        self.outcomes[ending.outcome] += 1
        self.compared.update(ending.compared)
        if ending.why:
            self.reasons[ending.outcome, ending.why] += 1

    @property
    def failed(self) -> bool:
        """Whether a case is our defect."""
        return any(self.outcomes[end] for end in FAILURES)


def run_suite(suite: Suite, most: int) -> Tally:
    """Try the cases of a suite, of more than `most` a random sample; none is lost.

    The sample is the same for the same suite and grid.
    """
    tally = Tally(f"{suite.group} {suite.name}")
    cases = list(suite.cases())
    taken = set(range(len(cases)))
    if len(cases) > most:
        taken = set(Random(suite.name).sample(range(len(cases)), most))
    seen: set[object] = set()
    for number, params in enumerate(cases):
        ending = _attempt(suite, params) if number in taken else Ending(LEFT_OUT)
        repeated = ending.key is not None and ending.key in seen
        if repeated and ending.outcome not in FAILURES:  # a failure never hides behind a key
            ending = Ending(REPEATED, shrunk=ending.shrunk)
        seen.add(ending.key)
        tally.add(ending)
    return tally


def _attempt(suite: Suite, params: Params) -> Ending:
    try:
        with torch.no_grad():
            return suite.check(params)
    except MissingError as error:
        return Ending(MISSING, str(error))
    except SkippedError as error:
        return Ending(SKIPPED, str(error))
    except TheirError as error:
        return Ending(NO_REFERENCE, str(error))
    except Refusal as error:
        return refused(error)
    except Exception as error:  # noqa: BLE001  (whatever it is, it is a finding)
        return Ending(RAW, f"{type(error).__name__}: {error} at {_shown(params)}"[:300])


def _short(error: Exception) -> str:
    """Return a refusal in one line: of an incompatible pairing, its first reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[min(1, len(lines) - 1)]}"[:160]


def _shown(params: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={value}" for key, value in params.items())


def theirs(reference: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Call a reference of theirs; what it raises is its own fault."""
    try:
        return reference(*args, **kwargs)
    except Exception as error:
        raise TheirError(f"{type(error).__name__}: {error}"[:200]) from error


def refused(error: Exception) -> Ending:
    """Return the ending of a part that refuses with a typed error."""
    return Ending(REFUSED, _short(error))


def worst(endings: Mapping[str, Ending], shrunk: str = "", key: object = None) -> Ending:
    """Return the ending of a case whose parts ended each in its own way: the worst of them.

    A refusal of some parts is the case's only where no part gave a number.
    """
    compared = tuple(name for name, end in endings.items() if end.outcome != REFUSED)
    for outcome in _WORST:
        of = {name: end for name, end in endings.items() if end.outcome == outcome}
        if of and (outcome != REFUSED or not compared):
            name, end = next(iter(of.items()))
            why = end.why if outcome in (AGREE, REFUSED) else f"{name}: {end.why}"
            return Ending(outcome, why, shrunk, compared, key)
    raise ValueError("no endings")


@dataclass(frozen=True)
class Tolerance:
    """Of one of their tests. mean: of the mean difference over the mean value, instead of each."""

    atol: float = 0.0
    rtol: float = 0.0
    mean: float | None = None

    def holds(self, ours: torch.Tensor, other: torch.Tensor) -> bool:
        """Say whether `ours` is as near to `other` as their test asks."""
        a, b = ours.double(), other.double()
        if a.shape != b.shape:
            return False
        if self.mean is not None:
            return bool((a - b).abs().mean() <= self.mean * b.abs().mean() + 1e-30)
        return bool(((a - b).abs() <= self.atol + self.rtol * b.abs()).all())


def error_of(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the norm of the error over the norm of the exact values; infinite for NaN."""
    if found.shape != exact.shape:
        return float("inf")
    error = float((found.double() - exact).norm() / exact.norm().clamp(min=1e-30))
    return error if error == error else float("inf")


def judged(
    ours: torch.Tensor, other: torch.Tensor, exact: torch.Tensor, tolerance: Tolerance, limit: float
) -> Ending:
    """Compare our result with theirs, and both with float64.

    limit: what our error's norm over the result's may be for roundings alone. It is asked beside
    their tolerance, which may be wider than the numbers that it is for, or narrower than roundings.
    """
    mine, their = error_of(ours, exact), error_of(other, exact)
    told = f"error to float64: ours {_round(mine)}, theirs {_round(their)}"
    if not mine <= limit:
        return Ending(OURS, f"{told}; limit {limit:.2g}")
    if tolerance.holds(ours, other):
        return Ending(AGREE)
    if their >= mine:
        return Ending(THEIRS, f"their error is larger; {told}")
    return Ending(ROUNDED, f"plain torch rounds as much; {told}")


def _round(error: float) -> str:
    """Return the power of two above: reasons are counted, and many cases share one."""
    if not 0 < error < float("inf"):
        return str(error)
    return f"2^{math.ceil(math.log2(error))}"
