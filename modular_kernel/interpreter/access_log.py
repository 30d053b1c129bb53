"""Log of the memory accesses of interpreted launches.

The builder (`interpreter.builder`) reports every load, store and atomic. The log checks the bounds
of each access, and passes the access on to the race detection and the launch cache if they are
active.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any

from modular_kernel.interpreter.bounds import Bounds
from modular_kernel.interpreter.races import Access, Races

if TYPE_CHECKING:  # the module imports triton
    from modular_kernel.interpreter.launch_cache import LaunchCache, Trace


class AccessLog:
    """Log of the memory accesses of the running launch.

    In all methods, `pointers` and `lanes` are numpy arrays of equal shape: the addresses of
    elements (uint64), and the mask of elements that are accessed (bool). `program` is the index of
    a program in execution order.

    cache: the active launch cache, or None.
    """

    def __init__(self) -> None:
        self._kernel, self._bounds = "", Bounds({})
        self._races: Races | None = None
        self._reports: list[str] | None = None
        self._trace: Trace | None = None
        self.cache: LaunchCache | None = None

    def launch(
        self,
        kernel: FunctionType,
        grid: tuple[int, ...],
        arguments: Mapping[str, Any],
        run: Callable[[], None],
    ) -> None:
        """Run a launch of `kernel`, or replay its writes from the launch cache.

        arguments: arguments of the kernel, by name.
        run: executes the launch.
        """
        if self.cache is None:
            run()
            return

        def run_traced(trace: "Trace | None") -> None:
            self._trace = trace
            try:
                run()
            finally:
                self._trace = None

        self.cache.launch(kernel, grid, arguments, run_traced, can_replay=self._reports is None)

    @contextmanager
    def races(self) -> Iterator[list[str]]:
        """Check every launch in the block for races. Yield the list of distinct reports."""
        reports: list[str] = []
        outer, self._reports = self._reports, reports
        try:
            yield reports
        finally:
            self._reports = outer

    def begin(self, kernel: str, arguments: Mapping[str, Any]) -> None:
        """Reset the log at the start of a launch.

        kernel: name of the kernel, for reports.
        arguments: arguments of the kernel, by name.
        """
        self._kernel, self._bounds = kernel, Bounds(arguments)
        self._races = None if self._reports is None else Races(self._bounds)

    def reset_launch(self) -> None:
        """Drop the state of the current launch.

        Call this in a forked child, which does not have the thread that was running the launch.
        """
        self._trace = self._races = None

    def record_access(
        self, access: Access, pointers: Any, lanes: Any, nbytes: int, program: int
    ) -> None:
        """Record an access of `program` to elements of `nbytes` bytes, before it happens.

        Raises CorruptionError if an element is outside the arguments of the launch.
        """
        range_index = self._bounds.check(pointers, lanes, nbytes)
        if self._trace is not None:
            self._trace.record_access(access, pointers, lanes, nbytes, range_index)
        if self._races is None or self._reports is None:
            return
        for race in self._races.record_access(access, pointers[lanes], program):
            report = f"{self._kernel}: {race}"
            if report not in self._reports:
                self._reports.append(report)

    def mark_address_cast(self) -> None:
        """Record that the launch casts pointers to integers, or integers to pointers."""
        if self._trace is not None:
            self._trace.mark_address_cast()

    def record_acquire_release(self, pointers: Any, lanes: Any, program: int) -> None:
        """Record an acquire-release atomic of `program` at each active pointer."""
        if self._races is not None:
            self._races.record_acquire_release(pointers[lanes], program)


ACCESS_LOG = AccessLog()  # one per process, because launches run one at a time
