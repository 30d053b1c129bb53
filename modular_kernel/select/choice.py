"""A choice: what was considered, what it took, and which pairing serves which numbers of tokens."""

from dataclasses import dataclass
from functools import cached_property

from modular_kernel.select.cache_keys import Facts
from modular_kernel.select.candidates import Candidates
from modular_kernel.select.record import (
    Bucket,
    Options,
    Pair,
    Pick,
    Segment,
    Source,
    TimedOutcome,
    picks,
    segments,
)
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.text import counted


@dataclass(frozen=True)
class Choice:
    """options: what could be chosen, and the shipped record's estimates. buckets: what was timed,
    now or earlier. timed_now: the tokens of those that were timed now. seconds: how long that took.
    left: why something that may be faster than the default was not timed; "" if all of it was.
    notes: what a reader should know about how this came to be.
    """

    problem: Problem
    machine: Machine
    replicated: bool
    candidates: Candidates
    options: Options
    buckets: tuple[Bucket, ...]
    facts: Facts
    timed_now: tuple[int, ...] = ()
    seconds: float = 0.0
    left: str = ""
    notes: tuple[str, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        """The buckets, ascending."""
        return self.options.tokens

    @property
    def timed(self) -> int:
        """At how many numbers of tokens something was timed now."""
        return len(self.timed_now)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """From 0 to problem.tokens; () if no pairing is valid."""
        return segments(self.options, self.buckets)

    @cached_property
    def decided(self) -> dict[int, Pick]:
        """The pairing at each bucket, and why."""
        return picks(self.options, self.buckets)

    @property
    def picks(self) -> dict[int, Pair]:
        """The pairing at each bucket."""
        return {tokens: pick.pair for tokens, pick in self.decided.items()}

    @property
    def missing(self) -> tuple[int, ...]:
        """Buckets at which something that may be faster than the default was not timed."""
        return tuple(t for t, pick in self.decided.items() if pick.source is Source.DEFAULT)

    @property
    def measured(self) -> bool:
        """Whether any pairing has a time."""
        return any(bucket.times for bucket in self.buckets)

    def outcomes(self, tokens: int) -> tuple[TimedOutcome, ...]:
        """Return what became of every valid pairing at a bucket, the default first.

        Of one that was not timed, `why` says why not.
        """
        bucket = next((b for b in self.buckets if b.tokens == tokens), None)
        known = {} if bucket is None else {o.pair: o for o in bucket.outcomes}
        return tuple(
            known.get(pair) or TimedOutcome(pair, why=self._untimed(tokens, pair))
            for pair in self.options.ordered(tokens)
        )

    def _untimed(self, tokens: int, pair: Pair) -> str:
        if pair in self.candidates.silent:
            return f"not timed: {self.candidates.silent[pair]}"
        estimate = self.options.expected.get(tokens, {}).get(pair)
        if estimate is not None and pair not in self.options.challengers(tokens):
            expected = f"{estimate.optimistic:.2f}x the default's time"
            return f"not timed: the shipped record expects {expected}"
        wanted = bool(self.options.challengers(tokens))
        return f"not timed: {self.left if wanted and self.left else 'nothing to compare with'}"

    @property
    def summary(self) -> str:
        """One line: at how many token counts the pairing was timed, and why the others have theirs.

        Such as "13 token counts: 3 timed (4.1 s), 8 from the shipped record, 2 default (budget of
        5 s spent)".
        """
        sources = [pick.source for pick in self.decided.values()]
        count = {source: sources.count(source) for source in Source}
        timed = sum(self.decided[t].source is Source.TIMED for t in self.timed_now)
        parts = [
            (timed, f"timed ({self.seconds:.1f} s)"),
            (count[Source.TIMED] - timed, "from the cache"),
            (count[Source.RECORD], "from the shipped record"),
            (count[Source.ONLY], "with one valid pairing"),
            (count[Source.DEFAULT], f"default ({self.left})" if self.left else "default"),
        ]
        shown = ", ".join(f"{number} {words}" for number, words in parts if number)
        return f"{counted(len(sources), 'token count')}: {shown or 'no valid pairing'}"
