"""Watch: what the programs of interpreted launches touch, held against what they may touch."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any

from modular_kernel.interpreter.bounds import Bounds
from modular_kernel.interpreter.races import Access, Races

if TYPE_CHECKING:  # it imports triton
    from modular_kernel.interpreter.launch_cache import KnownLaunches, Trace


class AccessLog:
    """Of one launch after the other. Pointers and lanes are numpy arrays of one shape; a program is
    its number in the order in which they run. known: launches that need not run again."""

    def __init__(self) -> None:
        self._kernel, self._bounds = "", Bounds({})
        self._races: Races | None = None
        self._found: list[str] | None = None
        self._trace: Trace | None = None
        self.known: KnownLaunches | None = None

    def launch(
        self,
        kernel: FunctionType,
        grid: tuple[int, ...],
        arguments: Mapping[str, Any],
        run: Callable[[], None],
    ) -> None:
        """`run` a launch of `kernel` unless what it writes is known."""
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
        """Within it, every launch is watched for races; filled with those found, each once."""
        found: list[str] = []
        before, self._found = self._found, found
        try:
            yield found
        finally:
            self._found = before

    def begin(self, kernel: str, arguments: Mapping[str, Any]) -> None:
        """Begin a launch of `kernel`, with these tensors and other arguments."""
        self._kernel, self._bounds = kernel, Bounds(arguments)
        self._races = None if self._found is None else Races(self._bounds)

    def forget_launch(self) -> None:
        """Drop what is noted of a launch that will not end: its thread is not in this process."""
        self._trace = self._races = None

    def touch(self, access: Access, pointers: Any, lanes: Any, nbytes: int, program: int) -> None:
        """`program` is about to touch elements of `nbytes` bytes, where lanes are on.

        CorruptionError if one lies outside the launch's arguments.
        """
        place = self._bounds.check(pointers, lanes, nbytes)
        if self._trace is not None:
            self._trace.touch(access, pointers, lanes, nbytes, place)
        if self._races is None or self._found is None:
            return
        for race in self._races.touch(access, pointers[lanes], program):
            told = f"{self._kernel}: {race}"
            if told not in self._found:
                self._found.append(told)

    def see_addresses(self) -> None:
        """Note that the launch makes numbers of addresses, or addresses of numbers."""
        if self._trace is not None:
            self._trace.see_addresses()

    def order(self, pointers: Any, lanes: Any, program: int) -> None:
        """`program` is about to acquire and release there, in one atomic operation each."""
        if self._races is not None:
            self._races.order(pointers[lanes], program)


watch = AccessLog()  # of this process: one launch runs at a time
