"""Measure which source lines of a part (an experts or exchange class) its test cases execute.

A mutant needs to run only with the cases that execute its line. Two calls of each case are traced,
and a hash of all their result bits (the digest) is recorded. Interpreted kernels are Python code,
so their lines are recorded like all others.
"""

import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from modular_kernel.testing.cases.lists import Case
from modular_kernel.testing.mutation.case_runs import Level, Pair, hash_case, list_cases
from modular_kernel.testing.mutation.forked_worker import ChildProcess, Send
from modular_kernel.testing.mutation.patched_module import unload
from modular_kernel.testing.mutation.source import Mutant

Lines = Mapping[str, frozenset[int]]  # maps a file to line numbers
LineSets = dict[str, set[int]]
# Reports progress. The arguments are what the cases run for (a pairing or the identity of a
# mutant), the number of completed cases, and the number of all cases.
OnCase = Callable[[str, int, int], None]

# Longer than any case takes with tracing.
_CASE_TIMEOUT_S = 300.0


def ignore_case(subject: str, completed: int, total: int) -> None:
    """Report no progress: the default of arguments of type `OnCase`."""


def join_pairs(pairs: Iterable[Pair]) -> str:
    """Return the names of pairings, such as "MoEPrepareAndFinalizeNoEP x TorchExperts"."""
    return ", ".join(" x ".join(pair) for pair in pairs)


@dataclass(frozen=True)
class CaseCoverage:
    """A case with the seconds, digest and executed lines of its two traced calls."""

    case: Case
    seconds: float
    digest: str
    lines: Lines


@dataclass(frozen=True)
class Coverage:
    """Coverage of all cases of some pairings of an exchange and an experts class.

    Attributes:
        loading: lines that imports (including imports caused by a case) or the selection of cases
            execute.
        cases: coverage of each case.
        error: why the coverage is incomplete, or "".
    """

    loading: Lines
    cases: tuple[CaseCoverage, ...]
    error: str = ""

    def executing(self, mutant: Mutant) -> tuple[CaseCoverage, ...]:
        """Return the cases that execute a line of a mutant."""
        file, lines = str(mutant.path), _list_lines(mutant)
        return tuple(c for c in self.cases if not c.lines.get(file, frozenset()).isdisjoint(lines))

    def loads(self, mutant: Mutant) -> bool:
        """Return whether an import or the selection of cases executes a line of a mutant."""
        return not self.loading.get(str(mutant.path), frozenset()).isdisjoint(_list_lines(mutant))


def merge_coverage(coverages: Iterable[Coverage]) -> Coverage:
    """Return the union of the coverage of several lists of cases."""
    loading: dict[str, frozenset[int]] = {}
    cases, error = list[CaseCoverage](), ""
    for coverage in coverages:
        loading = merge_lines((loading, coverage.loading))
        cases += coverage.cases
        error = error or coverage.error
    return Coverage(loading, tuple(cases), error)


def merge_lines(line_maps: Iterable[Mapping[str, Collection[int]]]) -> dict[str, frozenset[int]]:
    """Return the union of several maps from files to lines."""
    merged: dict[str, frozenset[int]] = {}
    for lines in line_maps:
        for file, numbers in lines.items():
            merged[file] = merged.get(file, frozenset()) | frozenset(numbers)
    return merged


def _list_lines(mutant: Mutant) -> set[int]:
    return {line for first, last in mutant.spans for line in range(first, last + 1)}


def cover(
    modules: Mapping[str, Path],
    pairs: Iterable[Pair],
    level: Level,
    selected: Collection[Case] | None = None,
    *,
    on_case: OnCase = ignore_case,
) -> Coverage:
    """Make the two calls of each case of `pairs` in a child process; trace the lines of `modules`.

    modules: maps modules to their files.
    selected: the only cases to run; None means all cases.
    on_case: called after each case.
    """
    pairs = tuple(pairs)
    files = {str(path) for path in modules.values()}

    def work(send: Send) -> None:
        unload(set(modules))
        with trace_lines(files) as (lines, loaded):
            cases, machine = list_cases(pairs, level)
        send({"lines": convert_to_lists(lines), "loaded": convert_to_lists(loaded)})
        for case in _select_cases(cases, selected):
            start = time.perf_counter()
            with trace_lines(files) as (lines, loaded):
                digest = hash_case(case, machine)
            seconds = time.perf_counter() - start
            line_lists = {"lines": convert_to_lists(lines), "loaded": convert_to_lists(loaded)}
            send({"digest": digest, "seconds": seconds, **line_lists})

    child = ChildProcess(work, _CASE_TIMEOUT_S)
    cases = _select_cases(list_cases(pairs, level)[0], selected)
    case_coverages = []
    loading: dict[str, frozenset[int]] = {}
    for index, message in enumerate(child):
        lines = {file: frozenset(numbers) for file, numbers in message["lines"].items()}
        if index:
            case = cases[index - 1]
            case_coverages.append(CaseCoverage(case, message["seconds"], message["digest"], lines))
            on_case(join_pairs(pairs), index, len(cases))
        else:
            loading |= lines
        for file, numbers in message["loaded"].items():
            loading[file] = loading.get(file, frozenset()).union(numbers)
    exit_info = child.exit
    error = "" if exit_info.status == "done" else f"{exit_info.status}: {exit_info.detail}"
    return Coverage(loading, tuple(case_coverages), error)


def _select_cases(cases: Iterable[Case], selected: Collection[Case] | None) -> tuple[Case, ...]:
    return tuple(case for case in cases if selected is None or case in selected)


@contextmanager
def trace_lines(files: set[str]) -> Iterator[tuple[LineSets, LineSets]]:
    """Record the executed lines of `files`, in this thread and in threads that are started inside.

    Yields two records. The second one contains the lines that are executed during the import of one
    of `files`. They are not attributed to a case, because a module is imported only once, by the
    first case that needs it.
    """
    call_lines, import_lines = LineSets(), LineSets()
    lines_by_code: dict[CodeType, set[int]] = {}

    def trace_call(frame: FrameType, _event: str, _: object) -> Any:
        file = frame.f_code.co_filename
        if file not in files:
            return None
        is_importing = _is_importing(frame, files)
        code = frame.f_code
        executed = (import_lines if is_importing else call_lines).setdefault(file, set())
        if code not in lines_by_code:
            lines_by_code[code] = {line for _, _, line in code.co_lines() if line is not None}
        if lines_by_code[code] <= executed:
            return None  # every line has been recorded, so run without tracing

        def trace_line(frame: FrameType, event: str, _: object) -> Any:
            if event == "line":
                executed.add(frame.f_lineno)
            return trace_line

        executed.add(frame.f_lineno)
        return trace_line

    threading.settrace(trace_call)
    sys.settrace(trace_call)
    try:
        yield call_lines, import_lines
    finally:
        sys.settrace(None)
        threading.settrace(None)


def _is_importing(frame: FrameType | None, files: set[str]) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename in files:
            return True
        frame = frame.f_back
    return False


def convert_to_lists(lines: dict[str, set[int]]) -> dict[str, list[int]]:
    """Convert lines to JSON-compatible lists."""
    return {file: sorted(numbers) for file, numbers in lines.items()}
