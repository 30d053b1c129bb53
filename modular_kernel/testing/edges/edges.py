"""Find the edges of the rules: for each reason to refuse, a refused and a similar accepted problem.

The rules decide whether an exchange class and an experts class (the "parts" of a pairing) can run a
problem on a machine. Each refusal is a `Rejection` with the rule, what it got and what it needs.
Tests check at the edges that the rules compare correctly and that these messages are true.

    result = edges_of(MyPrepare, MyExperts, machine)
    for edge in result.edges:
        assert edge.passing.verdict.ok and not edge.failing.verdict.ok
        assert not edge.contradiction

The search starts at a problem that the pairing accepts, and changes one field at a time
(`edges.situations`). The field may be a flag, a scheme, a requirement of a part, or a number. A
number is changed first by the smallest step, then up to the last accepted value. If two situations
differ in one field, and one is accepted and the other is refused by a single rule, they form an
edge of this rule's reason. The search does not depend on particular rules, so it also finds the
edges of third-party rules.
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
from modular_kernel.testing.edges.refusal_text import find_contradiction
from modular_kernel.testing.edges.sites import Site
from modular_kernel.testing.edges.situations import (
    EdgeSituation,
    NumericField,
    list_changed_situations,
    list_numeric_fields,
)

_START_PROBLEM = Problem(tokens=8, hidden=64, intermediate=64, experts=16, top_k=2)
_WORLD_SIZES = (1, 2, 4, 8)
_SHORT_RANGE = 200  # always search ranges up to this size to their ends
_HIDDEN_SIZES = (64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class EdgeReason:
    """One reason to refuse a pairing.

    Attributes:
        rule, parties: as in the Rejection; the parties are the parts and fields in conflict.
        need: as in the Rejection, with each number replaced with "#".
        site: the source line that creates the Rejection.
    """

    rule: str
    parties: tuple[str, ...]
    need: str
    site: Site

    def __str__(self) -> str:
        return f"[{self.rule}] {' / '.join(self.parties)}: {self.need}"


@dataclass(frozen=True)
class Edge:
    """An accepted and a refused situation that differ only in `field`.

    Attributes:
        reason: the reason of the refusal.
        field: the name of the field, "record.field".
        passing: the accepted situation.
        failing: the refused situation, which violates a single rule.
        rejection: the refusal.
        values: the (passing, failing) values of the field if it is numeric.
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
        got, need = self.rejection.got, self.rejection.need
        return find_contradiction(got, need, self.values, self.field)

    def __str__(self) -> str:
        step = "" if self.values is None else f" {self.values[0]} passes, {self.values[1]} fails"
        return f"{self.field}{step}: {self.rejection}"


@dataclass
class Edges:
    """Result of a search.

    Attributes:
        base: the accepted situation at which the search started; None if the pairing refused all
            problems that were tried.
        edges_by_key: one edge for each (reason, field, whether the value increases).
        reasons: maps every reason that occurred to one of its rejections.
    """

    base: EdgeSituation | None
    edges_by_key: dict[tuple[EdgeReason, str, bool], Edge] = field(default_factory=dict)
    reasons: dict[EdgeReason, Rejection] = field(default_factory=dict)

    @property
    def edges(self) -> tuple[Edge, ...]:
        """The edges, in the order in which they were found."""
        return tuple(self.edges_by_key.values())

    @property
    def reasons_without_edge(self) -> tuple[EdgeReason, ...]:
        """The reasons that never occurred alone, one step away from a valid problem."""
        with_edge = {edge.reason for edge in self.edges}
        return tuple(reason for reason in self.reasons if reason not in with_edge)


def edges_of(
    pf: type[PrepareAndFinalize],
    experts: type[PermuteExpertsUnpermute],
    machine: Machine,
    *,
    depth: int = 1,
    start: Problem | None = None,
) -> Edges:
    """Search for edges around a problem that a pairing accepts.

    machine: the machine of the situations, if the pairing accepts a problem on it. Otherwise, a GPU
        with everything that both parts require is used instead.
    depth: maximum number of fields in which a refused situation differs from the start. Each
        further level takes a hundred times as long, and adds only rules about unusual problems.
    start: the first problem to try; None means a small problem in a scheme that the part supports.
        If this problem has several ranks, other numbers of ranks are not tried.
    """
    base = _find_valid(pf, experts, machine, start or _make_start_problem(experts.requires))
    edges = Edges(base)
    with _record_sites() as sites:
        bases = [] if base is None else [base]
        for step in range(depth):
            bases = [
                neighbor
                for situation in bases
                for neighbor in _search_around(situation, edges, sites, search_far=step == 0)
            ]
    return edges


def _find_valid(
    pf: type[PrepareAndFinalize],
    experts: type[PermuteExpertsUnpermute],
    machine: Machine,
    start: Problem,
) -> EdgeSituation | None:
    """Find a small problem that the pairing accepts on `machine` or, if there is none, on a GPU.

    Returns None if the pairing refuses all problems that are tried.
    """
    packages = frozenset((*pf.requires.packages, *experts.requires.packages))
    declared = pf.requires, experts.requires
    arches = [req.min_arch for req in declared if req.min_arch is not None]
    arches += [min(req.archs) for req in declared if req.archs]
    gpu = Machine("cuda", max([(9, 0), *arches]), packages)
    sizes = (start.hidden, *_HIDDEN_SIZES, *sorted(pf.requires.hidden_sizes or ()))
    is_multi_rank = start.parallel.world_size > 1
    for candidate_machine in (machine, gpu):
        for parallel in (start.parallel,) if is_multi_rank else map(Parallel, _WORLD_SIZES):
            for hidden in sizes:
                problem = replace(start, hidden=hidden, parallel=parallel)
                situation = EdgeSituation(
                    pf, experts, pf.requires, experts.requires, problem, candidate_machine
                )
                if situation.verdict.ok:
                    return situation
    return None


def _make_start_problem(requires: ExpertsRequirements) -> Problem:
    """Make a variant of _START_PROBLEM with sizes and a scheme that the part supports."""
    intermediate = math.lcm(_START_PROBLEM.intermediate, requires.intermediate_multiple)
    act = replace(_START_PROBLEM.act, up_first=requires.up_first)
    start = replace(_START_PROBLEM, intermediate=intermediate, activation=act)
    if "none" in requires.schemes:
        return start
    return replace(start, quant=min(requires.schemes), dtype=min(requires.dtypes, key=str))


def _search_around(
    base: EdgeSituation, edges: Edges, sites: dict[int, Site], *, search_far: bool
) -> list[EdgeSituation]:
    """Record the edges around `base`; return the accepted situations that differ in one field.

    sites: as in `_record_sites`.
    search_far: whether to search the values of numeric fields beyond the next value.
    """
    valid = list[EdgeSituation]()

    for name, neighbor in list_changed_situations(base):
        if not neighbor.verdict.ok:
            _record_edges(edges, sites, name, base, neighbor)
        # Situations that require a smaller set are skipped, because they reveal no other rule.
        elif not isinstance(getattr(*_get_record_and_field(neighbor, name)), frozenset):
            valid.append(neighbor)
    for numeric_field in list_numeric_fields(base):
        for low, high in _find_breakpoints(numeric_field, search_far):
            passing, failing = numeric_field.situation_with(low), numeric_field.situation_with(high)
            assert passing is not None
            assert failing is not None
            _record_edges(edges, sites, numeric_field.field, passing, failing, (low, high))
    return valid


def _get_record_and_field(situation: EdgeSituation, name: str) -> tuple[object, str]:
    record_name, _, field_name = name.partition(".")
    return getattr(situation, record_name), field_name


def _find_breakpoints(numeric_field: NumericField, search_far: bool) -> Iterator[tuple[int, int]]:
    """Yield (passing, failing) values between which the verdict changes.

    The start and the next value in each direction are tried. With `search_far`, the last accepted
    value in each direction is also searched, in the smallest steps that are accepted.
    """

    @cache
    def is_accepted(number: int) -> bool | None:
        situation = (
            numeric_field.situation_with(number)
            if numeric_field.low <= number <= numeric_field.high
            else None
        )
        return None if situation is None else situation.verdict.ok

    def passes(number: int) -> bool:
        return is_accepted(number) is True

    def is_refused(number: int) -> bool:
        return is_accepted(number) is False

    if not passes(numeric_field.start):
        return
    for step in (-1,) if numeric_field.only_decreases else (1, -1):
        if is_refused(numeric_field.start + step):
            yield numeric_field.start, numeric_field.start + step
        while is_refused(numeric_field.start + step) and abs(step) <= numeric_field.start:
            step *= 2
        if search_far or numeric_field.high - numeric_field.low <= _SHORT_RANGE:
            last_passing = _find_last_passing(numeric_field, step, passes)
            if last_passing != numeric_field.start and is_refused(last_passing + step):
                yield last_passing, last_passing + step


def _find_last_passing(
    numeric_field: NumericField, step: int, passes: Callable[[int], bool]
) -> int:
    """Find the last passing value in steps of `step` from the start of the field.

    The next value fails or is out of range.
    """
    start = numeric_field.start
    max_steps = (numeric_field.high - start if step > 0 else start - numeric_field.low) // abs(step)
    end = start + step * max_steps
    if "requires" in numeric_field.field and passes(end):
        return end  # a requirement is a bound, so all values before this one also pass
    passing_steps, failing_steps = 0, 1
    while passes(start + step * failing_steps):
        passing_steps, failing_steps = failing_steps, 2 * failing_steps
    if failing_steps > max_steps and passes(end):
        return end
    while failing_steps - passing_steps > 1:
        midpoint = (passing_steps + failing_steps) // 2
        passing_steps, failing_steps = (
            (midpoint, failing_steps)
            if passes(start + step * midpoint)
            else (passing_steps, midpoint)
        )
    return start + step * passing_steps


def _record_edges(
    edges: Edges,
    sites: dict[int, Site],
    field_name: str,
    passing: EdgeSituation,
    failing: EdgeSituation,
    values: tuple[int, int] | None = None,
) -> None:
    """Record the reasons of `failing`, and also the edge if all of them belong to a single rule.

    values: the (passing, failing) values of the field if it is numeric.
    """
    rejections = failing.verdict.rejections
    is_single_rule = len({rejection.rule for rejection in rejections}) == 1
    for rejection in rejections:
        need = re.sub(r"\d+(\.\d+)?", "#", rejection.need)
        reason = EdgeReason(rejection.rule, rejection.parties, need, sites[id(rejection)])
        edges.reasons.setdefault(reason, rejection)
        if is_single_rule:
            is_increasing = values is not None and values[0] < values[1]
            edge = Edge(reason, field_name, passing, failing, rejection, values)
            edges.edges_by_key.setdefault((reason, field_name, is_increasing), edge)


@contextmanager
def _record_sites() -> Iterator[dict[int, Site]]:
    """Record the source line that creates each Rejection inside the block.

    Yields a dictionary from the `id` of a Rejection to its site.
    """
    sites: dict[int, Site] = {}
    original_init = Rejection.__init__

    def recording_init(self: Rejection, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        caller = sys._getframe(1)
        sites[id(self)] = (caller.f_code.co_filename, caller.f_lineno)

    with mock.patch.object(Rejection, "__init__", recording_init):
        yield sites


def make_case(edge: Edge) -> Case | None:
    """Make a case from the accepted situation of an edge; a RankCase if it has several ranks.

    Returns None if the requirements in the situation differ from those that the parts declare.
    """
    situation = edge.passing
    if not situation.as_declared:
        return None
    names = situation.pf.__name__, situation.experts.__name__
    ranks = situation.problem.parallel.world_size
    if ranks == 1:
        return Case(*names, situation.problem)
    return RankCase(*names, situation.problem, tokens=(situation.problem.tokens,) * ranks)
