"""compose: the pairing, or pairings by number of tokens, that measured fastest on this machine.

    kernel = compose(problem)            # times what the cache does not have, within the budget
    kernel = compose(problem, terms=Terms(budget=0))    # what the cache has, and nothing is timed
    plan = kernel.plan()
    plan.warm_up(weights)                # compiles; from here on a call only launches

With the same cache the same choice is made. Over ranks (problem.parallel.world_size > 1) every rank
calls it, with the process group; all of them get the same choice, whose times are the slowest
rank's.
"""

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from modular_kernel.catalog import this_machine
from modular_kernel.errors import ConfigurationError, IncompatibleError
from modular_kernel.fields import check_fields, expect
from modular_kernel.measure.routing import RoutingKind
from modular_kernel.printable import counted, printable
from modular_kernel.select import keys
from modular_kernel.select.cache import Cache
from modular_kernel.select.candidates import Candidates, find
from modular_kernel.select.choice import Choice
from modular_kernel.select.inputs import make_weights, plain, situation, weight_bytes
from modular_kernel.select.kernel import ComposedKernel, build
from modular_kernel.select.memory import free_bytes, gigabytes
from modular_kernel.select.record import Bucket, Pair, TimedOutcome, bucket_tokens, in_halves
from modular_kernel.select.team import Team, team_of
from modular_kernel.select.timing import Stopwatch
from modular_kernel.settings import read_settings
from modular_kernel.tensors import ExpertWeights
from modular_kernel.types import Machine, Problem

_LOG = logging.getLogger("modular_kernel.select")
_MOST_BUCKETS = 48
_SILENT_S = 5.0  # how long a caller waits without a word
_OF_FREE = 0.8  # of the free memory may be weights

Tell = Callable[[Bucket], object]


@dataclass(frozen=True, kw_only=True)
class Terms:
    """How to choose.

    tokens: numbers to measure; None takes powers of two up to problem.tokens. budget: seconds that
    measuring may take, compiling included; what it does not reach is measured by a later call. 0
    measures nothing. routing: as bench.routing.RoutingKind parses. replicated: with several ranks,
    each passes the same tokens. folder: of the cache; None takes the settings'. fresh: measure
    again what the cache has. tell: called with each bucket when it was measured.
    """

    tokens: tuple[int, ...] | None = None
    budget: float = 120.0
    routing: str = "uniform"
    replicated: bool = False
    folder: Path | None = None
    fresh: bool = False
    tell: Tell | None = None

    def __post_init__(self) -> None:
        check_fields(self, "terms: ")
        if not 0 <= self.budget < float("inf"):
            raise ConfigurationError("budget", got=self.budget, need="seconds >= 0")
        RoutingKind.parse(self.routing)
        given = self.tokens
        if given is not None and (not 1 <= len(given) <= _MOST_BUCKETS or min(given) < 1):
            need = f"1 to {_MOST_BUCKETS} numbers >= 1"
            raise ConfigurationError("tokens to measure", got=given, need=need)

    def buckets(self, problem: Problem) -> tuple[int, ...]:
        """Return the numbers of tokens to measure, ascending."""
        if self.tokens is None:
            return bucket_tokens(problem.tokens)
        if max(self.tokens) > problem.tokens:
            need = f"<= {problem.tokens}, the problem's"
            raise ConfigurationError("tokens to measure", got=max(self.tokens), need=need)
        return tuple(sorted(set(self.tokens)))


def compose(
    problem: Problem,
    machine: Machine | None = None,
    *,
    group: object | None = None,
    terms: Terms | None = None,
) -> ComposedKernel:
    """Build one kernel of the fastest valid pairing at every number of tokens.

    group: the process group where ranks take part; None means the default one. IncompatibleError
    with every reason if no pairing is valid.
    """
    machine = this_machine() if machine is None else machine
    choice = choose(problem, machine, group=group, terms=terms)
    for note in choice.notes:
        _LOG.warning("%s", printable(note))
    if not choice.segments:
        reasons = [r for verdict in choice.candidates.refused for r in verdict.rejections]
        raise IncompatibleError(f"every pairing for {problem}", reasons)
    return build(choice, machine, group)


def choose(
    problem: Problem,
    machine: Machine | None = None,
    *,
    group: object | None = None,
    terms: Terms | None = None,
) -> Choice:
    """Return what `compose` would build, and why. Collective over ranks."""
    expect("problem", problem, Problem)
    expect("machine", machine, Machine | None)
    expect("terms", terms, Terms | None)
    machine, terms = machine or this_machine(), terms or Terms()
    team, tokens = team_of(problem, group), terms.buckets(problem)
    # What is not measured is served too, up to the problem's tokens.
    asked = tuple(dict.fromkeys((*tokens, problem.tokens)))
    candidates = find(problem, machine, asked, replicated=terms.replicated)
    identity = keys.identity(problem, machine, routing=terms.routing, replicated=terms.replicated)
    facts = identity | keys.versions(machine)
    _alike(team, facts | {"tokens": str(asked), "fresh": str(terms.fresh)})
    cache = Cache(terms.folder or read_settings().cache_dir, identity, keys.versions(machine))
    search = _Search(problem, machine, terms, team, tokens, candidates, cache)
    buckets, timed, notes = search.run()
    return Choice(
        problem, machine, terms.replicated, tokens, candidates, buckets, facts, timed, notes
    )


def _alike(team: Team, facts: keys.Facts) -> None:
    """Ranks of unlike machines, versions or terms cannot share one choice, nor time in step."""
    first, *others = team.all(facts)
    for rank, other in enumerate(others, 1):
        unlike = {n: other.get(n) for n in first if other.get(n) != first[n]}
        if unlike:
            need = {name: first[name] for name in unlike}
            raise ConfigurationError(f"rank {rank}'s choice", got=unlike, need=f"{need} as rank 0")


@dataclass
class _Search:
    problem: Problem
    machine: Machine
    terms: Terms
    team: Team
    tokens: tuple[int, ...]
    candidates: Candidates
    cache: Cache

    def run(self) -> tuple[tuple[Bucket, ...], int, tuple[str, ...]]:
        """Buckets from the cache and from the clock, how many were timed, and notes."""
        end = time.monotonic() + self.terms.budget
        found, notes = self._cached()
        kept = {bucket.tokens for bucket in found if self._whole(bucket)}
        if self.terms.fresh:
            found = ()
        if not self._missing(found) or not self._wanted(end):
            buckets, more = self._used(found)
            return buckets, 0, notes + more
        with ExitStack() as stack:
            notes += self._in_turn(stack, end)
            if not self.terms.fresh:  # another process may have measured while this one waited
                found = self._cached()[0]
            with self._told():
                new, more = self._measure(found, kept, end)
        made = {b.tokens: b for b in (*found, *new)}
        buckets, begun = self._used([made[t] for t in self.tokens if t in made])
        return buckets, sum(bucket in new for bucket in buckets), notes + more + begun

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Say once what a caller waits for who is not told of each bucket."""
        quiet = self.team.rank or self.terms.tell is not None
        words = "timing %d pairings for at most %g s, this once: the cache keeps their times"
        facts = (len(self.candidates.order), self.terms.budget)
        timer = threading.Timer(_SILENT_S, _LOG.warning, (words, *facts))
        timer.daemon = True
        if not quiet:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _used(self, buckets: Sequence[Bucket]) -> tuple[tuple[Bucket, ...], tuple[str, ...]]:
        """Return the whole ones; without any what was begun, and notes that say so."""
        whole = tuple(bucket for bucket in buckets if self._whole(bucket))
        notes = (
            f"of {counted(bucket.tokens, 'token')} {len(bucket.outcomes)} of "
            f"{len(self.candidates.valid[bucket.tokens])} pairings were timed: a longer budget "
            "times the others"
            for bucket in buckets
        )
        return (whole, ()) if whole else (tuple(buckets), tuple(notes))

    def _wanted(self, end: float) -> bool:
        """Whether there is anything to time, and time for it: by the clock of rank 0, for all."""
        loud = [p for p in self.candidates.order if p not in self.candidates.silent]
        return self.team.leader(bool(loud) and time.monotonic() < end)

    def _cached(self) -> tuple[tuple[Bucket, ...], tuple[str, ...]]:
        """Rank 0's view, for all: only what is asked for, and only pairings that are valid."""
        found = self.cache.load() if self.team.rank == 0 else None
        found = self.team.leader(found)
        assert found is not None
        if found.record is None:
            return (), found.notes
        have = (found.record.at(t) for t in self.tokens)
        trusted = [self._trusted(bucket) for bucket in have if bucket is not None]
        return tuple(bucket for bucket in trusted if bucket.outcomes), found.notes

    def _trusted(self, bucket: Bucket) -> Bucket:
        """Without pairings that are not valid now."""
        valid = self.candidates.valid[bucket.tokens]
        return Bucket(bucket.tokens, tuple(o for o in bucket.outcomes if o.pair in valid))

    def _whole(self, bucket: Bucket) -> bool:
        """Whether every valid pairing has an outcome."""
        return {o.pair for o in bucket.outcomes} == set(self.candidates.valid[bucket.tokens])

    def _missing(self, buckets: Sequence[Bucket]) -> tuple[int, ...]:
        have = {b.tokens for b in buckets if self._whole(b)}
        return tuple(t for t in in_halves(self.tokens) if t not in have)

    def _in_turn(self, stack: ExitStack, end: float) -> tuple[str, ...]:
        """Wait for a process that measures the same: two at once would spoil each other's times."""
        mine = True
        if self.team.rank == 0:
            try:
                lock = self.cache.locked(wait_s=max(end - time.monotonic(), 0.0), of="timing")
                mine = stack.enter_context(lock)
            except OSError:
                mine = True  # nowhere to keep a lock, so nobody to wait for
        if self.team.leader(mine):
            return ()
        return ("another process may be timing the same: these times may be disturbed",)

    def _measure(
        self, found: Sequence[Bucket], kept: set[int], end: float
    ) -> tuple[tuple[Bucket, ...], tuple[str, ...]]:
        """Time what `found` lacks. kept: where a bucket that was begun must not replace a whole."""
        problem, new, notes = plain(self.problem), list[Bucket](), list[str]()
        missing, begun = self._missing(found), {b.tokens: b.outcomes for b in found}

        def late() -> bool:
            return self.team.leader(time.monotonic() >= end)

        weights, why = self._weights(problem, late) if missing else (None, "")
        if weights is None:
            return (), (why,) if why else ()
        left = len(missing)
        for tokens in missing:
            if late():
                break
            known = {o.pair: o for o in begun.get(tokens, ())}
            bucket = self._bucket(problem.with_tokens(tokens), weights, known, late)
            whole = self._whole(bucket)
            if whole or (bucket.outcomes and tokens not in kept):
                new.append(bucket)
                if self.team.rank == 0:
                    notes += [n for n in self.cache.keep([bucket]) if n not in notes]
            if not whole:
                break
            left -= 1
            if self.team.rank == 0 and self.terms.tell is not None:
                self.terms.tell(bucket)
        if left:
            notes.append(
                f"the budget of {self.terms.budget:g} s left {left} of "
                f"{len(self.tokens)} numbers of tokens unmeasured"
            )
        del weights
        _free(self.machine)
        return tuple(new), self.team.leader(tuple(notes))

    def _bucket(
        self,
        problem: Problem,
        weights: ExpertWeights,
        known: dict[Pair, TimedOutcome],
        late: Callable[[], bool],
    ) -> Bucket:
        kind = RoutingKind.parse(self.terms.routing)
        with torch.no_grad():
            given = situation(problem, weights, kind, replicated=self.terms.replicated)
            watch = Stopwatch(given, self.candidates, self.machine, self.team, late)
            watch.outcomes.update(known)
            return watch.bucket()

    def _weights(
        self, problem: Problem, late: Callable[[], bool]
    ) -> tuple[ExpertWeights | None, str]:
        """None, and why, where they do not fit on some rank, or take all of the budget."""
        device = _device(self.machine)
        free, need = free_bytes(device), weight_bytes(problem)
        fits = all(self.team.all(free is None or need <= _OF_FREE * free))
        if not fits:
            left = gigabytes(min(f for f in self.team.all(free) if f is not None))
            return None, f"nothing was timed: weights take {gigabytes(need)}, {left} are free"
        try:
            with torch.no_grad():  # ranks may hold unlike numbers of experts, and ask in step only
                return make_weights(problem, device, late if self.team.size == 1 else None), ""
        except TimeoutError as error:
            return None, f"nothing was timed: {error}"


def _device(machine: Machine) -> torch.device:
    if machine.device == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _free(machine: Machine) -> None:
    if machine.device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
