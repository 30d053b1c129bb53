"""compose: at every number of tokens the default pairing, or one that is known to be faster.

    kernel = compose(problem)            # times what the cache does not have, within the budget
    kernel = compose(problem, terms=Terms(budget=0))    # times nothing
    plan = kernel.plan()
    plan.warm_up(weights)                # compiles; from here on a call only launches

With the same cache the same choice is made. Over ranks (problem.parallel.world_size > 1) every rank
calls it, with the process group; all of them get the same choice, whose times are the slowest
rank's.
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from modular_kernel.catalog import this_machine
from modular_kernel.errors import ConfigurationError, IncompatibleError
from modular_kernel.measure.routing_patterns import RoutingKind
from modular_kernel.select import cache_keys
from modular_kernel.select.budget import Budget
from modular_kernel.select.cache import Cache
from modular_kernel.select.candidates import Candidates, find
from modular_kernel.select.choice import Choice
from modular_kernel.select.composed_kernel import ComposedKernel, build
from modular_kernel.select.prior import shipped
from modular_kernel.select.process_group import Team, team_of
from modular_kernel.select.record import Options, bucket_tokens
from modular_kernel.select.search import Search, Tell
from modular_kernel.settings import read_settings
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.text import printable
from modular_kernel.utils.argument_checks import check_fields, expect

_LOG = logging.getLogger("modular_kernel.select")
_MOST_BUCKETS = 48
BUDGET_S = 20.0
# What building, compiling and timing the first pairing is expected to take.
_FIRST_STEP_S = {"cuda": 2.0, "cpu": 0.1}


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What may be timed, and for how long.

    tokens: the numbers of tokens at which pairings are compared; None takes powers of two up to
        problem.tokens, and that. Any other number of tokens runs on the default pairing, unless
        both of its neighbors here chose another one.
    budget: seconds for all of it, making weights and compiling included. A pairing is not begun
        where the longest one so far would not end in time; small numbers of tokens come first.
        What is not reached has the pairing that the shipped record is sure of, else the default;
        a later call continues. 0 times nothing.
    routing: how tokens are spread over experts, as measure.routing.RoutingKind parses.
    replicated: with several ranks, each passes the same tokens.
    folder: of the cache; None takes the one of the settings.
    fresh: time again what the cache has.
    tell: called with each Bucket when it was timed.

    ConfigurationError for a value out of range.
    """

    tokens: tuple[int, ...] | None = None
    budget: float = BUDGET_S
    routing: str = "uniform"
    replicated: bool = False
    folder: Path | None = None
    fresh: bool = False
    tell: Tell | None = None

    def __post_init__(self) -> None:
        check_fields(self, "terms: ")
        if not 0 <= self.budget < float("inf"):
            raise ConfigurationError("budget", got=self.budget, need="seconds >= 0")
        RoutingKind.parse(self.routing)
        given = self.tokens
        if given is not None and (not 1 <= len(given) <= _MOST_BUCKETS or min(given) < 1):
            need = f"1 to {_MOST_BUCKETS} numbers >= 1"
            raise ConfigurationError("tokens to measure", got=given, need=need)

    def buckets(self, problem: Problem) -> tuple[int, ...]:
        """Return the numbers of tokens at which pairings are compared, ascending."""
        if self.tokens is None:
            return bucket_tokens(problem.tokens)
        if max(self.tokens) > problem.tokens:
            need = f"<= {problem.tokens}, the problem's"
            raise ConfigurationError("tokens to measure", got=max(self.tokens), need=need)
        return tuple(sorted(set(self.tokens)))


def compose(
    problem: Problem,
    machine: Machine | None = None,
    *,
    group: object | None = None,
    terms: Terms | None = None,
) -> ComposedKernel:
    """Build one kernel that runs, at every number of tokens, the default pairing or a faster one.

    Another pairing than the default serves where it was measured to be faster by more than the
    noise, or where the shipped record leaves no doubt. A line of what was timed, and what was not,
    goes to the log as INFO (logger "modular_kernel.select").

    machine: None means this one. group: the process group where ranks take part; None means the
    default one. terms: None means Terms().

    IncompatibleError with every reason if no pairing is valid.
    """
    machine = this_machine() if machine is None else machine
    choice = choose(problem, machine, group=group, terms=terms)
    for note in choice.notes:
        _LOG.warning("%s", printable(note))
    if not choice.segments:
        reasons = [r for verdict in choice.candidates.refused for r in verdict.rejections]
        raise IncompatibleError(f"every pairing for {problem}", reasons)
    _LOG.info("%s", printable(choice.summary))
    return build(choice, machine, group)


def choose(
    problem: Problem,
    machine: Machine | None = None,
    *,
    group: object | None = None,
    terms: Terms | None = None,
) -> Choice:
    """Return what `compose` would build, and why. Collective over ranks."""
    expect("problem", problem, Problem)
    expect("machine", machine, Machine | None)
    expect("terms", terms, Terms | None)
    machine, terms = machine or this_machine(), terms or Terms()
    team, tokens = team_of(problem, group), terms.buckets(problem)
    budget = Budget(terms.budget, team, first_step=_FIRST_STEP_S[machine.device])
    # Calls of more tokens than the largest bucket are served too, up to the problem's tokens.
    asked = tuple(dict.fromkeys((*tokens, problem.tokens)))
    candidates = find(problem, machine, asked, replicated=terms.replicated)
    options = _options(problem, machine, terms, tokens, candidates)
    identity = cache_keys.identity(
        problem, machine, routing=terms.routing, replicated=terms.replicated
    )
    versions = cache_keys.versions(machine)
    facts = identity | versions
    _alike(team, facts | {"tokens": str(asked), "fresh": str(terms.fresh)})
    cache = Cache(terms.folder or read_settings().cache_dir, identity, versions)
    search = Search(
        problem,
        machine,
        team,
        candidates,
        options,
        cache,
        budget,
        routing=terms.routing,
        replicated=terms.replicated,
        fresh=terms.fresh,
        tell=terms.tell,
    )
    found = search.run()
    return Choice(
        problem,
        machine,
        terms.replicated,
        candidates,
        options,
        found.buckets,
        facts,
        found.timed_now,
        found.seconds,
        found.left,
        found.notes,
    )


def _options(
    problem: Problem,
    machine: Machine,
    terms: Terms,
    tokens: tuple[int, ...],
    candidates: Candidates,
) -> Options:
    """Return what can be chosen, with what the shipped record expects of it."""
    options = Options(
        tokens, problem.tokens, candidates.order, candidates.valid, frozenset(candidates.silent)
    )
    prior = shipped()
    if prior is None or not prior.covers(problem, machine, routing=terms.routing):
        return options
    expected = {
        number: prior.estimates(problem.with_tokens(number), others, default)
        for number in tokens
        for default, *others in [options.ordered(number)]
        if others
    }
    return replace(options, expected=expected)


def _alike(team: Team, facts: cache_keys.Facts) -> None:
    """Ranks of unlike machines, versions or terms cannot share one choice, nor time in step."""
    first, *others = team.all(facts)
    for rank, other in enumerate(others, 1):
        unlike = {n: other.get(n) for n in first if other.get(n) != first[n]}
        if unlike:
            need = {name: first[name] for name in unlike}
            raise ConfigurationError(f"rank {rank}'s choice", got=unlike, need=f"{need} as rank 0")
