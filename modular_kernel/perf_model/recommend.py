"""Recommend a pairing for a phase (prefill or decode), and describe what would change it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from modular_kernel.catalog import Catalog, load_catalog
from modular_kernel.perf_model.estimate import Estimate, PairingEstimates
from modular_kernel.perf_model.machines import BASE_PACKAGES, DEEP_EP_1_PACKAGE
from modular_kernel.text import pluralize

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


def explain_runner_up(best: Estimate, runner_up: Estimate) -> str:
    """Return why `select_best` prefers `best` to the runner-up."""
    times = sorted((best.seconds, runner_up.seconds))
    if times[1] <= TIE_RATIO * times[0]:
        catalog = load_catalog()
        packages, best_packages = (
            _collect_packages(catalog, estimate) for estimate in (runner_up, best)
        )
        tie = f"a tie within {(TIE_RATIO - 1) * 100:.0f} %, second because"
        if len(packages) > len(best_packages):
            names = ", ".join(sorted((packages - best_packages) - {DEEP_EP_1_PACKAGE}))
            return f"{tie} it also needs {names}"
        field = "prepare_finalize"
        if best.prepare_finalize == runner_up.prepare_finalize:
            field = "experts_part"
        first, second = (getattr(estimate, field) for estimate in (best, runner_up))
        return f"{tie} `mk list` has {first} before {second}"
    kinds = {
        "exchange": (_get_exchange_seconds(best), _get_exchange_seconds(runner_up)),
        "experts": (best.experts.seconds, runner_up.experts.seconds),
    }
    kind = max(kinds, key=lambda kind: kinds[kind][1] - kinds[kind][0])
    best_us, us = (f"{seconds * 1e6:,.0f}" for seconds in kinds[kind])
    return f"slower {kind}, {us} us instead of {best_us} us"


def _get_exchange_seconds(estimate: Estimate) -> float:
    return estimate.exchange.dispatch + estimate.exchange.combine


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
    needed = _collect_packages(load_catalog(), best_choice, is_base_included=True)
    missing = needed - result.machine.packages
    if DEEP_EP_1_PACKAGE in result.machine.packages - machine.packages:
        missing |= {"deep_ep"}  # the machine has the other version
    version = 1 if DEEP_EP_1_PACKAGE in machine.packages else 2
    names = sorted(missing - {DEEP_EP_1_PACKAGE})
    package_names = ", ".join(f"{n} {version}" if n == "deep_ep" else n for n in names)
    has_all_packages = any(
        result.machine.packages == package_result.machine.packages
        for package_result in with_all_packages
    )
    packages = needed | (BASE_PACKAGES if has_all_packages else result.machine.packages)
    if "deep_ep" in needed:  # only one of its versions can be installed
        packages = packages - {DEEP_EP_1_PACKAGE} | (machine.packages & {DEEP_EP_1_PACKAGE})
    ratio = best_choice.seconds / best.seconds
    option = f"--packages {','.join(sorted(packages))}"
    choice = f"{best_choice.pairing}, {ratio:.2f} x the time"
    return [f"faster with {package_names} ({option}): {choice}"]


def _describe_changes_by_tokens(
    best: Estimate, result: PairingEstimates, estimate_at: EstimateAt
) -> list[str]:
    """Describe the nearest larger and smaller numbers of tokens with another recommendation."""
    changes = []
    for is_larger in (True, False):
        counts = _list_token_counts(result.problem.tokens, is_larger=is_larger)
        choice: Estimate | None = None
        same_choice_counts: list[int] = []
        reason, is_open = "", True
        for doublings, num_tokens in enumerate(counts, 1):
            if choice is None and doublings > _MAX_DOUBLINGS:
                break
            other_result = estimate_at(num_tokens)
            other_choice = _select_other(best, other_result)
            if choice is None and other_choice is not None:
                choice, reason = other_choice, _compare_with_best(other_choice, best, other_result)
            if choice is None:
                continue
            if not other_result.estimates:
                break
            if other_choice is None or other_choice.pairing != choice.pairing:
                is_open = False
                break
            same_choice_counts.append(num_tokens)
        if choice is not None:
            tokens_text = _format_token_range(
                same_choice_counts, is_larger=is_larger, is_open=is_open
            )
            option = f"--tokens {same_choice_counts[0]}"
            changes.append(f"at {tokens_text} on each rank ({option}): {choice.pairing}, {reason}")
    return changes


def _list_token_counts(tokens: int, *, is_larger: bool) -> list[int]:
    """Return `tokens` doubled repeatedly up to _MAX_TOKENS, or halved repeatedly down to 1."""
    factors = range(1, _MAX_TOKENS.bit_length())
    counts = [tokens << n if is_larger else tokens >> n for n in factors]
    return [count for count in counts if 1 <= count <= _MAX_TOKENS]


def _select_other(best: Estimate, result: PairingEstimates) -> Estimate | None:
    """Return the recommended estimate if its pairing is not `best`'s and is clearly faster."""
    choice = select_best(result)
    if choice is None or choice.pairing == best.pairing:
        return None
    same_pairing = _find_same_pairing(best, result)
    is_clearly_faster = same_pairing is None or choice.seconds * TIE_RATIO < same_pairing.seconds
    return choice if is_clearly_faster else None


def _find_same_pairing(best: Estimate, result: PairingEstimates) -> Estimate | None:
    return next((e for e in result.estimates if e.pairing == best.pairing), None)


def _compare_with_best(choice: Estimate, best: Estimate, result: PairingEstimates) -> str:
    same_pairing = _find_same_pairing(best, result)
    if same_pairing is None:
        return "because the pairing above is refused or does not fit there"
    return f"{choice.seconds / same_pairing.seconds:.2f} x the time of the pairing above"


def _format_token_range(counts: Sequence[int], *, is_larger: bool, is_open: bool) -> str:
    """Return text such as "32 tokens or fewer" or "16 to 32 tokens".

    counts: consecutive doublings or halvings, in the order of the search.
    is_open: whether the search ended with the last of them.
    """
    first, last = counts[0], counts[-1]
    if is_open and first > 1:
        return f"{first:,} tokens or {'more' if is_larger else 'fewer'}"
    if first == last:
        return f"{first:,} {pluralize('token', first)}"
    return f"{min(first, last):,} to {max(first, last):,} tokens"


def _collect_packages(
    catalog: Catalog, estimate: Estimate, *, is_base_included: bool = False
) -> frozenset[str]:
    """Return the packages that a pairing needs, by default without BASE_PACKAGES."""
    parts = (
        catalog.prepare_finalize(estimate.prepare_finalize),
        catalog.experts(estimate.experts_part),
    )
    packages = frozenset(name for part in parts for name in part.requires.packages)
    return packages if is_base_included else packages - BASE_PACKAGES
