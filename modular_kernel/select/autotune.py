"""`compose`: build a layer that uses a fast pairing for each number of tokens.

A layer consists of two interchangeable parts: a PrepareAndFinalize, which quantizes and exchanges
tokens, and an experts class. A pair of parts is called a pairing. `compose` times the pairings that
are valid for a problem and may be faster than the default pairing, and caches the times on disk.

    kernel = compose(problem)            # times pairings without cached times, for up to 20 s
    kernel = compose(problem, options=MeasurementOptions(budget=0))    # times nothing
    plan = kernel.plan()
    plan.warm_up(weights)                # compiles all kernels
    y_TH = plan(x_TH, weights, routing)  # runs the pairing for this number of tokens

Over several ranks (problem.parallel.world_size > 1), every rank calls `compose` with the process
group. All ranks select the same pairings, based on the times of the slowest rank.
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
from modular_kernel.select.candidates import Candidates, find_candidates
from modular_kernel.select.composed_kernel import ComposedKernel, build_composed_kernel
from modular_kernel.select.pairing_choice import PairingChoice
from modular_kernel.select.process_group import Ranks, ranks_of
from modular_kernel.select.search import BucketCallback, Search
from modular_kernel.select.selection import PairingOptions, bucket_tokens
from modular_kernel.select.shipped_record import load_shipped_record
from modular_kernel.settings import read_settings
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.text import escape_nonprintable
from modular_kernel.utils.argument_checks import check_fields, expect

_LOG = logging.getLogger("modular_kernel.select")
_MAX_BUCKETS = 48
BUDGET_S = 20.0
# Estimated seconds to build, compile and time a pairing for the first time.
_FIRST_STEP_S = {"cuda": 2.0, "cpu": 0.1}


@dataclass(frozen=True, kw_only=True)
class MeasurementOptions:
    """Options for the measurements of `compose`.

    tokens: token counts at which pairings are compared (buckets). None uses the powers of two below
        problem.tokens, and problem.tokens. If two adjacent buckets select the same pairing, the
        token counts between them use it too. Otherwise they use the default pairing.
    budget: seconds for all measurements, including compilation and the creation of weights. Small
        token counts are timed first. Timing stops when the remaining time is shorter than the
        longest measurement so far. On a single rank, no Triton kernel is compiled after the end of
        the budget. A later call continues. A bucket that was not timed uses a pairing that is
        faster in the shipped record (`select.shipped_record`), or the default pairing if there is
        none. With a budget of 0, nothing is timed.
    routing: distribution of tokens over experts, in the syntax of RoutingKind.parse.
    replicated: whether all ranks pass the same tokens.
    folder: folder of the cache. None uses the cache folder in the settings.
    ignore_saved: whether to ignore cached times.
    on_bucket: called on rank 0 with each Bucket after it was timed.

    Raises ConfigurationError for a value out of range.
    """

    tokens: tuple[int, ...] | None = None
    budget: float = BUDGET_S
    routing: str = "uniform"
    replicated: bool = False
    folder: Path | None = None
    ignore_saved: bool = False
    on_bucket: BucketCallback | None = None

    def __post_init__(self) -> None:
        check_fields(self, "options: ")
        if not 0 <= self.budget < float("inf"):
            raise ConfigurationError("budget", got=self.budget, need="seconds >= 0")
        RoutingKind.parse(self.routing)
        tokens = self.tokens
        if tokens is not None and (not 1 <= len(tokens) <= _MAX_BUCKETS or min(tokens) < 1):
            need = f"1 to {_MAX_BUCKETS} numbers >= 1"
            raise ConfigurationError("tokens to measure", got=tokens, need=need)

    def buckets(self, problem: Problem) -> tuple[int, ...]:
        """Return the token counts at which pairings are compared, ascending."""
        if self.tokens is None:
            return bucket_tokens(problem.tokens)
        if max(self.tokens) > problem.tokens:
            need = f"<= {problem.tokens}, the value of problem.tokens"
            raise ConfigurationError("tokens to measure", got=max(self.tokens), need=need)
        return tuple(sorted(set(self.tokens)))


def compose(
    problem: Problem,
    machine: Machine | None = None,
    *,
    group: object | None = None,
    options: MeasurementOptions | None = None,
) -> ComposedKernel:
    """Build a kernel that runs the default pairing, or a faster one, for each number of tokens.

    A pairing replaces the default if its measured time is shorter by more than the noise. Without
    measurements, it replaces the default if it is faster in the shipped record. A summary is logged
    (logger "modular_kernel.select"). All ranks must call this function.

    machine: the machine to run on; None means this machine.
    group: the process group of a problem over several ranks; None uses the default group.
    options: what to measure, and for how long; None uses the defaults.

    Raises IncompatibleError, with every reason, if no pairing is valid.
    """
    machine = this_machine() if machine is None else machine
    choice = choose(problem, machine, group=group, options=options)
    for note in choice.notes:
        _LOG.warning("%s", escape_nonprintable(note))
    if not choice.segments:
        reasons = [r for verdict in choice.candidates.refused for r in verdict.rejections]
        raise IncompatibleError(f"every pairing for {problem}", reasons)
    _LOG.info("%s", escape_nonprintable(choice.summary))
    return build_composed_kernel(choice, machine, group)


def choose(
    problem: Problem,
    machine: Machine | None = None,
    *,
    group: object | None = None,
    options: MeasurementOptions | None = None,
) -> PairingChoice:
    """Select the pairings that `compose` would use, without building them.

    The arguments are those of `compose`. If no pairing is valid, PairingChoice.segments is empty.
    All ranks must call this function.
    """
    expect("problem", problem, Problem)
    expect("machine", machine, Machine | None)
    expect("options", options, MeasurementOptions | None)
    machine, options = machine or this_machine(), options or MeasurementOptions()
    ranks, tokens = ranks_of(problem, group), options.buckets(problem)
    budget = Budget(options.budget, ranks, first_step_seconds=_FIRST_STEP_S[machine.device])
    # Calls with more tokens than the largest bucket also need a pairing.
    token_counts = tuple(dict.fromkeys((*tokens, problem.tokens)))
    candidates = find_candidates(problem, machine, token_counts, replicated=options.replicated)
    pairing_options = _make_pairing_options(problem, machine, options, tokens, candidates)
    identity = cache_keys.make_identity_fields(
        problem, machine, routing=options.routing, replicated=options.replicated
    )
    versions = cache_keys.version_fields(machine)
    key_fields = identity | versions
    _check_equal_on_all_ranks(
        ranks, key_fields | {"tokens": str(token_counts), "ignore_saved": str(options.ignore_saved)}
    )
    cache = Cache(options.folder or read_settings().cache_dir, identity, versions)
    search = Search(
        problem,
        machine,
        ranks,
        candidates,
        pairing_options,
        cache,
        budget,
        routing=options.routing,
        replicated=options.replicated,
        ignore_saved=options.ignore_saved,
        on_bucket=options.on_bucket,
    )
    result = search.run()
    return PairingChoice(
        problem,
        machine,
        options.replicated,
        candidates,
        pairing_options,
        result.buckets,
        key_fields,
        result.timed_now,
        result.seconds,
        result.untimed_reason,
        result.notes,
    )


def _make_pairing_options(
    problem: Problem,
    machine: Machine,
    options: MeasurementOptions,
    tokens: tuple[int, ...],
    candidates: Candidates,
) -> PairingOptions:
    """Return the valid pairings, with estimates if the shipped record covers the problem."""
    pairing_options = PairingOptions(
        tokens, problem.tokens, candidates.order, candidates.valid, frozenset(candidates.untimeable)
    )
    record = load_shipped_record()
    if record is None or not record.covers(problem, machine, routing=options.routing):
        return pairing_options
    estimates = {
        num_tokens: record.estimates(problem.with_tokens(num_tokens), others, default)
        for num_tokens in tokens
        for default, *others in [pairing_options.valid_pairs(num_tokens)]
        if others
    }
    return replace(pairing_options, estimates=estimates)


def _check_equal_on_all_ranks(ranks: Ranks, key_fields: cache_keys.KeyFields) -> None:
    """Raise ConfigurationError if machines, versions or options differ between ranks.

    All ranks time the same pairings in the same order, which requires equal settings.
    """
    first_fields, *other_fields = ranks.all_gather(key_fields)
    for rank, rank_fields in enumerate(other_fields, 1):
        mismatches = {
            n: rank_fields.get(n) for n in first_fields if rank_fields.get(n) != first_fields[n]
        }
        if mismatches:
            need = {name: first_fields[name] for name in mismatches}
            raise ConfigurationError(
                f"rank {rank}'s choice", got=mismatches, need=f"{need}, as on rank 0"
            )
