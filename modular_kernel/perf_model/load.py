"""Expected load of the busiest rank under a routing pattern (`measure.routing_patterns`).

There are W ranks with e = E / W experts each, and T tokens per rank. pi_i is the probability that
expert i is among the K experts of a token. The sum of all pi_i is K:

    uniform   pi_i = K / E
    zipfA     K draws without replacement with odds 1 / r ** A, where the most popular expert has
              r = 1; approximated by pi_i = 1 - exp(-lambda / r ** A), with lambda such that they
              sum to K
    hotN      pi_i = 1 for min(N, K) experts; the other pi_i are equal

Expectations are computed in closed form, except for the placement of popular experts on ranks,
which is sampled.

Group-limited routing draws M of G equal groups of experts, and then K experts in these groups. It
is supported for uniform routing only.
"""

import math
import random
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from statistics import NormalDist, fmean

from modular_kernel.errors import ConfigurationError
from modular_kernel.measure.routing_patterns import RoutingKind

_RANDOM_PLACEMENTS = 64  # number of sampled placements
_BISECTION_STEPS = 100


@dataclass(frozen=True)
class EstimatedLoad:
    """Expected load of the rank with the most (token, expert) pairs, the "fullest" rank.

    pairs: number of pairs of the fullest rank.
    touched: number of experts of the fullest rank that have a pair.
    tokens: number of tokens, of all ranks, that have an expert on the fullest rank.
    rank_probability: probability that a token has an expert on a given rank, averaged over ranks.
    fullest_rank_probability: probability that a token has an expert on the fullest rank.
    host_probability: probability that a token has an expert on a given host, averaged over hosts.
    """

    pairs: float
    touched: float
    tokens: float
    rank_probability: float
    fullest_rank_probability: float
    host_probability: float


@dataclass(frozen=True)
class Groups:
    """Group-limited routing: all experts of a token are in `kept` of `count` equal groups."""

    count: int = 1
    kept: int = 1

    def check(self, experts: int, top_k: int) -> None:
        """Raise ConfigurationError if the experts cannot be divided into these groups."""
        divides = 1 <= self.kept <= self.count and experts % self.count == 0
        if not divides or experts // self.count * self.kept < top_k:
            got = f"{self.kept} of {self.count} groups"
            need = f"a divisor of {experts} experts, and at least {top_k} experts in kept groups"
            raise ConfigurationError("groups of experts", got=got, need=need)


ONE_GROUP = Groups()


def rank_load(
    *,
    experts: int,
    top_k: int,
    world_size: int,
    tokens: int,
    kind: RoutingKind,
    per_host: int | None = None,
    groups: Groups = ONE_GROUP,
) -> EstimatedLoad:
    """Return the load for `tokens` tokens on each of `world_size` ranks.

    Experts are distributed over ranks in equal blocks.

    per_host: ranks per host; None means that all ranks are on one host.

    Raises ConfigurationError for sizes out of range.
    """
    if not 1 <= top_k <= experts or not 1 <= world_size <= experts:
        need = f"both from 1 to {experts}, the number of experts"
        raise ConfigurationError("top_k, world_size", got=(top_k, world_size), need=need)
    if tokens < 1:
        raise ConfigurationError("tokens", got=tokens, need=">= 1")
    groups.check(experts, top_k)
    hosts = max(1, -(-world_size // (per_host or world_size)))
    probabilities = compute_inclusion_probabilities(experts, top_k, kind)
    if kind.kind == "uniform":
        return _compute_uniform_load(probabilities, top_k, world_size, tokens, hosts, groups)
    if groups.kept < groups.count:
        raise ConfigurationError("routing in groups", got=kind.kind, need="uniform")
    return _compute_skewed_load(probabilities, world_size, tokens, hosts)


@cache
def compute_inclusion_probabilities(
    experts: int, top_k: int, kind: RoutingKind
) -> tuple[float, ...]:
    """Return the probabilities pi_i of the module's docstring, in descending order."""
    if kind.kind == "uniform":
        return (top_k / experts,) * experts
    if kind.kind == "hot":
        hot = min(int(kind.value), top_k)
        other_probability = (top_k - hot) / (experts - hot) if experts > hot else 0.0
        return (1.0,) * hot + (other_probability,) * (experts - hot)
    odds = [(index + 1) ** -kind.value for index in range(experts)]
    low, high = 0.0, 1.0
    while _compute_expected_experts(odds, high) < top_k and high < 1e300:
        high *= 2
    for _ in range(_BISECTION_STEPS):
        midpoint = (low + high) / 2
        if _compute_expected_experts(odds, midpoint) < top_k:
            low = midpoint
        else:
            high = midpoint
    return tuple(-math.expm1(-high * odd) for odd in odds)


def _compute_expected_experts(odds: list[float], rate: float) -> float:
    return sum(-math.expm1(-rate * odd) for odd in odds)


def _compute_expected_touched(probabilities: list[float], tokens: int) -> float:
    """Return the expected number of experts with a token: the sum of 1 - (1 - pi) ** tokens."""
    return sum(1 - (1 - probability) ** tokens for probability in probabilities)


def _compute_uniform_load(
    probabilities: tuple[float, ...],
    top_k: int,
    world_size: int,
    tokens: int,
    hosts: int,
    groups: Groups,
) -> EstimatedLoad:
    """Return the load if all experts are equally likely.

    The number of a token's pairs on a rank has a hypergeometric distribution. The fullest of W
    ranks has Phi^-1((W - 3/8) / (W + 1/4)) standard deviations more pairs than the mean (Blom's
    approximation of the expected maximum of W normal values).
    """
    experts, all_tokens = len(probabilities), tokens * world_size
    local_experts = experts / world_size
    fraction = local_experts / experts
    variance = top_k * fraction * (1 - fraction) * (experts - top_k) / max(experts - 1, 1)
    deviations = NormalDist().inv_cdf((world_size - 0.375) / (world_size + 0.25))
    pairs = all_tokens * top_k * fraction + deviations * math.sqrt(all_tokens * variance)
    touched = local_experts * (1 - (1 - top_k / experts) ** all_tokens)
    rank_probability = 1 - _compute_miss_probability_in_groups(
        experts, top_k, local_experts, groups
    )
    host_probability = 1 - _compute_miss_probability_in_groups(
        experts, top_k, experts / hosts, groups
    )
    return EstimatedLoad(
        pairs,
        min(touched, pairs),
        all_tokens * rank_probability,
        rank_probability,
        rank_probability,
        host_probability,
    )


def _compute_miss_probability_in_groups(
    experts: int, top_k: int, block_size: float, groups: Groups
) -> float:
    """Return the probability that none of a token's experts is in a block of adjacent experts.

    The probability is a sum over the number of kept groups that overlap the block.
    """
    group_size, kept = experts / groups.count, groups.kept
    local_groups = max(1, round(block_size / group_size))  # groups that overlap the block
    combinations = math.comb(groups.count, kept)
    probability = 0.0
    other_groups = groups.count - local_groups
    for kept_local in range(max(0, kept - other_groups), min(local_groups, kept) + 1):
        ways = math.comb(local_groups, kept_local) * math.comb(other_groups, kept - kept_local)
        kept_block = block_size * kept_local / local_groups
        miss_probability = _compute_miss_probability(round(kept * group_size), top_k, kept_block)
        probability += ways / combinations * miss_probability
    return probability


def _compute_miss_probability(experts: int, top_k: int, block_size: float) -> float:
    """Return the probability that none of K experts is in a block: C(E - e, K) / C(E, K)."""
    others = experts - block_size
    if others < top_k:
        return 0.0
    return math.exp(_log_choose(others, top_k) - _log_choose(experts, top_k))


def _log_choose(n: float, k: float) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _compute_skewed_load(
    probabilities: tuple[float, ...], world_size: int, tokens: int, hosts: int
) -> EstimatedLoad:
    """Return the load of experts with unequal probabilities, averaged over random placements."""
    generator, all_tokens = random.Random(0), tokens * world_size
    loads: list[EstimatedLoad] = []
    for _ in range(_RANDOM_PLACEMENTS if world_size > 1 else 1):
        shuffled = list(probabilities)
        generator.shuffle(shuffled)
        ranks = _split_evenly(shuffled, world_size)
        fullest_rank = max(ranks, key=sum)
        p_ranks = [_compute_hit_probability(block) for block in ranks]
        p_hosts = [_compute_hit_probability(block) for block in _split_evenly(shuffled, hosts)]
        fullest_rank_probability = _compute_hit_probability(fullest_rank)
        pairs = all_tokens * sum(fullest_rank)
        touched = _compute_expected_touched(fullest_rank, all_tokens)
        loads.append(
            EstimatedLoad(
                pairs,
                touched,
                all_tokens * fullest_rank_probability,
                fmean(p_ranks),
                fullest_rank_probability,
                fmean(p_hosts),
            )
        )
    names = EstimatedLoad.__dataclass_fields__
    return EstimatedLoad(*(fmean(getattr(load, name) for load in loads) for name in names))


def _split_evenly(probabilities: list[float], num_blocks: int) -> list[list[float]]:
    """Split into contiguous blocks whose sizes differ by at most one."""
    ends = [len(probabilities) * index // num_blocks for index in range(num_blocks + 1)]
    return [probabilities[start:stop] for start, stop in pairwise(ends)]


def _compute_hit_probability(probabilities: list[float]) -> float:
    """Return the probability that a token has at least one of these experts."""
    return 1 - math.prod(1 - probability for probability in probabilities)
