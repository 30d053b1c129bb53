"""The tuner's loop: screen candidates, time finalists, save the best after each number of tokens.

It is independent of parts and devices: a `Tunable` defines the candidates, a `Bench` measures them.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from modular_kernel.contracts import Choice, StageTimes, Tunable, TunedChoice

_MAX_RATIO_TO_UNTUNED = 0.99  # maximum ratio to the untuned time; smaller gains are noise
_TOKEN_COUNTS_AHEAD = 2  # token counts to compile ahead, including the current one


@dataclass(frozen=True)
class Refusal:
    """The reason why a choice has no time. wrong: True for wrong results, which are a defect."""

    reason: str
    wrong: bool = False


class Bench(ABC):
    """Compilation and measurement of choices for one problem."""

    @abstractmethod
    def compile_ahead(self, tokens: int, choices: Sequence[Choice]) -> None:
        """Start to compile in the background, and return immediately."""

    @abstractmethod
    def refusal(self, tokens: int, choice: Choice) -> Refusal | None:
        """Wait for compilation, and return a Refusal if it fails.

        A Refusal is also returned if the compiled kernel is not worth a launch.
        """

    @abstractmethod
    def screen(self, tokens: int, choice: Choice) -> StageTimes | Refusal:
        """Check and time a call, with fewer repetitions if it is far from the best."""

    @abstractmethod
    def compare(self, tokens: int, choices: Sequence[Choice]) -> Mapping[Choice, float | Refusal]:
        """Return seconds per call of each choice with correct results, timed alternately."""


@dataclass(frozen=True)
class TuneResult:
    """The result for one number of tokens. best: None if no choice ran correctly.

    times: times of the screened choices. finished: all candidates were screened. file: where `best`
    was saved.
    """

    tokens: int
    best: TunedChoice | None
    times: Mapping[Choice, StageTimes]
    refused: Mapping[Choice, Refusal]
    finished: bool
    file: Path | None = None

    @property
    def wrong(self) -> tuple[Choice, ...]:
        """Choices with wrong results."""
        return tuple(choice for choice, refusal in self.refused.items() if refusal.wrong)


Clock = Callable[[], float]
ProgressCallback = Callable[[], None]


def _ignore() -> None:
    pass


@dataclass(frozen=True)
class TuneJob:
    """What to tune, and the limits.

    folder: for the results. budget: seconds for all of `tokens`. fresh: ignore the results in the
    folder instead of continuing from them. on_measurement: called after every measurement.
    """

    space: Tunable
    bench: Bench
    tokens: Sequence[int]
    folder: Path
    budget: float
    fresh: bool = False
    on_measurement: ProgressCallback = _ignore
    clock: Clock = time.monotonic


def remaining(space: Tunable, tokens: Sequence[int], folder: Path, *, fresh: bool) -> list[int]:
    """Return the token counts without a saved result, in the given order.

    Raises ConfigurationError if the saved results cannot be continued.
    """
    done = {} if fresh else space.saved(folder)
    return [number for number in dict.fromkeys(tokens) if number not in done]


def tune(job: TuneJob) -> Iterator[TuneResult]:
    """Tune each remaining number of tokens, and save the best result so far after each.

    Time that one does not use goes to the others. Ends when the budget is spent; another run
    continues.
    """
    todo = remaining(job.space, job.tokens, job.folder, fresh=job.fresh)
    done = {} if job.fresh else dict(job.space.saved(job.folder))
    end = job.clock() + job.budget
    for index, tokens in enumerate(todo):
        remaining_seconds = end - job.clock()
        if remaining_seconds <= 0:
            return
        for upcoming in todo[index : index + _TOKEN_COUNTS_AHEAD]:
            job.bench.compile_ahead(upcoming, job.space.candidates(upcoming))
        tuned = _Trial(job, tokens, job.clock() + remaining_seconds / (len(todo) - index)).run()
        if tuned.best is not None:
            done[tokens] = tuned.best
            tuned = replace(tuned, file=job.space.save(done, job.folder))
        yield tuned


@dataclass
class _Trial:
    """The search at one number of tokens."""

    job: TuneJob
    tokens: int
    deadline: float
    times: dict[Choice, StageTimes] = field(default_factory=dict)
    refused: dict[Choice, Refusal] = field(default_factory=dict)

    def run(self) -> TuneResult:
        space = self.job.space
        untuned = space.untuned(self.tokens)
        self._screen(untuned)  # even if the compiler refuses it, since it is the current launch
        finished = self._screen_all(space.candidates(self.tokens))
        finalists = dict.fromkeys(space.finalists(self.tokens, self.times))
        if untuned in self.times:
            finalists[untuned] = None
        best = self._best(list(finalists), untuned)
        return TuneResult(self.tokens, best, self.times, self.refused, finished)

    def _screen_all(self, candidates: Sequence[Choice]) -> bool:
        """Screen all candidates; return False if the time did not suffice."""
        for choice in candidates:
            if choice in self.times or choice in self.refused:
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
        self.job.on_measurement()
        if isinstance(outcome, Refusal):
            self.refused[choice] = outcome
        else:
            self.times[choice] = outcome

    def _best(self, finalists: Sequence[Choice], untuned: Choice) -> TunedChoice | None:
        outcomes = self.job.bench.compare(self.tokens, finalists) if finalists else {}
        self.job.on_measurement()
        seconds: dict[Choice, float] = {}
        for choice, outcome in outcomes.items():
            if isinstance(outcome, Refusal):
                self.refused[choice] = outcome
            else:
                seconds[choice] = outcome
        if not seconds:
            return None
        choice, untuned_seconds = min(seconds, key=seconds.__getitem__), seconds.get(untuned)
        if (
            untuned_seconds is not None
            and seconds[choice] > _MAX_RATIO_TO_UNTUNED * untuned_seconds
        ):
            choice = untuned
        return TunedChoice(choice, seconds[choice], untuned_seconds)
