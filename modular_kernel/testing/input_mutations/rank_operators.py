"""Defects that only ranks can have: what goes where, whose rows are whose, and how often it counts.

Each is made anew for every kernel of every rank, so that one rank alone may have it.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from modular_kernel.catalog import load_catalog
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.settings import deadline
from modular_kernel.spec.problem import Combine, Machine, Problem
from modular_kernel.tensors import BatchedTokens, Dispatched, Handle
from modular_kernel.testing.cases.case import Case
from modular_kernel.testing.cases.ranks import RankCase
from modular_kernel.testing.input_mutations.inject import Arguments, CallMutant
from modular_kernel.testing.input_mutations.inputs import square_weights
from modular_kernel.testing.input_mutations.operators import MUTANTS


@dataclass(frozen=True)
class RankMutant:
    """One defect over ranks. applies: cases in which it must show. make: what one rank's kernel
    gets, given that rank's problem; it may act on one rank and be harmless on the others. waits:
    seconds that ranks then wait for each other, where one may wait in vain; None: as always.
    """

    name: str
    description: str
    applies: Callable[[RankCase], bool]
    make: Callable[[Problem], CallMutant]
    waits: float | None = None


def build_mutant(
    name: str, case: Case, machine: Machine, poison: bool, group: object
) -> FusedMoEModularKernel:
    """Return a rank's kernel with the defect of that name; `partial(build_mutant, name)` is a
    build.
    """
    (mutant,) = (mutant for mutant in RANK_MUTANTS if mutant.name == name)
    with nullcontext() if mutant.waits is None else deadline(mutant.waits):
        return mutant.make(case.problem).build(case, machine, poison, group)


def build_on_last_rank(
    name: str, case: Case, machine: Machine, poison: bool, group: object
) -> FusedMoEModularKernel:
    """Return a rank's kernel; the last rank's has the defect of that name from the battery of one
    rank.

    Only one that does not change what the parts are told: ranks would notice that they differ.
    """
    (mutant,) = (mutant for mutant in MUTANTS if mutant.name == name)
    parallel = case.problem.parallel
    if parallel.rank < parallel.world_size - 1:
        mutant = _nothing(name)
    return mutant.build(case, machine, poison, group)


def _spread_out(case: RankCase) -> bool:
    """Many pairs, of every rank, and no rounding that could hide a small change."""
    problem = case.problem
    busy = case.routing in ("uniform", "zipf", "duplicates") and problem.top_k > 1
    return busy and sum(case.tokens) >= 4 and not problem.scheme.quantized


def _busy(case: RankCase) -> bool:
    """So many, too, that the last rank serves several tokens."""
    even = case.routing != "zipf" and max(case.tokens) >= 4
    return _spread_out(case) and even and case.tokens[-1] > 0


def _weighted(case: RankCase) -> bool:
    return _spread_out(case) and case.problem.combine is not Combine.TOPK_UNWEIGHTED


def _uneven(case: RankCase) -> bool:
    """And a part that is told who sent how many, so that it may confuse them."""
    part = load_catalog().prepare_finalize(case.prepare_finalize)
    told = not part.requires.received_by_library
    return told and _busy(case) and case.tokens[0] != case.tokens[1]


def _idle(case: RankCase) -> bool:
    return _spread_out(case) and 0 in case.tokens


def _nothing(name: str) -> CallMutant:
    """Harmless."""
    return CallMutant(name, "nothing", lambda _p, _r: True)


def _everywhere(
    name: str, arguments: Callable[[Arguments], Arguments]
) -> Callable[[Problem], CallMutant]:
    return lambda _problem: replace(_nothing(name), arguments=arguments)


def _on_last_rank(
    name: str, make: Callable[[Problem], dict[str, Any]]
) -> Callable[[Problem], CallMutant]:
    """`make` gives the places where it acts, as fields of Mutant."""

    def made(problem: Problem) -> CallMutant:
        last = problem.parallel.rank == problem.parallel.world_size - 1
        return replace(_nothing(name), **(make(problem) if last else {}))

    return made


def shift_by_a_rank(args: Arguments) -> Arguments:
    """Each pair goes to the expert that lies one rank's block further on."""
    ids, problem = args.routing.topk_ids_TK, args.problem
    block = len(problem.placement.slots[0])
    valid = (ids >= 0) & (ids < problem.experts)
    ids = torch.where(valid, (ids + block) % problem.experts, ids)
    return replace(args, routing=replace(args.routing, topk_ids_TK=ids))


def lose_last_experts(args: Arguments) -> Arguments:
    """Nothing is sent to the last slot of any rank."""
    ids, slots = args.routing.topk_ids_TK, args.problem.placement.slots
    last = torch.tensor([held[-1] for held in slots], dtype=ids.dtype, device=ids.device)
    ids = ids.masked_fill(torch.isin(ids, last), -1)
    return replace(args, routing=replace(args.routing, topk_ids_TK=ids))


def _swap_counts(problem: Problem) -> dict[str, Any]:
    world_size = problem.parallel.world_size

    def swapped(value: Any) -> Any:
        """Rank 0's and rank 1's entry of every list over ranks in a handle change places."""
        if isinstance(value, tuple | list) and len(value) == world_size:
            return type(value)((value[1], value[0], *value[2:]))
        if isinstance(value, torch.Tensor):
            return value[[1, 0, *range(2, world_size)]]
        if is_dataclass(value) and not isinstance(value, type):
            every = {f.name: getattr(value, f.name) for f in fields(value)}
            changed = {name: swapped(each) for name, each in every.items() if by_rank(name, each)}
            return replace(value, **changed)
        return value

    def by_rank(name: str, value: object) -> bool:
        """Whether a field is a list over ranks, or may hold one; a tensor's name says so.

        Not flags in memory that peers write to: addresses of peers are distances from there, so a
        copy elsewhere would have this rank's stores go anywhere.
        """
        if isinstance(value, torch.Tensor):
            return name.endswith("_W") and value.untyped_storage().nbytes() == value.nbytes
        return is_dataclass(value) or isinstance(value, tuple | list)

    def handle(given: Handle) -> Handle:
        told: Handle = swapped(given)
        return told

    return {"handle": handle, "dispatched": _roll_counts}


def _roll_counts(tokens: Dispatched) -> Dispatched:
    """Where rows come by expert: each expert's count is its neighbor's."""
    if not isinstance(tokens, BatchedTokens):
        return tokens
    return replace(tokens, counts_e=tokens.counts_e.roll(1))


def _double(_problem: Problem) -> dict[str, Any]:
    def rows(output: torch.Tensor, _tokens: Dispatched) -> None:
        output.mul_(2)

    return {"rows": rows}


def _reorder(_problem: Problem) -> dict[str, Any]:
    def rows(output: torch.Tensor, tokens: Dispatched) -> None:
        if not isinstance(tokens, BatchedTokens):
            output.copy_(output.roll(1, 0))
            return
        for expert, count in enumerate(tokens.counts_e.tolist()):
            output[expert, :count] = output[expert, :count].roll(1, 0)

    return {"rows": rows}


def _keep_rows(_problem: Problem) -> dict[str, Any]:
    kept: list[Dispatched] = []

    def dispatched(tokens: Dispatched) -> Dispatched:
        """Return the rows of the call before, as far as there are some."""
        kept.append(_copied(tokens))
        if len(kept) < 2:
            return tokens
        before, now = kept[-2], _copied(tokens)
        old, new = _rows(before), _rows(now)
        part = tuple(slice(min(a, b)) for a, b in zip(old.shape, new.shape, strict=True))
        new[part] = old[part]
        return now

    return {"dispatched": dispatched}


def _rows(tokens: Dispatched) -> torch.Tensor:
    return tokens.x_eCH if isinstance(tokens, BatchedTokens) else tokens.x_TH


def _copied(tokens: Dispatched) -> Dispatched:
    if isinstance(tokens, BatchedTokens):
        return replace(tokens, x_eCH=tokens.x_eCH.clone())
    return replace(tokens, x_TH=tokens.x_TH.clone())


def _rest_when_idle(_problem: Problem) -> CallMutant:
    """On every rank: a call without tokens of its own computes nothing for the others."""
    idle: list[bool] = []

    def arguments(args: Arguments) -> Arguments:
        idle.append(len(args.x_TH) == 0)
        return args

    def rows(output: torch.Tensor, _tokens: Dispatched) -> None:
        if idle[-1]:
            output.zero_()

    return replace(_nothing("idle_rank_rests"), arguments=arguments, rows=rows)


RANK_MUTANTS: tuple[RankMutant, ...] = (
    RankMutant(
        "rank_block_offset",
        "expert ids are shifted by one rank's block",
        _spread_out,
        _everywhere("rank_block_offset", shift_by_a_rank),
    ),
    RankMutant(
        "last_expert_lost",
        "the last expert of each rank gets nothing",
        _spread_out,
        _everywhere("last_expert_lost", lose_last_experts),
    ),
    RankMutant(
        "peer_counts_swapped",
        "the last rank confuses counts or memory of ranks 0 and 1, or counts of its experts",
        _uneven,
        _on_last_rank("peer_counts_swapped", _swap_counts),
        waits=6.0,
    ),
    RankMutant(
        "weights_on_both_sides",
        "the router weight is applied by the experts and again by the combine",
        _weighted,
        _everywhere("weights_on_both_sides", square_weights),
    ),
    RankMutant(
        "contribution_twice",
        "what the last rank adds is added twice",
        _busy,
        _on_last_rank("contribution_twice", _double),
    ),
    RankMutant(
        "rows_reordered",
        "the last rank returns its rows in another order",
        _busy,
        _on_last_rank("rows_reordered", _reorder),
    ),
    RankMutant(
        "stale_rows",
        "the last rank computes rows of the call before",
        _busy,
        _on_last_rank("stale_rows", _keep_rows),
    ),
    RankMutant(
        "idle_rank_rests",
        "a rank without tokens computes nothing for the others",
        _idle,
        _rest_when_idle,
    ),
)
