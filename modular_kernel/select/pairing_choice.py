"""The result of `choose`: all candidates, their times, and a pairing for each range of tokens.

A pairing consists of a PrepareAndFinalize and an experts class. A bucket is a number of tokens at
which pairings are compared. `compose` builds a layer from the result, and `mk compose` prints it.
"""

from dataclasses import dataclass
from functools import cached_property

from modular_kernel.select.cache_keys import KeyFields
from modular_kernel.select.candidates import Candidates
from modular_kernel.select.selection import (
    Bucket,
    Pair,
    PairingOptions,
    Segment,
    SelectedPairing,
    SelectionReason,
    TimedOutcome,
    make_segments,
    pairing_name,
    select_pairs,
)
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.text import format_count


@dataclass(frozen=True)
class PairingChoice:
    """The pairings that `choose` has chosen, and the data that the choice is based on.

    replicated: whether all ranks pass the same tokens.
    candidates: the verdict on every pairing.
    pairing_options: the valid pairings, with the estimates of the shipped record.
    buckets: the measurements, new or cached, in ascending order of tokens.
    key_fields: the fields under which the measurements are cached, see `cache_keys`.
    timed_now: token counts that this call has timed.
    seconds: duration of the measurements of this call.
    untimed_reason: why some pairings were not timed, or "".
    notes: warnings for the user, for example about the cache.
    """

    problem: Problem
    machine: Machine
    replicated: bool
    candidates: Candidates
    pairing_options: PairingOptions
    buckets: tuple[Bucket, ...]
    key_fields: KeyFields
    timed_now: tuple[int, ...] = ()
    seconds: float = 0.0
    untimed_reason: str = ""
    notes: tuple[str, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token counts of the buckets, ascending."""
        return self.pairing_options.tokens

    @property
    def num_timed(self) -> int:
        """Number of token counts that this call has timed."""
        return len(self.timed_now)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Ranges of token counts with their pairings; () if no pairing is valid."""
        return make_segments(self.pairing_options, self.buckets)

    @cached_property
    def selected_by_tokens(self) -> dict[int, SelectedPairing]:
        """The pairing of each bucket, and why it was selected, by number of tokens."""
        return select_pairs(self.pairing_options, self.buckets)

    @property
    def pair_by_tokens(self) -> dict[int, Pair]:
        """The pairing of each bucket, by number of tokens."""
        return {tokens: selected.pair for tokens, selected in self.selected_by_tokens.items()}

    @property
    def untimed_tokens(self) -> tuple[int, ...]:
        """Token counts at which a pairing that may be faster than the default was not timed."""
        return tuple(
            t
            for t, selected in self.selected_by_tokens.items()
            if selected.reason is SelectionReason.DEFAULT
        )

    @property
    def has_times(self) -> bool:
        """Whether any pairing has a time."""
        return any(bucket.us_by_pair for bucket in self.buckets)

    def outcomes(self, tokens: int) -> tuple[TimedOutcome, ...]:
        """Return the outcome of every valid pairing in a bucket, with the default pairing first.

        If a pairing has no time, `TimedOutcome.why` is the reason.
        """
        bucket = next((b for b in self.buckets if b.tokens == tokens), None)
        outcome_by_pair = {} if bucket is None else {o.pair: o for o in bucket.outcomes}
        return tuple(
            outcome_by_pair.get(pair) or TimedOutcome(pair, why=self._explain_untimed(tokens, pair))
            for pair in self.pairing_options.valid_pairs(tokens)
        )

    @property
    def left_out(self) -> dict[Pair, tuple[int, ...]]:
        """Pairings that were not compared at some timed token counts, with these token counts.

        They were left out because the shipped record expects that they are not faster than the
        default. The pairing of such a token count is the fastest of those that were timed.
        """
        left_out: dict[Pair, tuple[int, ...]] = {}
        for bucket in self.buckets:
            selected = self.selected_by_tokens.get(bucket.tokens)
            if selected is None or selected.reason is not SelectionReason.TIMED:
                continue
            for pair in self.pairing_options.valid_pairs(bucket.tokens)[1:]:
                is_untried = bucket.find_outcome(pair) is None
                if is_untried and self._is_left_out_by_record(bucket.tokens, pair):
                    left_out[pair] = (*left_out.get(pair, ()), bucket.tokens)
        return left_out

    def _is_left_out_by_record(self, tokens: int, pair: Pair) -> bool:
        has_estimate = pair in self.pairing_options.estimates.get(tokens, {})
        return has_estimate and pair not in self.pairing_options.pairs_to_time(tokens)

    def _explain_untimed(self, tokens: int, pair: Pair) -> str:
        if pair in self.candidates.untimeable:
            return f"not timed: {self.candidates.untimeable[pair]}"
        if self._is_left_out_by_record(tokens, pair):
            estimate = self.pairing_options.estimates[tokens][pair]
            ratio = f"{estimate.optimistic:.2f}x the default's time"
            return f"not timed: the shipped record expects {ratio}"
        has_challengers = bool(self.pairing_options.pairs_to_time(tokens))
        reason = self.untimed_reason if has_challengers else ""
        return f"not timed: {reason or 'nothing to compare with'}"

    @property
    def summary(self) -> str:
        """One line of text with the number of buckets for each SelectionReason.

        For example: "13 token counts: 3 timed (4.1 s), 8 from the shipped record, 2 default (budget
        of 5 s spent); not timed, because the shipped record expects no gain: GroupedGemmExperts at
        2 of 3". The last part lists `left_out`: pairings that were not compared at token counts
        that count as timed, by the name of their experts class if it is unambiguous.
        """
        reasons = [selected.reason for selected in self.selected_by_tokens.values()]
        count_by_reason = {reason: reasons.count(reason) for reason in SelectionReason}
        num_timed_now = sum(
            self.selected_by_tokens[t].reason is SelectionReason.TIMED for t in self.timed_now
        )
        parts = [
            (num_timed_now, f"timed ({self.seconds:.1f} s)"),
            (count_by_reason[SelectionReason.TIMED] - num_timed_now, "from the cache"),
            (count_by_reason[SelectionReason.RECORD], "from the shipped record"),
            (count_by_reason[SelectionReason.ONLY], "with one valid pairing"),
            (
                count_by_reason[SelectionReason.DEFAULT],
                f"default ({self.untimed_reason})" if self.untimed_reason else "default",
            ),
        ]
        counts_text = ", ".join(f"{number} {text}" for number, text in parts if number)
        text = f"{format_count(len(reasons), 'token count')}: {counts_text or 'no valid pairing'}"
        return text + self._describe_left_out(count_by_reason[SelectionReason.TIMED])

    def _describe_left_out(self, num_timed: int) -> str:
        """Describe `left_out` for the summary; "" if every pairing was compared.

        num_timed: number of token counts whose pairing was selected by times.
        """
        names = [experts for _, experts in self.pairing_options.order]
        pairs_text = ", ".join(
            f"{pair[1] if names.count(pair[1]) == 1 else pairing_name(pair)} "
            f"at {len(tokens)} of {num_timed}"
            for pair, tokens in self.left_out.items()
        )
        reason = "not timed, because the shipped record expects no gain"
        return f"; {reason}: {pairs_text}" if pairs_text else ""
