"""What an experts part offers so that its launches can be tuned; the tuner knows no part.

    choices of a part  <- Tunable ->  modular_kernel.tuning, which compiles, checks and times them

A choice is the part's own: the tuner only hands it back. It must be hashable, and picklable, so
that it can be compiled in another process.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

Choice = Hashable
# Yields choices to be timed; is sent the seconds of those that ran and were right.
Search = Generator[Sequence[Choice], Mapping[Choice, float], None]


@dataclass(frozen=True)
class Best:
    """The fastest choice for some number of tokens.

    untuned_seconds: of the untuned choice, None if that could not be timed.
    """

    choice: Choice
    seconds: float
    untuned_seconds: float | None


class Tunable(ABC):
    """The launches of one part for one problem, whose number of tokens plays no role.

    A choice is in force inside `using(choice)`, in this thread: kernels and plans are made and
    called there.
    """

    @abstractmethod
    def untuned(self, tokens: int) -> Choice:
        """What the part launches where nothing was tuned."""

    @abstractmethod
    def search(self, tokens: int) -> Search:
        """Rounds of choices to time, each chosen by the seconds of those before it.

        The tuner times the untuned choice itself, and picks the winner itself, among all that
        were timed. It may stop between two rounds, and where time is short answer for some only.
        """

    @abstractmethod
    def likely(self, tokens: int) -> Sequence[Choice]:
        """Choices whose kernels `search` will probably launch, to be compiled ahead."""

    @abstractmethod
    def using(self, choice: Choice) -> AbstractContextManager[None]:
        """Launch `choice` inside the block, whatever the number of tokens."""

    @abstractmethod
    def saved(self, folder: Path) -> Mapping[int, Best]:
        """What a former run left in `folder` for this problem, by tokens; empty if nothing.

        ConfigurationError if what is there cannot be continued.
        """

    @abstractmethod
    def save(self, best: Mapping[int, Best], folder: Path) -> Path:
        """Write all of `best` where the part finds it if `folder` is its user's; whole or not."""

    @abstractmethod
    def explain(self, tokens: int, device_name: str | None = None) -> str:
        """What is launched, where that comes from, and why: on this machine, or on that GPU."""
