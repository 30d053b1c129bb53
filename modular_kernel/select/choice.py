"""The result of a selection: the candidates, their times, and the pairing for each token range."""

from dataclasses import dataclass
from functools import cached_property

from modular_kernel.select.cache_keys import KeyFields
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
from modular_kernel.text import format_count


@dataclass(frozen=True)
class Choice:
    """The result of `choose`.

    replicated: whether all ranks pass the same tokens. options: the valid pairings, with the
    shipped record's estimates. buckets: measurements, new or cached. key_fields: see `cache_keys`.
    timed_now: token counts that were timed now rather than cached. seconds: that this took.
    untimed_reason: why candidates were not timed, or "". notes: messages for the user.
    """

    problem: Problem
    machine: Machine
    replicated: bool
    candidates: Candidates
    options: Options
    buckets: tuple[Bucket, ...]
    key_fields: KeyFields
    timed_now: tuple[int, ...] = ()
    seconds: float = 0.0
    untimed_reason: str = ""
    notes: tuple[str, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token counts of the buckets, ascending."""
        return self.options.tokens

    @property
    def timed(self) -> int:
        """Number of token counts that were timed now."""
        return len(self.timed_now)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Ranges of tokens from 0 to problem.tokens; () if no pairing is valid."""
        return segments(self.options, self.buckets)

    @cached_property
    def picks_with_source(self) -> dict[int, Pick]:
        """The pairing at the token count of each bucket, and its source."""
        return picks(self.options, self.buckets)

    @property
    def picks(self) -> dict[int, Pair]:
        """The pairing at the token count of each bucket."""
        return {tokens: pick.pair for tokens, pick in self.picks_with_source.items()}

    @property
    def missing(self) -> tuple[int, ...]:
        """Token counts at which a pairing that may be faster than the default was not timed."""
        return tuple(
            t for t, pick in self.picks_with_source.items() if pick.source is Source.DEFAULT
        )

    @property
    def measured(self) -> bool:
        """True if any pairing has a time."""
        return any(bucket.times for bucket in self.buckets)

    def outcomes(self, tokens: int) -> tuple[TimedOutcome, ...]:
        """Return the outcome of every valid pairing at the tokens of a bucket, the default first.

        If a pairing has no time, the `why` of its outcome has the reason.
        """
        bucket = next((b for b in self.buckets if b.tokens == tokens), None)
        known = {} if bucket is None else {o.pair: o for o in bucket.outcomes}
        return tuple(
            known.get(pair) or TimedOutcome(pair, why=self._reason_untimed(tokens, pair))
            for pair in self.options.ordered(tokens)
        )

    def _reason_untimed(self, tokens: int, pair: Pair) -> str:
        if pair in self.candidates.untimeable:
            return f"not timed: {self.candidates.untimeable[pair]}"
        estimate = self.options.estimates.get(tokens, {}).get(pair)
        if estimate is not None and pair not in self.options.challengers(tokens):
            ratio = f"{estimate.optimistic:.2f}x the default's time"
            return f"not timed: the shipped record expects {ratio}"
        has_challengers = bool(self.options.challengers(tokens))
        reason = self.untimed_reason if has_challengers else ""
        return f"not timed: {reason or 'nothing to compare with'}"

    @property
    def summary(self) -> str:
        """One line that counts the buckets by the source of their pairing.

        For example: "13 token counts: 3 timed (4.1 s), 8 from the shipped record, 2 default (budget
        of 5 s spent)".
        """
        sources = [pick.source for pick in self.picks_with_source.values()]
        count = {source: sources.count(source) for source in Source}
        timed = sum(self.picks_with_source[t].source is Source.TIMED for t in self.timed_now)
        parts = [
            (timed, f"timed ({self.seconds:.1f} s)"),
            (count[Source.TIMED] - timed, "from the cache"),
            (count[Source.RECORD], "from the shipped record"),
            (count[Source.ONLY], "with one valid pairing"),
            (
                count[Source.DEFAULT],
                f"default ({self.untimed_reason})" if self.untimed_reason else "default",
            ),
        ]
        described = ", ".join(f"{number} {text}" for number, text in parts if number)
        return f"{format_count(len(sources), 'token count')}: {described or 'no valid pairing'}"
