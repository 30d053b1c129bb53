"""Which lines each case executes: its first call and a strided one, every line of a part watched.

Interpreted kernels are Python, so their lines are seen like any other's.
"""

import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from modular_kernel.testing.cases.lists import Case
from modular_kernel.testing.mutation.case_runs import Level, Pair, case_list, digest
from modular_kernel.testing.mutation.forked_worker import Child, Tell
from modular_kernel.testing.mutation.patched_module import forget
from modular_kernel.testing.mutation.source import Mutant

Lines = Mapping[str, frozenset[int]]  # file -> line numbers
Seen = dict[str, set[int]]

# The slowest case, watched.
_PATIENCE = 300.0


@dataclass(frozen=True)
class Covered:
    """A case, the seconds of its two watched calls, their bits, and the lines they executed."""

    case: Case
    seconds: float
    digest: str
    lines: Lines


@dataclass(frozen=True)
class Coverage:
    """All cases of some pairings; `loading` holds the lines executed by import, whenever that was,
    and by selection."""

    loading: Lines
    cases: tuple[Covered, ...]
    ended: str = ""  # why it is not whole; "" if it is

    def executing(self, mutant: Mutant) -> tuple[Covered, ...]:
        """Cases that execute a mutant."""
        file, lines = str(mutant.path), _lines(mutant)
        return tuple(c for c in self.cases if not c.lines.get(file, frozenset()).isdisjoint(lines))

    def loads(self, mutant: Mutant) -> bool:
        """Whether an import does, or the selection of cases."""
        return not self.loading.get(str(mutant.path), frozenset()).isdisjoint(_lines(mutant))


def joined(coverages: Iterable[Coverage]) -> Coverage:
    """Return the coverage of several lists of cases as one."""
    loading: dict[str, frozenset[int]] = {}
    cases, ended = list[Covered](), ""
    for each in coverages:
        loading = united((loading, each.loading))
        cases += each.cases
        ended = ended or each.ended
    return Coverage(loading, tuple(cases), ended)


def united(each: Iterable[Mapping[str, Collection[int]]]) -> dict[str, frozenset[int]]:
    """Return the lines of some maps from files, put together."""
    found: dict[str, frozenset[int]] = {}
    for lines in each:
        for file, numbers in lines.items():
            found[file] = found.get(file, frozenset()) | frozenset(numbers)
    return found


def _lines(mutant: Mutant) -> set[int]:
    return {line for first, last in mutant.spans for line in range(first, last + 1)}


def cover(
    modules: Mapping[str, Path],
    pairs: Iterable[Pair],
    level: Level,
    some: Collection[Case] | None = None,
) -> Coverage:
    """Call each case of `pairs` twice in a child, with the lines of `modules` watched.

    some: of these cases those alone; None for all.
    """
    pairs = tuple(pairs)
    files = {str(path) for path in modules.values()}

    def work(tell: Tell) -> None:
        forget(set(modules))
        with watched(files) as (lines, loaded):
            cases, machine = case_list(pairs, level)
        tell({"lines": as_lists(lines), "loaded": as_lists(loaded)})
        for case in _of(cases, some):
            start = time.perf_counter()
            with watched(files) as (lines, loaded):
                bits = digest(case, machine)
            seconds = time.perf_counter() - start
            told = {"lines": as_lists(lines), "loaded": as_lists(loaded)}
            tell({"digest": bits, "seconds": seconds, **told})

    child = Child(work, _PATIENCE)
    cases = _of(case_list(pairs, level)[0], some)
    found = []
    loading: dict[str, frozenset[int]] = {}
    for number, message in enumerate(child):
        lines = {file: frozenset(numbers) for file, numbers in message["lines"].items()}
        if number:
            case = cases[number - 1]
            found.append(Covered(case, message["seconds"], message["digest"], lines))
        else:
            loading |= lines
        for file, numbers in message["loaded"].items():
            loading[file] = loading.get(file, frozenset()).union(numbers)
    ended = child.ended
    why = "" if ended.how == "done" else f"{ended.how}: {ended.detail}"
    return Coverage(loading, tuple(found), why)


def _of(cases: Iterable[Case], some: Collection[Case] | None) -> tuple[Case, ...]:
    return tuple(case for case in cases if some is None or case in some)


@contextmanager
def watched(files: set[str]) -> Iterator[tuple[Seen, Seen]]:
    """Yield two records that fill with lines of `files`: those executed within it, by any thread
    started there, and, apart, those executed while one of `files` is imported.

    A module is imported once, in whatever case needs it first: that says nothing of this case.
    """
    called, loaded = Seen(), Seen()
    lines_of: dict[CodeType, set[int]] = {}

    def started(frame: FrameType, _event: str, _: object) -> Any:
        file = frame.f_code.co_filename
        if file not in files:
            return None
        importing = _imports(frame, files)
        code, known = frame.f_code, (loaded if importing else called).setdefault(file, set())
        if code not in lines_of:
            lines_of[code] = {line for _, _, line in code.co_lines() if line is not None}
        if lines_of[code] <= known:
            return None  # nothing more to see: at full speed

        def local(frame: FrameType, event: str, _: object) -> Any:
            if event == "line":
                known.add(frame.f_lineno)
            return local

        known.add(frame.f_lineno)
        return local

    threading.settrace(started)
    sys.settrace(started)
    try:
        yield called, loaded
    finally:
        sys.settrace(None)
        threading.settrace(None)


def _imports(frame: FrameType | None, files: set[str]) -> bool:
    """Whether a module of `files` is being imported where this frame runs."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename in files:
            return True
        frame = frame.f_back
    return False


def as_lists(lines: dict[str, set[int]]) -> dict[str, list[int]]:
    """Lines as a message holds them."""
    return {file: sorted(numbers) for file, numbers in lines.items()}
