"""What is timed for a choice, in which order, and within which seconds."""

import gc
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from modular_kernel.measure.routing_patterns import RoutingKind
from modular_kernel.select.budget import Budget
from modular_kernel.select.cache import Cache
from modular_kernel.select.candidates import Candidates
from modular_kernel.select.inputs import make_weights, plain, situation, weight_bytes
from modular_kernel.select.memory import free_bytes, gigabytes
from modular_kernel.select.process_group import Team
from modular_kernel.select.record import Bucket, Options
from modular_kernel.select.timing import Stopwatch
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.tensors import ExpertWeights

_LOG = logging.getLogger("modular_kernel.select")
_SILENT_S = 5.0  # how long a caller waits without a word
_OF_FREE = 0.8  # of the free memory may be weights

Tell = Callable[[Bucket], object]


@dataclass(frozen=True)
class Found:
    """buckets: with outcomes, ascending. timed_now: the tokens of those that were timed now, in so
    many seconds. left: why what may be faster was not timed; "" if it was. notes: what a reader
    should know."""

    buckets: tuple[Bucket, ...]
    timed_now: tuple[int, ...] = ()
    seconds: float = 0.0
    left: str = ""
    notes: tuple[str, ...] = ()


@dataclass
class Search:
    """Finds outcomes of the pairings that may be faster than the default.

    routing: as RoutingKind parses. fresh: time again what the cache has. tell: called on rank 0
    with each bucket when it was timed. Collective over ranks.
    """

    problem: Problem
    machine: Machine
    team: Team
    candidates: Candidates
    options: Options
    cache: Cache
    budget: Budget
    routing: str = "uniform"
    replicated: bool = False
    fresh: bool = False
    tell: Tell | None = None

    def run(self) -> Found:
        """Take what the cache has, and time the rest, few tokens first, within the budget."""
        if not self._wanted:
            return Found((), left=self._reason())
        cached, notes = self._cached()
        usable = () if self.fresh else cached
        if not self._missing(usable):
            return Found(usable, notes=notes)
        if not self.budget.allows():
            return Found(usable, left=self._reason(), notes=notes)
        with ExitStack() as stack:
            notes += self._in_turn(stack)
            if not self.fresh:  # another process may have measured while this one waited
                usable = self._cached()[0]
            whole = {bucket.tokens for bucket in cached if self.options.whole(bucket)}
            with self._announced():
                new, left, more = self._measure(usable, whole)
        made = {bucket.tokens: bucket for bucket in (*usable, *new)}
        buckets = tuple(made[tokens] for tokens in sorted(made))
        seconds = self.team.leader(self.budget.spent)
        return Found(buckets, tuple(b.tokens for b in new), seconds, left, notes + more)

    @property
    def _wanted(self) -> tuple[int, ...]:
        """The buckets at which something may be faster than the default, ascending."""
        return tuple(t for t in self.options.tokens if self.options.challengers(t))

    def _reason(self) -> str:
        """Say why something may stay untimed; "" if there is nothing to time."""
        if self.candidates.silent:
            return next(iter(self.candidates.silent.values()))
        return f"budget of {self.budget.seconds:g} s spent" if self._wanted else ""

    @contextmanager
    def _announced(self) -> Iterator[None]:
        """Say once what a caller waits for who is not told of each bucket."""
        quiet = self.team.rank or self.tell is not None
        words = "timing %d pairings for at most %g s, this once: the cache keeps their times"
        challengers = {pair for t in self._wanted for pair in self.options.challengers(t)}
        facts = (len(challengers) + 1, self.budget.seconds)
        timer = threading.Timer(_SILENT_S, _LOG.warning, (words, *facts))
        timer.daemon = True
        if not quiet:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _cached(self) -> tuple[tuple[Bucket, ...], tuple[str, ...]]:
        """Rank 0's view, for all: only what is asked for, and only what can be trusted."""
        found = self.team.leader(self.cache.load() if self.team.rank == 0 else None)
        assert found is not None
        if found.record is None:
            return (), found.notes
        have = (found.record.at(tokens) for tokens in self._wanted)
        trusted = [self._trusted(bucket) for bucket in have if bucket is not None]
        return tuple(bucket for bucket in trusted if bucket is not None), found.notes

    def _trusted(self, bucket: Bucket) -> Bucket | None:
        """Without pairings that are not valid now; None if ratios are to another default."""
        valid = self.options.ordered(bucket.tokens)
        kept = tuple(outcome for outcome in bucket.outcomes if outcome.pair in valid)
        found = Bucket(bucket.tokens, bucket.default, kept)
        default = next((pair for pair in valid if pair not in found.failed), valid[0])
        return found if kept and found.default == default else None

    def _missing(self, buckets: Sequence[Bucket]) -> tuple[int, ...]:
        whole = {bucket.tokens for bucket in buckets if self.options.whole(bucket)}
        return tuple(tokens for tokens in self._wanted if tokens not in whole)

    def _in_turn(self, stack: ExitStack) -> tuple[str, ...]:
        """Wait for a process that measures the same: two at once would spoil each other's times."""
        mine = True
        if self.team.rank == 0:
            try:
                lock = self.cache.locked(wait_s=self.budget.left, of="timing")
                mine = stack.enter_context(lock)
            except OSError:
                mine = True  # nowhere to keep a lock, so nobody to wait for
        if self.team.leader(mine):
            return ()
        return ("another process may be timing the same: these times may be disturbed",)

    def _measure(
        self, found: Sequence[Bucket], whole: set[int]
    ) -> tuple[list[Bucket], str, tuple[str, ...]]:
        """Time what `found` lacks; returns that, why something is left, and notes.

        whole: where the cache has all, which a bucket that was only begun must not replace.
        """
        missing, begun = self._missing(found), {b.tokens: b for b in found}
        new, notes = list[Bucket](), list[str]()
        if not missing:
            return new, "", ()
        problem = plain(self.problem)
        weights, why = self._weights(problem)
        if weights is None:
            return new, why, ()
        left = ""
        for tokens in missing:
            if not self.budget.allows(2):  # the default, and one to compare it with
                left = self._reason()
                break
            bucket = self._bucket(problem.with_tokens(tokens), weights, begun.get(tokens))
            done = self.options.whole(bucket)
            if done or (bucket.outcomes and tokens not in whole):
                new.append(bucket)
                if self.team.rank == 0:
                    notes += [n for n in self.cache.keep([bucket]) if n not in notes]
                    if self.tell is not None:
                        self.tell(bucket)
            if not done:
                left = self._reason()
                break
        del weights
        _free(self.machine)
        return new, left, self.team.leader(tuple(notes))

    def _bucket(self, problem: Problem, weights: ExpertWeights, begun: Bucket | None) -> Bucket:
        kind, options = RoutingKind.parse(self.routing), self.options
        with torch.no_grad():
            with self.budget.step():
                given = situation(problem, weights, kind, replicated=self.replicated)
            watch = Stopwatch(
                given,
                options.ordered(problem.tokens),
                self.candidates.graph,
                self.machine,
                self.team,
                self.budget,
            )
            if begun is not None:
                watch.outcomes.update({outcome.pair: outcome for outcome in begun.outcomes})
            return watch.bucket(options.challengers(problem.tokens))

    def _weights(self, problem: Problem) -> tuple[ExpertWeights | None, str]:
        """None, and why, where they do not fit on some rank, or take all of the budget."""
        device = _device(self.machine)
        free, need = free_bytes(device), weight_bytes(problem)
        fits = all(self.team.all(free is None or need <= _OF_FREE * free))
        if not fits:
            left = gigabytes(min(f for f in self.team.all(free) if f is not None))
            return None, f"weights take {gigabytes(need)}, {left} are free"
        late = self.budget.over if self.team.size == 1 else None
        try:
            with torch.no_grad():  # ranks may hold unlike numbers of experts, and ask in step only
                return make_weights(problem, device, late), ""
        except TimeoutError as error:
            return None, f"{self._reason()}: {error}"


def _device(machine: Machine) -> torch.device:
    if machine.device == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _free(machine: Machine) -> None:
    if machine.device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
