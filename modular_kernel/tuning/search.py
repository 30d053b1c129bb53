"""The tuner's loop: at each number of tokens, screen candidates, compare finalists, save the best.

It is independent of parts and devices: a `Tunable` defines the candidates, and a `Bench` measures
them. A *choice* is one candidate, that is, the launch configurations of a call.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from modular_kernel.contracts import Choice, StageTimes, Tunable, TunedChoice

_MAX_RATIO_TO_UNTUNED = 0.99  # maximum ratio to the untuned time; smaller gains are noise
_TOKEN_COUNTS_AHEAD = 2  # token counts to compile in the background, including the current one


@dataclass(frozen=True)
class Refusal:
    """The reason why a choice was not timed. wrong: its results are wrong, which is a defect."""

    reason: str
    wrong: bool = False


class Bench(ABC):
    """Compilation and measurement of choices for one problem."""

    @abstractmethod
    def compile_ahead(self, tokens: int, choices: Sequence[Choice]) -> None:
        """Start to compile the choices in the background, and return immediately."""

    @abstractmethod
    def refusal(self, tokens: int, choice: Choice) -> Refusal | None:
        """Wait until a choice is compiled; return why it is not worth timing, or None."""

    @abstractmethod
    def screen(self, tokens: int, choice: Choice) -> StageTimes | Refusal:
        """Verify and time a call, with fewer repetitions if it is much slower than the fastest."""

    @abstractmethod
    def compare(self, tokens: int, choices: Sequence[Choice]) -> Mapping[Choice, float | Refusal]:
        """Return the seconds per call of each choice, timed alternately, or why there are none."""


@dataclass(frozen=True)
class TuneResult:
    """The result for one number of tokens.

    best: the fastest choice; None if no choice ran correctly. times: of the screened choices.
    refused: the choices that were not timed, and why. finished: whether all candidates were
    screened. file: where `best` was saved.
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
    """A tuning job: the token counts to tune, and its time budget.

    folder: for the results. budget: seconds for all of `tokens`. fresh: whether to ignore results
    in the folder instead of continuing from them. on_measurement: called after every measurement.
    """

    space: Tunable
    bench: Bench
    tokens: Sequence[int]
    folder: Path
    budget: float
    fresh: bool = False
    on_measurement: ProgressCallback = _ignore
    clock: Clock = time.monotonic


def remaining_token_counts(
    space: Tunable, tokens: Sequence[int], folder: Path, *, fresh: bool
) -> list[int]:
    """Return the token counts without a saved result, in the given order.

    Raises ConfigurationError if the saved results cannot be continued.
    """
    saved_choices = {} if fresh else space.saved(folder)
    return [number for number in dict.fromkeys(tokens) if number not in saved_choices]


def tune(job: TuneJob) -> Iterator[TuneResult]:
    """Tune each number of tokens without a saved result, and save all results after each one.

    The time left is divided equally among the token counts left, so that those that finish early
    leave more time to the others. The search ends when the budget is spent; another run continues
    it.
    """
    remaining_tokens = remaining_token_counts(job.space, job.tokens, job.folder, fresh=job.fresh)
    saved_choices = {} if job.fresh else dict(job.space.saved(job.folder))
    end = job.clock() + job.budget
    for index, tokens in enumerate(remaining_tokens):
        seconds_left = end - job.clock()
        if seconds_left <= 0:
            return
        for upcoming in remaining_tokens[index : index + _TOKEN_COUNTS_AHEAD]:
            job.bench.compile_ahead(upcoming, job.space.candidates(upcoming))
        result = _Search(
            job, tokens, job.clock() + seconds_left / (len(remaining_tokens) - index)
        ).run()
        if result.best is not None:
            saved_choices[tokens] = result.best
            result = replace(result, file=job.space.save(saved_choices, job.folder))
        yield result


@dataclass
class _Search:
    """The search at one number of tokens. deadline: by the job's clock."""

    job: TuneJob
    tokens: int
    deadline: float
    times: dict[Choice, StageTimes] = field(default_factory=dict)
    refused: dict[Choice, Refusal] = field(default_factory=dict)

    def run(self) -> TuneResult:
        space = self.job.space
        untuned = space.untuned(self.tokens)
        self._screen(untuned)  # even if it spills, because it is what runs without tuning
        finished = self._screen_all(space.candidates(self.tokens))
        finalists = dict.fromkeys(space.finalists(self.tokens, self.times))
        if untuned in self.times:
            finalists[untuned] = None
        best = self._best(list(finalists), untuned)
        return TuneResult(self.tokens, best, self.times, self.refused, finished)

    def _screen_all(self, candidates: Sequence[Choice]) -> bool:
        """Screen all candidates; return whether all were screened before the deadline."""
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
        """Return the fastest of the finalists, or `untuned` if the gain may be noise."""
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
