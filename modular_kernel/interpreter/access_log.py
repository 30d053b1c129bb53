"""Memory accesses of interpreted launches, logged for bounds checks, races and the launch cache."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any

from modular_kernel.interpreter.bounds import Bounds
from modular_kernel.interpreter.races import Access, Races

if TYPE_CHECKING:  # importing it would import triton
    from modular_kernel.interpreter.launch_cache import LaunchCache, Trace


class AccessLog:
    """Memory accesses of launches, one launch at a time.

    Pointers and lanes are numpy arrays of one shape. A program is its index in execution order.
    known: the launch cache, if one is active.
    """

    def __init__(self) -> None:
        self._kernel, self._bounds = "", Bounds({})
        self._races: Races | None = None
        self._found: list[str] | None = None
        self._trace: Trace | None = None
        self.known: LaunchCache | None = None

    def launch(
        self,
        kernel: FunctionType,
        grid: tuple[int, ...],
        arguments: Mapping[str, Any],
        run: Callable[[], None],
    ) -> None:
        """Run a launch of `kernel`, or replay its writes from the launch cache."""
        if self.known is None:
            run()
            return

        def traced(trace: "Trace | None") -> None:
            self._trace = trace
            try:
                run()
            finally:
                self._trace = None

        self.known.launch(kernel, grid, arguments, traced, repeat=self._found is None)

    @contextmanager
    def races(self) -> Iterator[list[str]]:
        """Check every launch in the block for races; yield a list of distinct reports."""
        reports: list[str] = []
        outer, self._found = self._found, reports
        try:
            yield reports
        finally:
            self._found = outer

    def begin(self, kernel: str, arguments: Mapping[str, Any]) -> None:
        """Begin a launch of `kernel`, with these tensors and other arguments."""
        self._kernel, self._bounds = kernel, Bounds(arguments)
        self._races = None if self._found is None else Races(self._bounds)

    def forget_launch(self) -> None:
        """Drop the state of a launch whose thread is not in this process."""
        self._trace = self._races = None

    def touch(self, access: Access, pointers: Any, lanes: Any, nbytes: int, program: int) -> None:
        """Log that `program` is about to access elements of `nbytes` bytes in the active lanes.

        Raises CorruptionError if an element is outside the launch's arguments.
        """
        range_index = self._bounds.check(pointers, lanes, nbytes)
        if self._trace is not None:
            self._trace.touch(access, pointers, lanes, nbytes, range_index)
        if self._races is None or self._found is None:
            return
        for race in self._races.touch(access, pointers[lanes], program):
            report = f"{self._kernel}: {race}"
            if report not in self._found:
                self._found.append(report)

    def see_addresses(self) -> None:
        """Note that the launch converts addresses to integers, or integers to addresses."""
        if self._trace is not None:
            self._trace.see_addresses()

    def order(self, pointers: Any, lanes: Any, program: int) -> None:
        """Log that `program` is about to acquire and release at each pointer, atomically."""
        if self._races is not None:
            self._races.order(pointers[lanes], program)


watch = AccessLog()  # one per process, since one launch runs at a time
