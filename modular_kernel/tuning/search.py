"""The tuner's loop: rounds of choices, compiled, checked and timed; the best kept after each T.

It knows no part and no GPU: a `Tunable` says what to try, a `Bench` what a choice takes.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from modular_kernel.tunable import Best, Choice, Tunable

_FINALISTS = 3
_FINAL_ROUNDS = 2
_WORTH = 0.99  # of the untuned time: what is not faster by more is noise


@dataclass(frozen=True)
class Refusal:
    """Why a choice has no time. wrong: it computed wrong numbers, which is a defect."""

    reason: str
    wrong: bool = False


class Bench(ABC):
    """Compiles and measures choices for one problem."""

    @abstractmethod
    def compile_ahead(self, tokens: int, choices: Sequence[Choice]) -> None:
        """Begin to compile in the background; returns at once."""

    @abstractmethod
    def refusal(self, tokens: int, choice: Choice) -> Refusal | None:
        """Why `choice` does not compile, or to something not worth a launch; waits for that."""

    @abstractmethod
    def seconds(self, tokens: int, choice: Choice) -> float | Refusal:
        """Of one call, if its output is right."""


@dataclass(frozen=True)
class Tuned:
    """The outcome for one number of tokens. best: None if nothing ran and was right.

    tried: how many choices were timed. finished: the search ended before its time did. file: where
    `best` was saved.
    """

    tokens: int
    best: Best | None
    tried: int
    refused: Mapping[Choice, Refusal]
    finished: bool
    file: Path | None = None

    @property
    def wrong(self) -> tuple[Choice, ...]:
        """Choices that computed wrong numbers."""
        return tuple(choice for choice, refusal in self.refused.items() if refusal.wrong)


Clock = Callable[[], float]
Tick = Callable[[], None]


def _no_tick() -> None:
    pass


@dataclass(frozen=True)
class Job:
    """What to tune, and within what.

    folder: where results are kept. budget: seconds for all of `tokens`. fresh: start afresh
    instead of continuing what is in the folder. tick: called after every measurement.
    """

    space: Tunable
    bench: Bench
    tokens: Sequence[int]
    folder: Path
    budget: float
    fresh: bool = False
    tick: Tick = _no_tick
    clock: Clock = time.monotonic


def remaining(job: Job) -> list[int]:
    """The numbers of tokens that a former run has left, in the order asked for.

    ConfigurationError if what it left cannot be continued.
    """
    done = {} if job.fresh else job.space.saved(job.folder)
    return [tokens for tokens in dict.fromkeys(job.tokens) if tokens not in done]


def tune(job: Job) -> Iterator[Tuned]:
    """Tune for each number of tokens that is left; what is best so far is saved after each.

    Time that one leaves unused goes to the others. Ends early where the budget is spent; another
    run continues.
    """
    todo = remaining(job)
    done = {} if job.fresh else dict(job.space.saved(job.folder))
    end = job.clock() + job.budget
    for index, tokens in enumerate(todo):
        left = end - job.clock()
        if left <= 0:
            return
        for soon in todo[index : index + 2]:
            job.bench.compile_ahead(soon, job.space.likely(soon))
        tuned = _Trial(job, tokens, job.clock() + left / (len(todo) - index)).run()
        if tuned.best is not None:
            done[tokens] = tuned.best
            tuned = replace(tuned, file=job.space.save(done, job.folder))
        yield tuned


@dataclass
class _Trial:
    """One number of tokens."""

    job: Job
    tokens: int
    deadline: float
    times: dict[Choice, list[float]] = field(default_factory=dict)
    refused: dict[Choice, Refusal] = field(default_factory=dict)

    def run(self) -> Tuned:
        untuned = self.job.space.untuned(self.tokens)
        self._time(untuned)  # whatever the compiler thinks of it: it is what runs today
        finished = self._search()
        tried = len(self.times)
        best = self._best(self._finals(untuned), untuned)
        return Tuned(self.tokens, best, tried, self.refused, finished)

    def _late(self) -> bool:
        return self.job.clock() >= self.deadline

    def _search(self) -> bool:
        """Whether the search came to its end with every time it asked for."""
        search = self.job.space.search(self.tokens)
        try:
            asked = next(search)
            while True:
                answer = self._answer(asked)
                if self._late():
                    return False
                asked = search.send(answer)
        except StopIteration:
            return True
        finally:
            search.close()

    def _answer(self, asked: Sequence[Choice]) -> dict[Choice, float]:
        """Seconds of those asked for, in their order, as long as there is time."""
        known = {*self.times, *self.refused}
        unknown = [choice for choice in dict.fromkeys(asked) if choice not in known]
        self.job.bench.compile_ahead(self.tokens, unknown)
        for choice in unknown:
            if self._late():
                break
            refusal = self.job.bench.refusal(self.tokens, choice)
            if refusal is None:
                self._time(choice)
            else:
                self.refused[choice] = refusal
        return {c: self._median(c) for c in asked if c in self.times}

    def _time(self, choice: Choice) -> None:
        outcome = self.job.bench.seconds(self.tokens, choice)
        self.job.tick()
        if isinstance(outcome, Refusal):
            self.refused[choice] = outcome
            self.times.pop(choice, None)
        else:
            self.times.setdefault(choice, []).append(outcome)

    def _finals(self, untuned: Choice) -> list[Choice]:
        """The fastest and the untuned, timed once more by turns: one lucky time wins nothing."""
        fastest = sorted(self.times, key=self._median)[:_FINALISTS]
        finalists = list(dict.fromkeys([*fastest, *(c for c in (untuned,) if c in self.times)]))
        for _ in range(_FINAL_ROUNDS if len(finalists) > 1 else 0):
            for choice in finalists:
                if choice in self.times:
                    self._time(choice)
        return [choice for choice in finalists if choice in self.times]

    def _best(self, finalists: Sequence[Choice], untuned: Choice) -> Best | None:
        if not finalists:
            return None
        choice = min(finalists, key=self._median)
        base = self._median(untuned) if untuned in finalists else None
        if base is not None and self._median(choice) > _WORTH * base:
            choice = untuned
        return Best(choice, self._median(choice), base)

    def _median(self, choice: Choice) -> float:
        return median(self.times[choice])
