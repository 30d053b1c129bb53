"""A choice: what was considered, what it took, and which pairing serves which numbers of tokens."""

from dataclasses import dataclass

from modular_kernel.select.candidates import Candidates
from modular_kernel.select.keys import Facts
from modular_kernel.select.record import Bucket, Pair, Segment, chosen, segments
from modular_kernel.types import Machine, Problem


@dataclass(frozen=True)
class Choice:
    """tokens: the buckets asked for, ascending. buckets: those that have outcomes.

    timed: how many buckets were timed now; the others come from the cache. notes: what a reader
    should know about how this came to be.
    """

    problem: Problem
    machine: Machine
    replicated: bool
    tokens: tuple[int, ...]
    candidates: Candidates
    buckets: tuple[Bucket, ...]
    facts: Facts
    timed: int = 0
    notes: tuple[str, ...] = ()

    @property
    def segments(self) -> tuple[Segment, ...]:
        """From 0 to problem.tokens; () if no pairing is valid."""
        order = self.candidates.order
        if not order:
            return ()
        return segments(self.problem, self.buckets, order, valid=self.candidates.valid)

    @property
    def picks(self) -> dict[int, Pair]:
        """The pairing chosen at each bucket that has a time."""
        return chosen(self.buckets, self.candidates.order)

    @property
    def missing(self) -> tuple[int, ...]:
        """Buckets asked for that nobody measured."""
        have = {bucket.tokens for bucket in self.buckets}
        return tuple(t for t in self.tokens if t not in have)

    @property
    def measured(self) -> bool:
        """Whether any pairing has a time."""
        return any(bucket.times for bucket in self.buckets)
