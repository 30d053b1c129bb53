"""What an experts part offers so that its launches can be tuned; the tuner knows no part.

    choices of a part  <- Tunable ->  modular_kernel.tuning, which compiles, checks and times them

A choice is the part's own: the tuner only hands it back. It must be hashable, and picklable, so
that it can be compiled in another process.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

Choice = Hashable


@dataclass(frozen=True)
class Took:
    """Seconds of one call, and of those of its stages that `Tunable.stages` names."""

    seconds: float
    stages: Mapping[str, float] = field(default_factory=dict)


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

    Tuned in two steps. Every candidate is compiled ahead and screened: its output is checked, and
    a few calls are timed stage by stage. By those times the part names a few finalists, of code
    that the candidates have compiled (one stage's launch of this one, another's of that), whose
    whole calls are then timed beside the untuned choice.
    """

    stages: tuple[str, ...] = ()

    def of_prepared(self, device_name: str | None = None) -> "Tunable | None":
        """Return those of calls with prepared weights, kept apart; None where none can be prepared.

        device_name: on this GPU, of which the result can explain; None means this machine's.
        """
        return None

    @abstractmethod
    def untuned(self, tokens: int) -> Choice:
        """Return what the part launches where nothing was tuned."""

    @abstractmethod
    def candidates(self, tokens: int) -> Sequence[Choice]:
        """Return choices worth a try, all different, the likeliest first."""

    @abstractmethod
    def finalists(self, tokens: int, took: Mapping[Choice, Took]) -> Sequence[Choice]:
        """Return the few choices that are fastest by what was measured.

        took: what the candidates and the untuned choice took. Candidates that did not run, or had
        no time to, are not in it.
        """

    @abstractmethod
    def using(self, choice: Choice) -> AbstractContextManager[None]:
        """Launch `choice` inside the block, whatever the number of tokens."""

    @abstractmethod
    def as_json(self, choice: Choice) -> Mapping[str, object]:
        """Return `choice` as a record keeps it."""

    @abstractmethod
    def saved(self, folder: Path) -> Mapping[int, Best]:
        """Read what a former run left in `folder` for this problem, by tokens; empty if nothing.

        ConfigurationError if what is there cannot be continued.
        """

    @abstractmethod
    def save(self, best: Mapping[int, Best], folder: Path) -> Path:
        """Write all of `best` where the part finds it if `folder` is its user's; whole or not."""

    @abstractmethod
    def explain(self, tokens: int, device_name: str | None = None) -> str:
        """Say what is launched, where that comes from, and why: on this machine, or on that GPU."""
