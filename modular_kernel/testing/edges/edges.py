"""Edges of the rules: for each reason of refusal, the nearest accepted and refused problem.

    found = edges_of(MyPrepare, MyExperts, machine)
    for edge in found.edges:
        assert edge.passing.verdict.ok and not edge.failing.verdict.ok
        assert not edge.contradiction

The search is generic. It starts at a problem that the pairing accepts and changes one field at a
time (`edges.axes`): a flag, a scheme, a part's declaration; or a number, by the least step and then
as far as the verdict stays the same. A situation that is refused for a single reason, one step from
an accepted one, is an edge of that reason. So third-party rules get their edges without further
work.
"""

import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from unittest import mock

from modular_kernel.compatibility.support import ExpertsRequirements, Rejection
from modular_kernel.contracts import PermuteExpertsUnpermute, PrepareAndFinalize
from modular_kernel.spec.problem import Machine, Parallel, Problem
from modular_kernel.testing.cases.case import Case
from modular_kernel.testing.cases.ranks import RankCase
from modular_kernel.testing.edges.axes import (
    EdgeSituation,
    NumericField,
    changed_fields,
    numeric_fields,
)
from modular_kernel.testing.edges.refusal_text import contradiction
from modular_kernel.testing.edges.sites import Site

_START = Problem(tokens=8, hidden=64, intermediate=64, experts=16, top_k=2)
_RANKS = (1, 2, 4, 8)
_SHORT = 200  # ranges up to this size are always searched to their ends
_HIDDEN = (64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class EdgeReason:
    """One reason to refuse a pairing.

    rule: its tag. parties: the parties that disagree. need: the requirement, with numbers removed.
    site: where the rule makes the Rejection.
    """

    rule: str
    parties: tuple[str, ...]
    need: str
    site: Site

    def __str__(self) -> str:
        return f"[{self.rule}] {' / '.join(self.parties)}: {self.need}"


@dataclass(frozen=True)
class Edge:
    """An accepted and a refused situation that differ in `field` alone.

    The second is refused by `rejection`, from no rule but that of `reason`. values: (passing,
    failing) values of the field if it is numeric.
    """

    reason: EdgeReason
    field: str
    passing: EdgeSituation
    failing: EdgeSituation
    rejection: Rejection
    values: tuple[int, int] | None = None

    @property
    def contradiction(self) -> str:
        """How the text of the refusal contradicts the edge; "" if it does not."""
        refused = self.rejection
        return contradiction(refused.got, refused.need, self.values, self.field)

    def __str__(self) -> str:
        step = "" if self.values is None else f" {self.values[0]} passes, {self.values[1]} fails"
        return f"{self.field}{step}: {self.rejection}"


@dataclass
class Edges:
    """Result of a search.

    base: the start; None if the pairing accepted none of the problems tried. by_place: one edge per
    reason, field and direction. met: every reason that occurred.
    """

    base: EdgeSituation | None
    by_place: dict[tuple[EdgeReason, str, bool], Edge] = field(default_factory=dict)
    met: dict[EdgeReason, Rejection] = field(default_factory=dict)

    @property
    def edges(self) -> tuple[Edge, ...]:
        """The edges in the order they were found."""
        return tuple(self.by_place.values())

    @property
    def without(self) -> tuple[EdgeReason, ...]:
        """Reasons that never occurred alone, one step from a valid problem."""
        with_edge = {edge.reason for edge in self.edges}
        return tuple(reason for reason in self.met if reason not in with_edge)


def edges_of(
    pf: type[PrepareAndFinalize],
    experts: type[PermuteExpertsUnpermute],
    machine: Machine,
    *,
    depth: int = 1,
    start: Problem | None = None,
) -> Edges:
    """Search around a problem that a pairing accepts and return the edges found.

    machine: tried first; then a GPU with everything that both parts require. depth: number of
    fields, including the edge's, that may differ from the start. More finds rules about unusual
    problems only, and takes a hundred times as long per level. start: the first problem, with its
    ranks if there are several; None uses a small one in the part's first scheme.
    """
    base = _valid(pf, experts, machine, start or _start(experts.requires))
    edges = Edges(base)
    with _record_sites() as sites:
        bases = [] if base is None else [base]
        for step in range(depth):
            bases = [
                other for one in bases for other in _search_around(one, edges, sites, far=step == 0)
            ]
    return edges


def _valid(
    pf: type[PrepareAndFinalize],
    experts: type[PermuteExpertsUnpermute],
    machine: Machine,
    start: Problem,
) -> EdgeSituation | None:
    """Return a small problem that the pairing accepts on `machine` or else on a GPU, or None."""
    packages = frozenset((*pf.requires.packages, *experts.requires.packages))
    declared = pf.requires, experts.requires
    arches = [req.min_arch for req in declared if req.min_arch is not None]
    arches += [min(req.archs) for req in declared if req.archs]
    gpu = Machine("cuda", max([(9, 0), *arches]), packages)
    sizes = (start.hidden, *_HIDDEN, *sorted(pf.requires.hidden_sizes or ()))
    is_multi_rank = start.parallel.world_size > 1
    for candidate_machine in (machine, gpu):
        for parallel in (start.parallel,) if is_multi_rank else map(Parallel, _RANKS):
            for hidden in sizes:
                problem = replace(start, hidden=hidden, parallel=parallel)
                situation = EdgeSituation(
                    pf, experts, pf.requires, experts.requires, problem, candidate_machine
                )
                if situation.verdict.ok:
                    return situation
    return None


def _start(requires: ExpertsRequirements) -> Problem:
    """Return _START with sizes and a scheme that the part supports."""
    intermediate = math.lcm(_START.intermediate, requires.intermediate_multiple)
    act = replace(_START.act, up_first=requires.up_first)
    start = replace(_START, intermediate=intermediate, activation=act)
    if "none" in requires.schemes:
        return start
    return replace(start, quant=min(requires.schemes), dtype=min(requires.dtypes, key=str))


def _search_around(
    base: EdgeSituation, found: Edges, sites: dict[int, Site], *, far: bool
) -> list[EdgeSituation]:
    """Record the edges around `base`, with `far` also distant ones; return the valid neighbors."""
    valid = list[EdgeSituation]()

    for name, other in changed_fields(base):
        if not other.verdict.ok:
            _note(found, sites, name, base, other)
        elif not isinstance(getattr(*_record_and_field(other, name)), frozenset):
            valid.append(other)  # skip smaller declared sets, which reveal no further rule
    for line in numeric_fields(base):
        for low, high in _breakpoints(line, far):
            passing, failing = line.at(low), line.at(high)
            assert passing is not None
            assert failing is not None
            _note(found, sites, line.field, passing, failing, (low, high))
    return valid


def _record_and_field(one: EdgeSituation, name: str) -> tuple[object, str]:
    """Return the record of a field, and the field's name in it."""
    record_name, _, field_name = name.partition(".")
    return getattr(one, record_name), field_name


def _breakpoints(line: NumericField, far: bool) -> Iterator[tuple[int, int]]:
    """Yield (passing, failing) values between which the verdict changes.

    These are the start and its neighbors and, with `far`, the last accepted values in steps of the
    least accepted multiple.
    """

    @cache
    def judged(number: int) -> bool | None:
        one = line.at(number) if line.low <= number <= line.high else None
        return None if one is None else one.verdict.ok

    def passes(number: int) -> bool:
        return judged(number) is True

    def refused(number: int) -> bool:
        return judged(number) is False

    if not passes(line.start):
        return
    for step in (-1,) if line.falls else (1, -1):
        if refused(line.start + step):
            yield line.start, line.start + step
        while refused(line.start + step) and abs(step) <= line.start:
            step *= 2
        if far or line.high - line.low <= _SHORT:
            last = _last_passing(line, step, passes)
            if last != line.start and refused(last + step):
                yield last, last + step


def _last_passing(line: NumericField, step: int, passes: Callable[[int], bool]) -> int:
    """Return the last value from the line's start in steps of `step` that passes.

    The value after it fails or is outside the line's range.
    """
    start = line.start
    max_steps = (line.high - start if step > 0 else start - line.low) // abs(step)
    end = start + step * max_steps
    if "requires" in line.field and passes(end):
        return end  # a declaration is a bound, so all values before it pass too
    good, bad = 0, 1
    while passes(start + step * bad):
        good, bad = bad, 2 * bad
    if bad > max_steps and passes(end):
        return end
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if passes(start + step * middle) else (good, middle)
    return start + step * good


def _note(
    found: Edges,
    sites: dict[int, Site],
    name: str,
    passing: EdgeSituation,
    failing: EdgeSituation,
    values: tuple[int, int] | None = None,
) -> None:
    rejections = failing.verdict.rejections
    is_single_rule = len({rejection.rule for rejection in rejections}) == 1
    for rejection in rejections:
        need = re.sub(r"\d+(\.\d+)?", "#", rejection.need)
        reason = EdgeReason(rejection.rule, rejection.parties, need, sites[id(rejection)])
        found.met.setdefault(reason, rejection)
        if is_single_rule:
            is_increasing = values is not None and values[0] < values[1]
            edge = Edge(reason, name, passing, failing, rejection, values)
            found.by_place.setdefault((reason, name, is_increasing), edge)


@contextmanager
def _record_sites() -> Iterator[dict[int, Site]]:
    """Record where each Rejection is made inside the block, by the id of the Rejection."""
    sites: dict[int, Site] = {}
    original_init = Rejection.__init__

    def noted(self: Rejection, *given: Any, **named: Any) -> None:
        original_init(self, *given, **named)
        caller = sys._getframe(1)
        sites[id(self)] = (caller.f_code.co_filename, caller.f_lineno)

    with mock.patch.object(Rejection, "__init__", noted):
        yield sites


def case_of(edge: Edge) -> Case | None:
    """Return the case of an edge's passing side, a RankCase over several ranks.

    None if its declarations differ from those of the parts.
    """
    one = edge.passing
    if not one.as_declared:
        return None
    names, ranks = (one.pf.__name__, one.experts.__name__), one.problem.parallel.world_size
    if ranks == 1:
        return Case(*names, one.problem)
    return RankCase(*names, one.problem, tokens=(one.problem.tokens,) * ranks)
