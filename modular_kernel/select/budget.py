"""Time budget of a measurement, which also limits what is started."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from modular_kernel.select.process_group import Ranks


class Budget:
    """A countdown in seconds from its creation.

    With several ranks rank 0's clock is used, and `over` and `allows` are collective. A step cannot
    be interrupted: the build, compilation and timing of one pairing, or the creation of the inputs
    and expected outputs of one token count. A step is started only if the remaining time is at
    least that of the longest step so far. first_step: estimated seconds of the first step.
    """

    def __init__(self, seconds: float, team: Ranks, *, first_step: float) -> None:
        self.seconds = seconds
        self._team = team
        self._start = time.monotonic()
        self._expected = first_step
        self._longest = 0.0

    @property
    def left(self) -> float:
        """Remaining seconds by this rank's clock, at least 0."""
        return max(self.seconds - self.spent, 0.0)

    @property
    def spent(self) -> float:
        """Seconds since the start by this rank's clock."""
        return time.monotonic() - self._start

    def over(self) -> bool:
        """Return whether no time is left; the same on all ranks."""
        return self._team.leader(self.left <= 0)

    def allows(self, steps: int = 1) -> bool:
        """Return whether this many steps are expected to finish in time; the same on all ranks."""
        longest = self._longest or self._expected
        return self._team.leader(self.left > 0 and self.left >= steps * longest)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure the duration of one step."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._longest = max(self._longest, time.monotonic() - start)
