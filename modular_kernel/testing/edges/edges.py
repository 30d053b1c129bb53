"""Edges of the rules: of every reason that a pairing can be refused for, the nearest problem that
passes and the nearest that fails.

    found = edges_of(MyPrepare, MyExperts, machine)
    for edge in found.edges:
        assert edge.passing.verdict.ok and not edge.failing.verdict.ok
        assert not edge.contradiction

Nothing here knows a rule. A walk starts at a problem that the pairing takes and changes one field
at a time (`edges_axes`): a flag, a scheme, a part's declaration; a number by the least step, and
from there to where the judgement turns. What is refused for one reason alone, one step from what
is accepted, is that reason's edge. So a rule of anybody's part gets its edges by being declared.
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
from modular_kernel.testing.edges.axes import EdgeSituation, Line, choices, lines
from modular_kernel.testing.edges.refusal_text import contradiction
from modular_kernel.testing.edges.sites import Site

_START = Problem(tokens=8, hidden=64, intermediate=64, experts=16, top_k=2)
_RANKS = (1, 2, 4, 8)
_SHORT = 200  # values of a line that is walked to its end wherever it begins
_HIDDEN = (64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class EdgeReason:
    """One way to be refused.

    rule: its tag. parties: who disagrees. need: what it asks for, without numbers. site: where the
    rule says so.
    """

    rule: str
    parties: tuple[str, ...]
    need: str
    site: Site

    def __str__(self) -> str:
        return f"[{self.rule}] {' / '.join(self.parties)}: {self.need}"


@dataclass(frozen=True)
class Edge:
    """passing, failing: two situations that differ in `field` alone; the second is refused for
    nothing but `reason`'s rule, as `rejection` says. values: of the field, passing and failing, if
    it counts."""

    reason: EdgeReason
    field: str
    passing: EdgeSituation
    failing: EdgeSituation
    rejection: Rejection
    values: tuple[int, int] | None = None

    @property
    def contradiction(self) -> str:
        """How the words of the refusal contradict the edge; "" if they do not."""
        refused = self.rejection
        return contradiction(refused.got, refused.need, self.values, self.field)

    def __str__(self) -> str:
        step = "" if self.values is None else f" {self.values[0]} passes, {self.values[1]} fails"
        return f"{self.field}{step}: {self.rejection}"


@dataclass
class Edges:
    """What a walk found. base: where it began; None if the pairing took nothing that was tried.
    edges: one for each reason, field and way along it. met: every reason that was given."""

    base: EdgeSituation | None
    by_place: dict[tuple[EdgeReason, str, bool], Edge] = field(default_factory=dict)
    met: dict[EdgeReason, Rejection] = field(default_factory=dict)

    @property
    def edges(self) -> tuple[Edge, ...]:
        """The edges, in the order they were met."""
        return tuple(self.by_place.values())

    @property
    def without(self) -> tuple[EdgeReason, ...]:
        """Reasons that were given, and never alone one step from a valid problem."""
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
    """Walk around a problem that a pairing takes and return the edges met.

    machine: tried first; then a GPU with what both parts ask for. depth: how many fields may differ
    from that problem's, the edge's own among them. More find rules that bear on unusual problems
    only, and take a hundred times as long for each. start: the problem to begin at, on its ranks if
    they are several; None takes a small one in the part's first scheme.
    """
    base = _valid(pf, experts, machine, start or _start(experts.requires))
    found = Edges(base)
    with _sited() as sites:
        bases = [] if base is None else [base]
        for step in range(depth):
            bases = [other for one in bases for other in _around(one, found, sites, far=step == 0)]
    return found


def _valid(
    pf: type[PrepareAndFinalize],
    experts: type[PermuteExpertsUnpermute],
    machine: Machine,
    start: Problem,
) -> EdgeSituation | None:
    """Return a small problem that the pairing takes, here or else on a GPU; None if none is
    found.
    """
    packages = frozenset((*pf.requires.packages, *experts.requires.packages))
    declared = pf.requires, experts.requires
    arches = [req.min_arch for req in declared if req.min_arch is not None]
    arches += [min(req.archs) for req in declared if req.archs]
    gpu = Machine("cuda", max([(9, 0), *arches]), packages)
    sizes = (start.hidden, *_HIDDEN, *sorted(pf.requires.hidden_sizes or ()))
    several = start.parallel.world_size > 1
    for where in (machine, gpu):
        for parallel in (start.parallel,) if several else map(Parallel, _RANKS):
            for hidden in sizes:
                problem = replace(start, hidden=hidden, parallel=parallel)
                one = EdgeSituation(pf, experts, pf.requires, experts.requires, problem, where)
                if one.verdict.ok:
                    return one
    return None


def _start(requires: ExpertsRequirements) -> Problem:
    """Return _START in sizes that a part takes, and in its first scheme if it is for some alone."""
    whole = math.lcm(_START.intermediate, requires.intermediate_multiple)
    act = replace(_START.act, up_first=requires.up_first)
    start = replace(_START, intermediate=whole, activation=act)
    if "none" in requires.schemes:
        return start
    return replace(start, quant=min(requires.schemes), dtype=min(requires.dtypes, key=str))


def _around(
    base: EdgeSituation, found: Edges, sites: dict[int, Site], *, far: bool
) -> list[EdgeSituation]:
    """Note the edges around `base`, and those far along its lines; return the valid neighbors."""
    valid = list[EdgeSituation]()

    for name, other in choices(base):
        if not other.verdict.ok:
            _note(found, sites, name, base, other)
        elif not isinstance(getattr(*_place(other, name)), frozenset):
            valid.append(other)  # but a declared set that lost a value brings no rule to bear
    for line in lines(base):
        for low, high in _turns(line, far):
            passing, failing = line.at(low), line.at(high)
            assert passing is not None
            assert failing is not None
            _note(found, sites, line.field, passing, failing, (low, high))
    return valid


def _place(one: EdgeSituation, name: str) -> tuple[object, str]:
    """Return the record of a field, and the field's name in it."""
    of, _, field_name = name.partition(".")
    return getattr(one, of), field_name


def _turns(line: Line, far: bool) -> Iterator[tuple[int, int]]:
    """Yield (passing, failing) where the judgement turns: at the next value, and, far away, on the
    lattice of the least step that is accepted."""

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
            last = _last(line, step, passes)
            if last != line.start and refused(last + step):
                yield last, last + step


def _last(line: Line, step: int, passes: Callable[[int], bool]) -> int:
    """Return the last value on the way from the line's start by `step` that passes, and whose next
    does not, or is beyond the line's end.
    """
    start = line.start
    most = (line.high - start if step > 0 else start - line.low) // abs(step)
    end = start + step * most
    if "requires" in line.field and passes(end):
        return end  # what a part declares is a bound: all values before it pass, too
    good, bad = 0, 1
    while passes(start + step * bad):
        good, bad = bad, 2 * bad
    if bad > most and passes(end):
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
    alone = len({rejection.rule for rejection in rejections}) == 1
    for rejection in rejections:
        need = re.sub(r"\d+(\.\d+)?", "#", rejection.need)
        reason = EdgeReason(rejection.rule, rejection.parties, need, sites[id(rejection)])
        found.met.setdefault(reason, rejection)
        if alone:
            rises = values is not None and values[0] < values[1]
            edge = Edge(reason, name, passing, failing, rejection, values)
            found.by_place.setdefault((reason, name, rises), edge)


@contextmanager
def _sited() -> Iterator[dict[int, Site]]:
    """Inside the block, where each Rejection was made, by its id."""
    sites: dict[int, Site] = {}
    plain = Rejection.__init__

    def noted(self: Rejection, *given: Any, **named: Any) -> None:
        plain(self, *given, **named)
        maker = sys._getframe(1)
        sites[id(self)] = (maker.f_code.co_filename, maker.f_lineno)

    with mock.patch.object(Rejection, "__init__", noted):
        yield sites


def case_of(edge: Edge) -> Case | None:
    """Return the case that proves an edge's passing side, a RankCase where ranks take part; None
    where the parts declare otherwise than they do by themselves."""
    one = edge.passing
    if not one.as_declared:
        return None
    names, ranks = (one.pf.__name__, one.experts.__name__), one.problem.parallel.world_size
    if ranks == 1:
        return Case(*names, one.problem)
    return RankCase(*names, one.problem, tokens=(one.problem.tokens,) * ranks)
