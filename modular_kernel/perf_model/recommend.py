"""The recommended pairing for a phase, the runner-up, and what would change the recommendation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from modular_kernel.catalog import Catalog, load_catalog
from modular_kernel.perf_model.estimate import Estimate, SizeResult
from modular_kernel.perf_model.machines import BASE_PACKAGES, OF_DEEP_EP_1

DECODE, PREFILL = "decode", "prefill"
PHASE_TOKENS = {DECODE: 128, PREFILL: 4096}  # per rank, unless the user gives others
MAX_DECODE_TOKENS = 256  # per rank; calls with more tokens are a prefill
TIE = 1.03  # times up to this multiple of the fastest count as equal
TYPICAL_ERROR = 1.15  # ratio by which an estimate may be wrong, see docs/sizing.md
# The number of tokens is doubled and halved this often in search of another recommendation.
_OCTAVES = 4
_MAX_TOKENS = 1 << 17

SizeAt = Callable[[int], SizeResult]


@dataclass(frozen=True)
class Recommendation:
    """The recommended pairing.

    runner_up: the fastest other estimate. changes: descriptions of what would change the
    recommendation.
    """

    phase: str
    best: Estimate
    runner_up: Estimate | None
    changes: tuple[str, ...]

    @property
    def close(self) -> bool:
        """Whether the runner-up is within the error of estimates, so that only a timing decides."""
        runner_up = self.runner_up
        return runner_up is not None and runner_up.seconds <= TYPICAL_ERROR * self.best.seconds


def phase_of(tokens: int) -> str:
    """Return the phase whose calls have this many tokens on each rank."""
    return DECODE if tokens <= MAX_DECODE_TOKENS else PREFILL


def best_of(result: SizeResult) -> Estimate | None:
    """Return the recommended estimate; None if there is no estimate.

    Of the estimates within TIE of the fastest, it is the one with the fewest optional packages, and
    of those the first in the order of the catalog, which also determines the default pairing.
    """
    if not result.estimates:
        return None
    catalog, fastest = load_catalog(), result.estimates[0].seconds
    tied = [estimate for estimate in result.estimates if estimate.seconds <= TIE * fastest]
    experts, exchanges = catalog.names("experts"), catalog.names("prepare_finalize")
    return min(
        tied,
        key=lambda e: (
            len(_packages_of(catalog, e)),
            exchanges.index(e.prepare_finalize),
            experts.index(e.experts_part),
        ),
    )


def recommend(
    phase: str, result: SizeResult, size_at: SizeAt, complete: Sequence[SizeResult]
) -> Recommendation | None:
    """Return the recommendation for the estimates of `result`; None if there are none.

    size_at: estimates the same layer with another number of tokens per rank. complete: estimates of
    the same work on machines with every package, see `complete_machines`.
    """
    best = best_of(result)
    if best is None:
        return None
    others = [estimate for estimate in result.estimates if estimate is not best]
    runner_up = others[0] if others else None
    changes = _by_packages(best, result, complete) + _by_tokens(best, result, size_at)
    return Recommendation(phase, best, runner_up, tuple(changes))


def _by_packages(best: Estimate, result: SizeResult, complete: Sequence[SizeResult]) -> list[str]:
    """Describe the fastest pairing that only needs more packages, if it is faster than `best`."""
    choices = [(best_of(other), other.machine) for other in complete]
    faster = [(e, m) for e, m in choices if e is not None and e.seconds * TIE < best.seconds]
    if not faster:
        return []
    choice, machine = min(faster, key=lambda pair: pair[0].seconds)
    missing = _packages_of(load_catalog(), choice) - result.machine.packages
    if OF_DEEP_EP_1 in result.machine.packages - machine.packages:
        missing |= {"deep_ep"}  # the machine has the other generation
    generation = 1 if OF_DEEP_EP_1 in machine.packages else 2
    names = sorted(missing - {OF_DEEP_EP_1})
    needed = ", ".join(f"{n} {generation}" if n == "deep_ep" else n for n in names)
    ratio = choice.seconds / best.seconds
    return [f"with {needed}: {choice.pairing}, {ratio:.2f} x the time"]


def _by_tokens(best: Estimate, result: SizeResult, size_at: SizeAt) -> list[str]:
    """Describe the nearest larger and smaller number of tokens with another recommendation."""
    tokens, changes = result.problem.tokens, []
    for direction in (1, -1):
        for octave in range(1, _OCTAVES + 1):
            count = tokens << octave if direction > 0 else tokens >> octave
            if not 1 <= count <= _MAX_TOKENS:
                break
            other = size_at(count)
            choice = best_of(other)
            if choice is None or choice.pairing == best.pairing:
                continue
            same = next((e for e in other.estimates if e.pairing == best.pairing), None)
            if same is not None and choice.seconds * TIE >= same.seconds:
                continue
            word = "from" if direction > 0 else "down to"
            gain = ", because the pair above is refused or does not fit there"
            if same is not None:
                gain = f", {choice.seconds / same.seconds:.2f} x the time"
            changes.append(f"{word} {count} tokens on each rank: {choice.pairing}{gain}")
            break
    return changes


def _packages_of(catalog: Catalog, estimate: Estimate) -> frozenset[str]:
    """Return the optional packages that a pairing needs."""
    parts = (
        catalog.prepare_finalize(estimate.prepare_finalize),
        catalog.experts(estimate.experts_part),
    )
    return frozenset(name for part in parts for name in part.requires.packages) - BASE_PACKAGES
