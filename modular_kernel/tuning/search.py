"""The tuner's loop: candidates screened, finalists timed; the best kept after each T.

It knows no part and no GPU: a `Tunable` says what to try, a `Bench` what a choice takes.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from modular_kernel.contracts import Best, Choice, Took, Tunable

_WORTH = 0.99  # of the untuned time: what is not faster by more is noise
_AHEAD = 2  # numbers of tokens whose candidates are compiled while one is timed


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
        """Say why `choice` does not compile, or to something not worth a launch; wait for that."""

    @abstractmethod
    def screen(self, tokens: int, choice: Choice) -> Took | Refusal:
        """Time a call, if its output is right; roughly, where it is far from the best."""

    @abstractmethod
    def compare(self, tokens: int, choices: Sequence[Choice]) -> Mapping[Choice, float | Refusal]:
        """Return the seconds of a call of each choice that gives right numbers, timed by turns."""


@dataclass(frozen=True)
class Tuned:
    """The outcome for one number of tokens. best: None if nothing ran and was right.

    took: what was screened. finished: every candidate was. file: where `best` was saved.
    """

    tokens: int
    best: Best | None
    took: Mapping[Choice, Took]
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
class TuneJob:
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


def remaining(space: Tunable, tokens: Sequence[int], folder: Path, *, fresh: bool) -> list[int]:
    """Return the numbers of tokens that a former run has left, in the order asked for.

    ConfigurationError if what it left cannot be continued.
    """
    done = {} if fresh else space.saved(folder)
    return [number for number in dict.fromkeys(tokens) if number not in done]


def tune(job: TuneJob) -> Iterator[Tuned]:
    """Tune for each number of tokens that is left; what is best so far is saved after each.

    Time that one leaves unused goes to the others. Ends early where the budget is spent; another
    run continues.
    """
    todo = remaining(job.space, job.tokens, job.folder, fresh=job.fresh)
    done = {} if job.fresh else dict(job.space.saved(job.folder))
    end = job.clock() + job.budget
    for index, tokens in enumerate(todo):
        left = end - job.clock()
        if left <= 0:
            return
        for soon in todo[index : index + _AHEAD]:
            job.bench.compile_ahead(soon, job.space.candidates(soon))
        tuned = _Trial(job, tokens, job.clock() + left / (len(todo) - index)).run()
        if tuned.best is not None:
            done[tokens] = tuned.best
            tuned = replace(tuned, file=job.space.save(done, job.folder))
        yield tuned


@dataclass
class _Trial:
    """One number of tokens."""

    job: TuneJob
    tokens: int
    deadline: float
    took: dict[Choice, Took] = field(default_factory=dict)
    refused: dict[Choice, Refusal] = field(default_factory=dict)

    def run(self) -> Tuned:
        space = self.job.space
        untuned = space.untuned(self.tokens)
        self._screen(untuned)  # whatever the compiler thinks of it: it is what runs today
        finished = self._screen_all(space.candidates(self.tokens))
        finalists = dict.fromkeys(space.finalists(self.tokens, self.took))
        if untuned in self.took:
            finalists[untuned] = None
        best = self._best(list(finalists), untuned)
        return Tuned(self.tokens, best, self.took, self.refused, finished)

    def _screen_all(self, candidates: Sequence[Choice]) -> bool:
        """Whether there was time for all of them."""
        for choice in candidates:
            if choice in self.took or choice in self.refused:
                continue
            if self.job.clock() >= self.deadline:
                return False
            refusal = self.job.bench.refusal(self.tokens, choice)
            if refusal is None:
                self._screen(choice)
            else:
                self.refused[choice] = refusal
        return True

    def _screen(self, choice: Choice) -> None:
        outcome = self.job.bench.screen(self.tokens, choice)
        self.job.tick()
        if isinstance(outcome, Refusal):
            self.refused[choice] = outcome
        else:
            self.took[choice] = outcome

    def _best(self, finalists: Sequence[Choice], untuned: Choice) -> Best | None:
        outcomes = self.job.bench.compare(self.tokens, finalists) if finalists else {}
        self.job.tick()
        seconds: dict[Choice, float] = {}
        for choice, outcome in outcomes.items():
            if isinstance(outcome, Refusal):
                self.refused[choice] = outcome
            else:
                seconds[choice] = outcome
        if not seconds:
            return None
        choice, base = min(seconds, key=seconds.__getitem__), seconds.get(untuned)
        if base is not None and seconds[choice] > _WORTH * base:
            choice = untuned
        return Best(choice, seconds[choice], base)
