"""What a routing asks of one rank: expected values, no random draws but of which experts are hot.

Letters as in modular_kernel.tensors; W ranks, e = E / W experts each, T tokens of each rank, and
pi_i the chance that a token has expert i among its K (sum over i: K).

uniform   pi_i = K / E
zipfA     K draws without replacement with odds 1 / place ** A: an expert is drawn by the time its
          exponential clock rings before lambda, pi_i = 1 - exp(-lambda / place ** A), lambda such
          that they sum to K
hotN      pi = 1 for min(N, K) experts, the others share what is left of K

Of group-limited routing, uniform alone: M of G equal blocks of experts are drawn, then K of theirs.
"""

import math
import random
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from statistics import NormalDist, fmean

from modular_kernel.errors import ConfigurationError
from modular_kernel.measure.routing_patterns import RoutingKind

_SHUFFLES = 64  # of experts over ranks, where experts are unlike
_HALVINGS = 100


@dataclass(frozen=True)
class EstimatedLoad:
    """Of the rank with the most work. pairs: (token, expert) products. touched: of its experts.

    tokens: of all ranks, that have an expert there.
    meets: the chance that a token has an expert on a given other rank, mean and on this rank.
    meets_host: on a given other host, mean.
    """

    pairs: float
    touched: float
    tokens: float
    meets: float
    meets_fullest: float
    meets_host: float


@dataclass(frozen=True)
class Groups:
    """Group-limited routing: a token's experts are in `kept` of `count` equal groups."""

    count: int = 1
    kept: int = 1

    def check(self, experts: int, top_k: int) -> None:
        """ConfigurationError where that many experts have no such groups."""
        fits = 1 <= self.kept <= self.count and experts % self.count == 0
        if not fits or experts // self.count * self.kept < top_k:
            got = f"{self.kept} of {self.count} groups"
            need = f"equal groups of {experts} experts, and {top_k} in those that are kept"
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
    """For `tokens` tokens of each of `world_size` ranks that hold blocks of the experts.

    per_host: ranks of a host; None: all of them.
    """
    if not 1 <= top_k <= experts or not 1 <= world_size <= experts:
        need = f"1 to experts = {experts}, both"
        raise ConfigurationError("top_k, world_size", got=(top_k, world_size), need=need)
    if tokens < 1:
        raise ConfigurationError("tokens", got=tokens, need=">= 1")
    groups.check(experts, top_k)
    hosts = max(1, -(-world_size // (per_host or world_size)))
    chances = inclusion(experts, top_k, kind)
    if kind.kind == "uniform":
        return _uniform(chances, top_k, world_size, tokens, hosts, groups)
    if groups.kept < groups.count:
        raise ConfigurationError("routing in groups", got=kind.kind, need="uniform")
    return _skewed(chances, world_size, tokens, hosts)


@cache
def inclusion(experts: int, top_k: int, kind: RoutingKind) -> tuple[float, ...]:
    """pi_i, the likeliest first."""
    if kind.kind == "uniform":
        return (top_k / experts,) * experts
    if kind.kind == "hot":
        hot = min(int(kind.value), top_k)
        rest = (top_k - hot) / (experts - hot) if experts > hot else 0.0
        return (1.0,) * hot + (rest,) * (experts - hot)
    odds = [(place + 1) ** -kind.value for place in range(experts)]
    low, high = 0.0, 1.0
    while _total(odds, high) < top_k and high < 1e300:
        high *= 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _total(odds, middle) < top_k else (low, middle)
    return tuple(-math.expm1(-high * odd) for odd in odds)


def _total(odds: list[float], rate: float) -> float:
    return sum(-math.expm1(-rate * odd) for odd in odds)


def _touched(chances: list[float], tokens: int) -> float:
    """Experts with one of so many tokens: the sum of 1 - (1 - pi) ** tokens."""
    return sum(1 - (1 - chance) ** tokens for chance in chances)


def _uniform(
    chances: tuple[float, ...], top_k: int, world: int, tokens: int, hosts: int, groups: Groups
) -> EstimatedLoad:
    """Ranks are alike; the fullest of W has Phi^-1((W - 3/8) / (W + 1/4)) standard deviations more
    than the mean (Blom), of a hypergeometric number of pairs for each token."""
    experts, everyone = len(chances), tokens * world
    held = experts / world
    share = held / experts
    variance = top_k * share * (1 - share) * (experts - top_k) / max(experts - 1, 1)
    more = NormalDist().inv_cdf((world - 0.375) / (world + 0.25)) * math.sqrt(everyone * variance)
    pairs = everyone * top_k * share + more
    touched = held * (1 - (1 - top_k / experts) ** everyone)
    meets = 1 - _misses_in_groups(experts, top_k, held, groups)
    host = 1 - _misses_in_groups(experts, top_k, experts / hosts, groups)
    return EstimatedLoad(pairs, min(touched, pairs), everyone * meets, meets, meets, host)


def _misses_in_groups(experts: int, top_k: int, held: float, groups: Groups) -> float:
    """Return the chance that none of a token's experts is among `held` in a row: the mean over how
    many of the groups there are kept."""
    size, kept = experts / groups.count, groups.kept
    there = max(1, round(held / size))  # groups that a rank or host has, or has a part of
    whole = math.comb(groups.count, kept)
    found = 0.0
    for both in range(max(0, kept - (groups.count - there)), min(there, kept) + 1):
        ways = math.comb(there, both) * math.comb(groups.count - there, kept - both)
        found += ways / whole * _misses(round(kept * size), top_k, held * both / there)
    return found


def _misses(experts: int, top_k: int, held: float) -> float:
    """Return the chance that none of K distinct experts is in `held`: C(E - e, K) / C(E, K)."""
    left = experts - held
    if left < top_k:
        return 0.0
    return math.exp(_log_choose(left, top_k) - _log_choose(experts, top_k))


def _log_choose(n: float, k: float) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _skewed(chances: tuple[float, ...], world: int, tokens: int, hosts: int) -> EstimatedLoad:
    """Which rank has which of the unlike experts is drawn anew each time: means over shuffles with
    a fixed seed of what the fullest rank gets."""
    generator, everyone = random.Random(0), tokens * world
    found: list[EstimatedLoad] = []
    for _ in range(_SHUFFLES if world > 1 else 1):
        order = list(chances)
        generator.shuffle(order)
        ranks = _shared(order, world)
        fullest = max(ranks, key=sum)
        meets, on_hosts = ([_met(block) for block in blocks]
                           for blocks in (ranks, _shared(order, hosts)))  # fmt: skip
        most = _met(fullest)
        pairs, touched = everyone * sum(fullest), _touched(fullest, everyone)
        host = fmean(on_hosts)
        found.append(EstimatedLoad(pairs, touched, everyone * most, fmean(meets), most, host))
    names = EstimatedLoad.__dataclass_fields__
    return EstimatedLoad(*(fmean(getattr(load, name) for load in found) for name in names))


def _shared(chances: list[float], among: int) -> list[list[float]]:
    """Cut into blocks of one size, or one more."""
    ends = [len(chances) * each // among for each in range(among + 1)]
    return [chances[start:stop] for start, stop in pairwise(ends)]


def _met(chances: list[float]) -> float:
    """Return the chance that a token has one of these experts."""
    return 1 - math.prod(1 - chance for chance in chances)
