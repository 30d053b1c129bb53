"""Search for faster pairings: times the candidates within a budget, small token counts first."""

import gc
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from modular_kernel.measure.routing_patterns import RoutingKind
from modular_kernel.select.budget import Budget, free_bytes, gigabytes, ranks_sharing_memory
from modular_kernel.select.cache import Cache
from modular_kernel.select.candidates import Candidates
from modular_kernel.select.inputs import make_weights, make_workload, weight_bytes, without_inplace
from modular_kernel.select.process_group import Ranks
from modular_kernel.select.record import Bucket, Options
from modular_kernel.select.timing import Stopwatch
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.tensors import ExpertWeights

_LOG = logging.getLogger("modular_kernel.select")
_WARN_AFTER_SECONDS = 5.0  # delay of the log message that says why the caller has to wait
_MAX_FREE_FRACTION = 0.8  # of the free memory, for weights

BucketCallback = Callable[[Bucket], object]


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    buckets: measurements, new or cached, in ascending order of tokens. timed_now: token counts that
    this search timed. seconds: that it took. untimed_reason: why candidates were not timed, or "".
    notes: messages for the user.
    """

    buckets: tuple[Bucket, ...]
    timed_now: tuple[int, ...] = ()
    seconds: float = 0.0
    untimed_reason: str = ""
    notes: tuple[str, ...] = ()


@dataclass
class Search:
    """Search for pairings that are faster than the default. Collective over ranks.

    routing: in the syntax of RoutingKind.parse. replicated: whether all ranks pass the same tokens.
    fresh: whether to ignore cached times. on_bucket: called on rank 0 with each bucket after it was
    timed.
    """

    problem: Problem
    machine: Machine
    ranks: Ranks
    candidates: Candidates
    options: Options
    cache: Cache
    budget: Budget
    routing: str = "uniform"
    replicated: bool = False
    fresh: bool = False
    on_bucket: BucketCallback | None = None

    def run(self) -> SearchResult:
        """Load the cached buckets, and time the others within the budget."""
        if not self._tokens_to_time:
            return SearchResult((), untimed_reason=self._reason())
        cached, notes = self._load_cached()
        valid = () if self.fresh else cached
        if not self._missing(valid):
            return SearchResult(valid, notes=notes)
        if not self.budget.allows():
            return SearchResult(valid, untimed_reason=self._reason(), notes=notes)
        with ExitStack() as stack:
            notes += self._wait_for_lock(stack)
            if not self.fresh:  # another process may have measured during the wait
                valid = self._load_cached()[0]
            complete = {bucket.tokens for bucket in cached if self.options.is_complete(bucket)}
            with self._warn_if_slow():
                new, untimed_reason, new_notes = self._measure(valid, complete)
        by_tokens = {bucket.tokens: bucket for bucket in (*valid, *new)}
        buckets = tuple(by_tokens[tokens] for tokens in sorted(by_tokens))
        seconds = self.ranks.broadcast(self.budget.elapsed)
        return SearchResult(
            buckets, tuple(b.tokens for b in new), seconds, untimed_reason, notes + new_notes
        )

    @property
    def _tokens_to_time(self) -> tuple[int, ...]:
        """Token counts with a pairing that may be faster than the default, ascending."""
        return tuple(t for t in self.options.tokens if self.options.challengers(t))

    def _reason(self) -> str:
        """Return the reason why candidates stay untimed, or "" if there are none."""
        if self.candidates.untimeable:
            return next(iter(self.candidates.untimeable.values()))
        return f"budget of {self.budget.seconds:g} s spent" if self._tokens_to_time else ""

    @contextmanager
    def _warn_if_slow(self) -> Iterator[None]:
        """Log a message if the context takes long, and there is no `on_bucket` to show progress."""
        is_silent = self.ranks.rank or self.on_bucket is not None
        message = "timing %d pairings for up to %g s; the times are cached"
        challengers = {pair for t in self._tokens_to_time for pair in self.options.challengers(t)}
        message_args = (len(challengers) + 1, self.budget.seconds)
        timer = threading.Timer(_WARN_AFTER_SECONDS, _LOG.warning, (message, *message_args))
        timer.daemon = True
        if not is_silent:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _load_cached(self) -> tuple[tuple[Bucket, ...], tuple[str, ...]]:
        """Return rank 0's cached buckets that are requested and valid, and the notes."""
        cached = self.ranks.broadcast(self.cache.load() if self.ranks.rank == 0 else None)
        assert cached is not None
        if cached.record is None:
            return (), cached.notes
        buckets = (cached.record.bucket(tokens) for tokens in self._tokens_to_time)
        trusted = [self._drop_invalid(bucket) for bucket in buckets if bucket is not None]
        return tuple(bucket for bucket in trusted if bucket is not None), cached.notes

    def _drop_invalid(self, bucket: Bucket) -> Bucket | None:
        """Remove pairings that are no longer valid; None if the default pairing has changed."""
        valid = self.options.ordered(bucket.tokens)
        outcomes = tuple(outcome for outcome in bucket.outcomes if outcome.pair in valid)
        trusted = Bucket(bucket.tokens, bucket.default, outcomes)
        default = next((pair for pair in valid if pair not in trusted.failed), valid[0])
        return trusted if outcomes and trusted.default == default else None

    def _missing(self, buckets: Sequence[Bucket]) -> tuple[int, ...]:
        complete = {bucket.tokens for bucket in buckets if self.options.is_complete(bucket)}
        return tuple(tokens for tokens in self._tokens_to_time if tokens not in complete)

    def _wait_for_lock(self, stack: ExitStack) -> tuple[str, ...]:
        """Wait while another process measures the same, because both would disturb each other.

        Returns notes for the user. The lock is released with `stack`.
        """
        locked = True
        if self.ranks.rank == 0:
            try:
                lock = self.cache.locked(wait_s=self.budget.remaining, name="timing")
                locked = stack.enter_context(lock)
            except OSError:
                locked = True  # without a lock file there is no other process to wait for
        if self.ranks.broadcast(locked):
            return ()
        return ("another process may be timing the same: these times may be disturbed",)

    def _measure(
        self, valid: Sequence[Bucket], complete_in_cache: set[int]
    ) -> tuple[list[Bucket], str, tuple[str, ...]]:
        """Time the pairings that `valid` lacks.

        valid: known buckets, which may be incomplete. complete_in_cache: token counts whose cached
        buckets are complete, so that an incomplete one must not replace them. Returns the new
        buckets, the reason why candidates were not timed or "", and notes.
        """
        missing, incomplete = self._missing(valid), {b.tokens: b for b in valid}
        new, notes = list[Bucket](), list[str]()
        if not missing:
            return new, "", ()
        problem = without_inplace(self.problem)
        weights, why = self._make_weights(problem)
        if weights is None:
            return new, why, ()
        untimed_reason = ""
        for tokens in missing:
            if not self.budget.allows(2):  # the default and one candidate
                untimed_reason = self._reason()
                break
            bucket = self._time_bucket(problem.with_tokens(tokens), weights, incomplete.get(tokens))
            complete = self.options.is_complete(bucket)
            if complete or (bucket.outcomes and tokens not in complete_in_cache):
                new.append(bucket)
                if self.ranks.rank == 0:
                    notes += [n for n in self.cache.save([bucket]) if n not in notes]
                    if self.on_bucket is not None:
                        self.on_bucket(bucket)
            if not complete:
                untimed_reason = self._reason()
                break
        del weights
        _release_memory(self.machine)
        return new, untimed_reason, self.ranks.broadcast(tuple(notes))

    def _time_bucket(
        self, problem: Problem, weights: ExpertWeights, partial: Bucket | None
    ) -> Bucket:
        """Time the challengers of one bucket, except those that `partial` has already."""
        kind, options = RoutingKind.parse(self.routing), self.options
        with torch.no_grad():
            with self.budget.step():
                workload = make_workload(problem, weights, kind, replicated=self.replicated)
            watch = Stopwatch(
                workload,
                options.ordered(problem.tokens),
                self.candidates.graph,
                self.machine,
                self.ranks,
                self.budget,
            )
            if partial is not None:
                watch.outcomes.update({outcome.pair: outcome for outcome in partial.outcomes})
            return watch.bucket(options.challengers(problem.tokens))

    def _make_weights(self, problem: Problem) -> tuple[ExpertWeights | None, str]:
        """Create the weights; return None and the reason if memory or time does not suffice."""
        device = _device(self.machine)
        sharing = ranks_sharing_memory(self.ranks, device)
        free, need = free_bytes(device), weight_bytes(problem) * sharing
        enough_memory = all(
            self.ranks.all_gather(free is None or need <= _MAX_FREE_FRACTION * free)
        )
        if not enough_memory:
            available = gigabytes(min(f for f in self.ranks.all_gather(free) if f is not None))
            of_ranks = f" of {sharing} ranks" if sharing > 1 else ""
            return None, f"weights{of_ranks} take {gigabytes(need)}, {available} are free"
        is_over = self.budget.is_over if self.ranks.size == 1 else None
        try:
            # `is_over` is collective, but ranks may have different numbers of experts.
            with torch.no_grad():
                return make_weights(problem, device, is_over), ""
        except TimeoutError as error:
            return None, f"{self._reason()}: {error}"


def _device(machine: Machine) -> torch.device:
    if machine.device == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _release_memory(machine: Machine) -> None:
    if machine.device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
