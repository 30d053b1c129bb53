"""The loop of the tuner. For each number of tokens, it

1. screens all candidates: compiles them, checks their outputs, and times a few calls;
2. compares the fastest candidates (the finalists) with more repetitions; and
3. saves the fastest finalist.

A candidate is called a choice: the launch configurations of all kernels of a call. The loop does
not depend on the part or the device. A `Tunable` of the part defines the choices, and a
`Benchmarker` measures them.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from modular_kernel.contracts import Choice, StageTimes, Tunable, TunedChoice

# Maximum ratio of the fastest time to the untuned time. With a larger ratio, the gain may be noise,
# and the untuned choice is kept.
_MAX_RATIO_TO_UNTUNED = 0.99
_NUM_COMPILED_AHEAD = 2  # token counts to compile in the background, including the current one


@dataclass(frozen=True)
class Refusal:
    """Why a choice was not timed.

    is_wrong: whether the choice computed wrong outputs, which is a bug in a kernel.
    """

    reason: str
    is_wrong: bool = False


class Benchmarker(ABC):
    """Compiles and measures the choices of one problem."""

    @abstractmethod
    def compile_ahead(self, tokens: int, choices: Sequence[Choice]) -> None:
        """Start to compile the choices in the background, and return immediately."""

    @abstractmethod
    def wait_compiled(self, tokens: int, choice: Choice) -> Refusal | None:
        """Wait until a choice is compiled. Return None, or a refusal if it should not be timed."""

    @abstractmethod
    def screen(self, tokens: int, choice: Choice) -> StageTimes | Refusal:
        """Check the output of a choice, and time a few calls."""

    @abstractmethod
    def compare(self, tokens: int, choices: Sequence[Choice]) -> Mapping[Choice, float | Refusal]:
        """Time the choices alternately. Return the seconds per call, or a refusal, by choice."""


@dataclass(frozen=True)
class TuneResult:
    """The result for one number of tokens.

    best: the fastest choice; None if no choice ran correctly.
    times: times of the screened choices.
    refused: the choices that were refused, with the reason.
    finished: whether all candidates were screened before the deadline.
    file: the file in which `best` was saved.
    """

    tokens: int
    best: TunedChoice | None
    times: Mapping[Choice, StageTimes]
    refused: Mapping[Choice, Refusal]
    finished: bool
    file: Path | None = None

    @property
    def wrong_choices(self) -> tuple[Choice, ...]:
        """Choices that computed wrong outputs."""
        return tuple(choice for choice, refusal in self.refused.items() if refusal.is_wrong)


Clock = Callable[[], float]
ProgressCallback = Callable[[], None]


def _do_nothing() -> None:
    pass


@dataclass(frozen=True)
class TuneJob:
    """A tuning job: what to tune, and the time budget.

    space: the search space.
    tokens: the token counts to tune, in this order.
    folder: the folder of the results.
    budget: seconds for all token counts together.
    ignore_saved: whether to tune token counts that have saved results again.
    on_measurement: called after every measurement, to show progress.
    clock: returns the current time in seconds.
    """

    space: Tunable
    benchmarker: Benchmarker
    tokens: Sequence[int]
    folder: Path
    budget: float
    ignore_saved: bool = False
    on_measurement: ProgressCallback = _do_nothing
    clock: Clock = time.monotonic


def remaining_token_counts(
    space: Tunable, tokens: Sequence[int], folder: Path, *, ignore_saved: bool
) -> list[int]:
    """Return the numbers in `tokens` without a saved result, or all if `ignore_saved` is True.

    Raises ConfigurationError if the saved results cannot be extended.
    """
    saved_choices = {} if ignore_saved else space.saved(folder)
    return [number for number in dict.fromkeys(tokens) if number not in saved_choices]


def tune(job: TuneJob) -> Iterator[TuneResult]:
    """Tune each number of tokens without a saved result, and save each result.

    Each number of tokens gets an equal share of the remaining time. Tuning ends when the budget is
    spent. Another run continues with the remaining token counts.
    """
    remaining_tokens = remaining_token_counts(
        job.space, job.tokens, job.folder, ignore_saved=job.ignore_saved
    )
    saved_choices = {} if job.ignore_saved else dict(job.space.saved(job.folder))
    end_time = job.clock() + job.budget
    for index, tokens in enumerate(remaining_tokens):
        seconds_left = end_time - job.clock()
        if seconds_left <= 0:
            return
        for upcoming_tokens in remaining_tokens[index : index + _NUM_COMPILED_AHEAD]:
            job.benchmarker.compile_ahead(upcoming_tokens, job.space.candidates(upcoming_tokens))
        deadline = job.clock() + seconds_left / (len(remaining_tokens) - index)
        result = _Search(job, tokens, deadline).run()
        if result.best is not None:
            saved_choices[tokens] = result.best
            result = replace(result, file=job.space.save(saved_choices, job.folder))
        yield result


@dataclass
class _Search:
    """The search at one number of tokens.

    deadline: time of job.clock() after which no further candidate is screened.
    """

    job: TuneJob
    tokens: int
    deadline: float
    times: dict[Choice, StageTimes] = field(default_factory=dict)
    refused: dict[Choice, Refusal] = field(default_factory=dict)

    def run(self) -> TuneResult:
        space = self.job.space
        untuned = space.untuned(self.tokens)
        # Time the untuned choice even if it spills registers, because it may be kept.
        self._screen(untuned)
        finished = self._screen_all(space.candidates(self.tokens))
        finalists = dict.fromkeys(space.finalists(self.tokens, self.times))
        if untuned in self.times:
            finalists[untuned] = None
        best = self._find_best(list(finalists), untuned)
        return TuneResult(self.tokens, best, self.times, self.refused, finished)

    def _screen_all(self, candidates: Sequence[Choice]) -> bool:
        """Screen the candidates. Return whether all were screened before the deadline."""
        for choice in candidates:
            if choice in self.times or choice in self.refused:
                continue
            if self.job.clock() >= self.deadline:
                return False
            refusal = self.job.benchmarker.wait_compiled(self.tokens, choice)
            if refusal is None:
                self._screen(choice)
            else:
                self.refused[choice] = refusal
        return True

    def _screen(self, choice: Choice) -> None:
        outcome = self.job.benchmarker.screen(self.tokens, choice)
        self.job.on_measurement()
        if isinstance(outcome, Refusal):
            self.refused[choice] = outcome
        else:
            self.times[choice] = outcome

    def _find_best(self, finalists: Sequence[Choice], untuned: Choice) -> TunedChoice | None:
        """Return the fastest of the finalists, or `untuned` if the gain may be noise."""
        outcomes = self.job.benchmarker.compare(self.tokens, finalists) if finalists else {}
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
