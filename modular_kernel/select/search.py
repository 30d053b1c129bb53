"""Search for pairings that are faster than the default pairing, within a time budget.

A pairing consists of a PrepareAndFinalize and an experts class. A bucket has the measurements of
all pairings at one number of tokens. `Search.run` loads cached buckets, and times the missing
buckets, small token counts first. It creates weights and inputs (`select.inputs`), and a
`PairingTimer` for each number of tokens.
"""

import gc
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import torch

from modular_kernel.measure.routing_patterns import RoutingKind
from modular_kernel.select.budget import (
    Budget,
    count_ranks_sharing_memory,
    format_gigabytes,
    free_bytes,
)
from modular_kernel.select.cache import Cache
from modular_kernel.select.candidates import Candidates
from modular_kernel.select.inputs import make_weights, make_workload, weight_bytes
from modular_kernel.select.process_group import Ranks
from modular_kernel.select.selection import Bucket, Pair, PairingOptions
from modular_kernel.select.timing import PairingTimer
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.tensors import ExpertWeights

_LOG = logging.getLogger("modular_kernel.select")
_WARN_AFTER_SECONDS = 5.0  # then a log message explains why the call takes long
_MAX_FREE_FRACTION = 0.8  # maximum fraction of the free memory for weights
_MIN_STEPS = 2  # to time the default pairing and another pairing

BucketCallback = Callable[[Bucket], object]


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    buckets: the measurements, new or cached, in ascending order of tokens.
    timed_now: token counts that this search has timed.
    seconds: duration of the search.
    untimed_reason: why some pairings were not timed, or "".
    notes: warnings for the user, for example about the cache.
    """

    buckets: tuple[Bucket, ...]
    timed_now: tuple[int, ...] = ()
    seconds: float = 0.0
    untimed_reason: str = ""
    notes: tuple[str, ...] = ()


@dataclass
class Search:
    """A search for pairings that are faster than the default. All ranks must run it.

    routing: distribution of tokens over experts, in the syntax of RoutingKind.parse.
    replicated: whether all ranks pass the same tokens.
    ignore_saved: whether to ignore cached times.
    on_bucket: called on rank 0 with each bucket after it was timed.
    """

    problem: Problem
    machine: Machine
    ranks: Ranks
    candidates: Candidates
    pairing_options: PairingOptions
    cache: Cache
    budget: Budget
    routing: str = "uniform"
    replicated: bool = False
    ignore_saved: bool = False
    on_bucket: BucketCallback | None = None
    _prepared_pairs: set[Pair] = field(default_factory=set, init=False)

    def run(self) -> SearchResult:
        """Load the cached buckets, and time the other buckets within the budget."""
        if not self._tokens_to_time:
            return SearchResult((), untimed_reason=self._get_untimed_reason())
        cached, notes = self._load_cached()
        reusable_buckets = () if self.ignore_saved else cached
        if not self._list_incomplete_tokens(reusable_buckets):
            return SearchResult(reusable_buckets, notes=notes)
        if not self.budget.allows():
            return SearchResult(
                reusable_buckets, untimed_reason=self._get_untimed_reason(), notes=notes
            )
        with ExitStack() as stack:
            notes += self._wait_for_lock(stack)
            if not self.ignore_saved:  # another process may have measured during the wait
                reusable_buckets = self._load_cached()[0]
            complete_in_cache = {
                bucket.tokens for bucket in cached if self.pairing_options.is_complete(bucket)
            }
            with self._warn_if_slow():
                new_buckets, untimed_reason, new_notes = self._measure(
                    reusable_buckets, complete_in_cache
                )
        bucket_by_tokens = {bucket.tokens: bucket for bucket in (*reusable_buckets, *new_buckets)}
        buckets = tuple(bucket_by_tokens[tokens] for tokens in sorted(bucket_by_tokens))
        seconds = self.ranks.broadcast(self.budget.elapsed)
        return SearchResult(
            buckets,
            tuple(b.tokens for b in new_buckets),
            seconds,
            untimed_reason,
            notes + new_notes,
        )

    @property
    def _tokens_to_time(self) -> tuple[int, ...]:
        """Token counts at which some pairing may be faster than the default, ascending."""
        return tuple(
            t for t in self.pairing_options.tokens if self.pairing_options.pairs_to_time(t)
        )

    def _get_untimed_reason(self) -> str:
        """Return why some pairings are not timed; "" if there is nothing to time."""
        if self.candidates.untimeable:
            return next(iter(self.candidates.untimeable.values()))
        return f"budget of {self.budget.seconds:g} s spent" if self._tokens_to_time else ""

    @contextmanager
    def _warn_if_slow(self) -> Iterator[None]:
        """Log a message if the context takes long, unless `on_bucket` shows the progress."""
        needs_message = self.ranks.rank == 0 and self.on_bucket is None
        message = "timing %d pairings for up to %g s; the times are cached"
        pairs = {
            pair for t in self._tokens_to_time for pair in self.pairing_options.pairs_to_time(t)
        }
        message_args = (len(pairs) + 1, self.budget.seconds)  # + 1 for the default
        timer = threading.Timer(_WARN_AFTER_SECONDS, _LOG.warning, (message, *message_args))
        timer.daemon = True
        if needs_message:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _load_cached(self) -> tuple[tuple[Bucket, ...], tuple[str, ...]]:
        """Return the cached buckets of rank 0 for `_tokens_to_time`, and notes for the user."""
        cached = self.ranks.broadcast(self.cache.load() if self.ranks.rank == 0 else None)
        assert cached is not None
        if cached.record is None:
            return (), cached.notes
        buckets = (cached.record.bucket(tokens) for tokens in self._tokens_to_time)
        valid_buckets = [
            self._drop_invalid_pairs(bucket) for bucket in buckets if bucket is not None
        ]
        return tuple(bucket for bucket in valid_buckets if bucket is not None), cached.notes

    def _drop_invalid_pairs(self, bucket: Bucket) -> Bucket | None:
        """Return a cached bucket without pairings that are not valid for this problem.

        Returns None if the default pairing has changed, because all ratios refer to it.
        """
        valid = self.pairing_options.valid_pairs(bucket.tokens)
        outcomes = tuple(outcome for outcome in bucket.outcomes if outcome.pair in valid)
        checked_bucket = Bucket(bucket.tokens, bucket.default, outcomes)
        default = next(
            (pair for pair in valid if pair not in checked_bucket.failed_pairs), valid[0]
        )
        return checked_bucket if outcomes and checked_bucket.default == default else None

    def _list_incomplete_tokens(self, buckets: Sequence[Bucket]) -> tuple[int, ...]:
        """Return the token counts of `_tokens_to_time` that have no complete bucket."""
        complete = {bucket.tokens for bucket in buckets if self.pairing_options.is_complete(bucket)}
        return tuple(tokens for tokens in self._tokens_to_time if tokens not in complete)

    def _wait_for_lock(self, stack: ExitStack) -> tuple[str, ...]:
        """Wait while another process times the same problem, which would disturb our times.

        Returns notes for the user. Closing `stack` releases the lock.
        """
        is_locked = True
        if self.ranks.rank == 0:
            try:
                lock = self.cache.lock(wait_s=self.budget.remaining, name="timing")
                is_locked = stack.enter_context(lock)
            except OSError:  # the cache folder cannot be written, so no process holds the lock
                is_locked = True
        if self.ranks.broadcast(is_locked):
            return ()
        return ("another process may be timing the same: these times may be disturbed",)

    def _measure(
        self, reusable_buckets: Sequence[Bucket], complete_in_cache: set[int]
    ) -> tuple[list[Bucket], str, tuple[str, ...]]:
        """Time the pairings that have no outcome in `reusable_buckets`.

        Returns the new buckets, why some pairings were not timed or "", and notes for the user.

        reusable_buckets: buckets whose outcomes need not be timed again. They may be incomplete.
        complete_in_cache: token counts whose cached buckets are complete. Incomplete buckets must
            not replace them.
        """
        incomplete = self._list_incomplete_tokens(reusable_buckets)
        reusable_by_tokens = {bucket.tokens: bucket for bucket in reusable_buckets}
        new_buckets, notes = list[Bucket](), list[str]()
        if not incomplete:
            return new_buckets, "", ()
        problem = replace(self.problem, inplace=False)  # calls of a round reuse their inputs
        weights, untimed_reason = self._make_weights(problem)
        if weights is None:
            return new_buckets, untimed_reason, ()
        for tokens in incomplete:
            if not self.budget.allows(_MIN_STEPS):
                untimed_reason = self._get_untimed_reason()
                break
            bucket = self._time_bucket(
                problem.with_tokens(tokens), weights, reusable_by_tokens.get(tokens)
            )
            is_complete = self.pairing_options.is_complete(bucket)
            if is_complete or (bucket.outcomes and tokens not in complete_in_cache):
                new_buckets.append(bucket)
                if self.ranks.rank == 0:
                    notes += [n for n in self.cache.save([bucket]) if n not in notes]
                    if self.on_bucket is not None:
                        self.on_bucket(bucket)
            if not is_complete:
                untimed_reason = self._get_untimed_reason()
                break
        del weights
        _release_memory(self.machine)
        return new_buckets, untimed_reason, self.ranks.broadcast(tuple(notes))

    def _time_bucket(
        self, problem: Problem, weights: ExpertWeights, reusable_bucket: Bucket | None
    ) -> Bucket:
        """Time the pairings of one bucket that have no outcome in `reusable_bucket`."""
        kind, options = RoutingKind.parse(self.routing), self.pairing_options
        with torch.no_grad():
            with self.budget.step():
                workload = make_workload(problem, weights, kind, replicated=self.replicated)
            timer = PairingTimer(
                workload,
                options.valid_pairs(problem.tokens),
                self.candidates.capturable,
                self.machine,
                self.ranks,
                self.budget,
                prepared_pairs=self._prepared_pairs,
            )
            if reusable_bucket is not None:
                timer.outcomes.update(
                    {outcome.pair: outcome for outcome in reusable_bucket.outcomes}
                )
            return timer.time_bucket(options.pairs_to_time(problem.tokens))

    def _make_weights(self, problem: Problem) -> tuple[ExpertWeights | None, str]:
        """Return the weights, or None and the reason if there is too little memory or time."""
        device = _get_device(self.machine)
        num_sharing_ranks = count_ranks_sharing_memory(self.ranks, device)
        free_memory, required_bytes = free_bytes(device), weight_bytes(problem) * num_sharing_ranks
        has_enough_memory = all(
            self.ranks.all_gather(
                free_memory is None or required_bytes <= _MAX_FREE_FRACTION * free_memory
            )
        )
        if not has_enough_memory:
            min_free = format_gigabytes(
                min(f for f in self.ranks.all_gather(free_memory) if f is not None)
            )
            of_ranks = f" of {num_sharing_ranks} ranks" if num_sharing_ranks > 1 else ""
            return (
                None,
                f"weights{of_ranks} take {format_gigabytes(required_bytes)}, {min_free} are free",
            )
        # All ranks must call `Budget.is_over` equally often, but they may have different numbers of
        # experts.
        is_time_over = self.budget.is_over if self.ranks.size == 1 else None
        try:
            with torch.no_grad():
                return make_weights(problem, device, is_time_over), ""
        except TimeoutError as error:
            return None, f"{self._get_untimed_reason()}: {error}"


def _get_device(machine: Machine) -> torch.device:
    if machine.device == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _release_memory(machine: Machine) -> None:
    if machine.device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
