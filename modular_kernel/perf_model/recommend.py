"""Recommend a pairing for a phase (prefill or decode), and describe what would change it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from modular_kernel.catalog import Catalog, load_catalog
from modular_kernel.perf_model.estimate import Estimate, PairingEstimates
from modular_kernel.perf_model.machines import BASE_PACKAGES, DEEP_EP_1_PACKAGE

DECODE, PREFILL = "decode", "prefill"
PHASE_TOKENS = {DECODE: 128, PREFILL: 4096}  # default number of tokens per rank
MAX_DECODE_TOKENS = 256  # tokens per rank; calls with more tokens are prefill
TIE_RATIO = 1.03  # times up to this multiple of the shortest time count as equal
TYPICAL_ERROR_RATIO = 1.15  # factor by which an estimate may be wrong, see docs/sizing.md
# Maximum number of doublings or halvings of the tokens in the search for another recommendation.
_MAX_DOUBLINGS = 4
_MAX_TOKENS = 1 << 17

EstimateAt = Callable[[int], PairingEstimates]


@dataclass(frozen=True)
class Recommendation:
    """The recommended pairing.

    runner_up: the fastest other estimate.
    changes: descriptions of changes with which another pairing would be recommended.
    """

    phase: str
    best: Estimate
    runner_up: Estimate | None
    changes: tuple[str, ...]

    @property
    def is_close(self) -> bool:
        """Whether the runner-up is at most TYPICAL_ERROR_RATIO times as slow as the best."""
        runner_up = self.runner_up
        return (
            runner_up is not None and runner_up.seconds <= TYPICAL_ERROR_RATIO * self.best.seconds
        )


def phase_of(tokens: int) -> str:
    """Return the phase of calls with this number of tokens per rank."""
    return DECODE if tokens <= MAX_DECODE_TOKENS else PREFILL


def select_best(result: PairingEstimates) -> Estimate | None:
    """Return the recommended estimate, or None if there is no estimate.

    Estimates that are at most TIE_RATIO times as slow as the fastest are considered equal. Among
    them, the pairing with the fewest optional packages is recommended. If several pairings need
    the same number of packages, the first one in the catalog is recommended.
    """
    if not result.estimates:
        return None
    catalog, fastest = load_catalog(), result.estimates[0].seconds
    tied = [estimate for estimate in result.estimates if estimate.seconds <= TIE_RATIO * fastest]
    experts, exchanges = catalog.names("experts"), catalog.names("prepare_finalize")
    return min(
        tied,
        key=lambda e: (
            len(_collect_packages(catalog, e)),
            exchanges.index(e.prepare_finalize),
            experts.index(e.experts_part),
        ),
    )


def recommend(
    phase: str,
    result: PairingEstimates,
    estimate_at: EstimateAt,
    with_all_packages: Sequence[PairingEstimates],
) -> Recommendation | None:
    """Return the recommendation for the estimates of `result`, or None if it has no estimates.

    estimate_at: estimates the same layer with another number of tokens per rank.
    with_all_packages: estimates of the same work on `machines_with_all_packages`.
    """
    best = select_best(result)
    if best is None:
        return None
    others = [estimate for estimate in result.estimates if estimate is not best]
    runner_up = others[0] if others else None
    changes = _describe_changes_by_packages(
        best, result, with_all_packages
    ) + _describe_changes_by_tokens(best, result, estimate_at)
    return Recommendation(phase, best, runner_up, tuple(changes))


def _describe_changes_by_packages(
    best: Estimate, result: PairingEstimates, with_all_packages: Sequence[PairingEstimates]
) -> list[str]:
    """Describe the fastest pairing with more packages, if it is faster than `best`."""
    choices = [
        (select_best(package_result), package_result.machine)
        for package_result in with_all_packages
    ]
    faster = [(e, m) for e, m in choices if e is not None and e.seconds * TIE_RATIO < best.seconds]
    if not faster:
        return []
    best_choice, machine = min(faster, key=lambda pair: pair[0].seconds)
    missing = _collect_packages(load_catalog(), best_choice) - result.machine.packages
    if DEEP_EP_1_PACKAGE in result.machine.packages - machine.packages:
        missing |= {"deep_ep"}  # the machine has the other version
    version = 1 if DEEP_EP_1_PACKAGE in machine.packages else 2
    names = sorted(missing - {DEEP_EP_1_PACKAGE})
    package_names = ", ".join(f"{n} {version}" if n == "deep_ep" else n for n in names)
    ratio = best_choice.seconds / best.seconds
    return [f"with {package_names}: {best_choice.pairing}, {ratio:.2f} x the time"]


def _describe_changes_by_tokens(
    best: Estimate, result: PairingEstimates, estimate_at: EstimateAt
) -> list[str]:
    """Describe the nearest larger and smaller numbers of tokens with another recommendation."""
    tokens, changes = result.problem.tokens, []
    for direction in (1, -1):
        for doublings in range(1, _MAX_DOUBLINGS + 1):
            num_tokens = tokens << doublings if direction > 0 else tokens >> doublings
            if not 1 <= num_tokens <= _MAX_TOKENS:
                break
            other_result = estimate_at(num_tokens)
            other_choice = select_best(other_result)
            if other_choice is None or other_choice.pairing == best.pairing:
                continue
            same_pairing = next(
                (e for e in other_result.estimates if e.pairing == best.pairing), None
            )
            if (
                same_pairing is not None
                and other_choice.seconds * TIE_RATIO >= same_pairing.seconds
            ):
                continue
            preposition = "from" if direction > 0 else "down to"
            reason = "because the pair above is refused or does not fit there"
            if same_pairing is not None:
                reason = f"{other_choice.seconds / same_pairing.seconds:.2f} x the time"
            changes.append(
                f"{preposition} {num_tokens} tokens on each rank: {other_choice.pairing}, {reason}"
            )
            break
    return changes


def _collect_packages(catalog: Catalog, estimate: Estimate) -> frozenset[str]:
    """Return the optional packages that a pairing needs."""
    parts = (
        catalog.prepare_finalize(estimate.prepare_finalize),
        catalog.experts(estimate.experts_part),
    )
    return frozenset(name for part in parts for name in part.requires.packages) - BASE_PACKAGES
