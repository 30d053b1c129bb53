"""The seconds that choosing may take, so that what is begun also ends within them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from modular_kernel.select.process_group import Team


class Budget:
    """Counts down from when it is made; over ranks rank 0's clock counts, and all ranks must ask.

    A step is what cannot be interrupted: one pairing's build, compilation and timing, or drawing
    the inputs and the truth of one number of tokens. Any step may take as long as the longest one
    so far, and is not begun with less time left.
    first_step: seconds that the first one is expected to take.
    """

    def __init__(self, seconds: float, team: Team, *, first_step: float) -> None:
        self.seconds = seconds
        self._team = team
        self._start = time.monotonic()
        self._expected = first_step
        self._longest = 0.0

    @property
    def left(self) -> float:
        """Seconds left by this rank's own clock, never negative."""
        return max(self.seconds - self.spent, 0.0)

    @property
    def spent(self) -> float:
        """Seconds since the start by this rank's own clock."""
        return time.monotonic() - self._start

    def over(self) -> bool:
        """Return whether no time is left; the same on all ranks."""
        return self._team.leader(self.left <= 0)

    def allows(self, steps: int = 1) -> bool:
        """Return whether so many more steps are expected to end in time; the same on all ranks."""
        longest = self._longest or self._expected
        return self._team.leader(self.left > 0 and self.left >= steps * longest)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run one step within it, and remember how long it took."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._longest = max(self._longest, time.monotonic() - start)
