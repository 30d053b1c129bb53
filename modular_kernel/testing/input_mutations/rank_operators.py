"""Input mutations that need several ranks: wrong destinations, exchanged rows, doubled sums.

A `RankMutant` makes the defect (`CallMutant`) of each rank's kernel separately, so that it can
change one rank and leave the others unchanged.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from modular_kernel.catalog import load_catalog
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.settings import use_timeout
from modular_kernel.spec.problem import Combine, Machine, Problem
from modular_kernel.tensors import BatchedTokens, Dispatched, Handle
from modular_kernel.testing.cases.case import Case
from modular_kernel.testing.cases.ranks import RankCase
from modular_kernel.testing.input_mutations.inject import CallArguments, CallMutant
from modular_kernel.testing.input_mutations.inputs import square_router_weights
from modular_kernel.testing.input_mutations.operators import MUTANTS


@dataclass(frozen=True)
class RankMutant:
    """One defect that needs several ranks.

    Attributes:
        name, description: name and description of the defect.
        applies: returns whether the defect must be visible in a case.
        make: maps the problem of a rank to the defect of its kernel.
        timeout_s: timeout of an exchange in seconds, for a defect with which a rank may wait for a
            peer that never answers; None for the default.
    """

    name: str
    description: str
    applies: Callable[[RankCase], bool]
    make: Callable[[Problem], CallMutant]
    timeout_s: float | None = None


def build_mutant(
    name: str, case: Case, machine: Machine, poison: bool, group: object
) -> FusedMoEModularKernel:
    """Make a rank's kernel with the defect `name`.

    Bind `name` with `functools.partial` to get the `build` argument of `prove_ranks`.
    """
    (mutant,) = (mutant for mutant in RANK_MUTANTS if mutant.name == name)
    with nullcontext() if mutant.timeout_s is None else use_timeout(mutant.timeout_s):
        return mutant.make(case.problem).build(case, machine, poison, group)


def build_on_last_rank(
    name: str, case: Case, machine: Machine, poison: bool, group: object
) -> FusedMoEModularKernel:
    """Make a rank's kernel, which has the defect `name` of MUTANTS on the last rank only.

    The defect must not change the problem, because ranks detect that their problems differ.
    """
    (mutant,) = (mutant for mutant in MUTANTS if mutant.name == name)
    parallel = case.problem.parallel
    if parallel.rank < parallel.world_size - 1:
        mutant = _make_no_defect(name)
    return mutant.build(case, machine, poison, group)


def _has_many_pairs(case: RankCase) -> bool:
    """Return whether all ranks get (token, top-k slot) pairs, and the problem is not quantized.

    Quantization hides small changes.
    """
    problem = case.problem
    is_spread = case.routing in ("uniform", "zipf", "duplicates") and problem.top_k > 1
    return is_spread and sum(case.tokens) >= 4 and not problem.scheme.quantized


def _is_busy_on_last_rank(case: RankCase) -> bool:
    """Like `_has_many_pairs`, but the last rank also has tokens, and several pairs to compute."""
    is_even = case.routing != "zipf" and max(case.tokens) >= 4
    return _has_many_pairs(case) and is_even and case.tokens[-1] > 0


def _uses_router_weights(case: RankCase) -> bool:
    return _has_many_pairs(case) and case.problem.combine is not Combine.TOPK_UNWEIGHTED


def _has_uneven_counts(case: RankCase) -> bool:
    """Like `_is_busy_on_last_rank`, but ranks 0 and 1 also exchange token counts that differ."""
    part = load_catalog().prepare_finalize(case.prepare_finalize)
    receives_counts = not part.requires.received_by_library
    return receives_counts and _is_busy_on_last_rank(case) and case.tokens[0] != case.tokens[1]


def _has_idle_rank(case: RankCase) -> bool:
    return _has_many_pairs(case) and 0 in case.tokens


def _make_no_defect(name: str) -> CallMutant:
    return CallMutant(name, "nothing", lambda _p, _r: True)


def _inject_on_all_ranks(
    name: str, arguments: Callable[[CallArguments], CallArguments]
) -> Callable[[Problem], CallMutant]:
    return lambda _problem: replace(_make_no_defect(name), arguments=arguments)


def _inject_on_last_rank(
    name: str, make_fields: Callable[[Problem], dict[str, Any]]
) -> Callable[[Problem], CallMutant]:
    """Make `RankMutant.make` for a defect of the last rank only.

    make_fields: maps the problem of the rank to the changed fields of CallMutant.
    """

    def make_mutant(problem: Problem) -> CallMutant:
        is_last = problem.parallel.rank == problem.parallel.world_size - 1
        return replace(_make_no_defect(name), **(make_fields(problem) if is_last else {}))

    return make_mutant


def shift_by_a_rank(args: CallArguments) -> CallArguments:
    """Add the number of experts per rank to every expert id, modulo E."""
    ids, problem = args.routing.topk_ids_TK, args.problem
    experts_per_rank = len(problem.placement.slots[0])
    is_valid = (ids >= 0) & (ids < problem.experts)
    ids = torch.where(is_valid, (ids + experts_per_rank) % problem.experts, ids)
    return replace(args, routing=replace(args.routing, topk_ids_TK=ids))


def drop_last_experts(args: CallArguments) -> CallArguments:
    """Skip the pairs of the expert in the last slot of each rank."""
    ids, slots = args.routing.topk_ids_TK, args.problem.placement.slots
    last_experts = torch.tensor(
        [experts[-1] for experts in slots], dtype=ids.dtype, device=ids.device
    )
    ids = ids.masked_fill(torch.isin(ids, last_experts), -1)
    return replace(args, routing=replace(args.routing, topk_ids_TK=ids))


def _swap_counts(problem: Problem) -> dict[str, Any]:
    world_size = problem.parallel.world_size

    def swap(value: Any) -> Any:
        """Exchange the entries of ranks 0 and 1 in every per-rank list of a handle."""
        if isinstance(value, tuple | list) and len(value) == world_size:
            return type(value)((value[1], value[0], *value[2:]))
        if isinstance(value, torch.Tensor):
            return value[[1, 0, *range(2, world_size)]]
        if is_dataclass(value) and not isinstance(value, type):
            values = {f.name: getattr(value, f.name) for f in fields(value)}
            changed = {
                name: swap(field_value)
                for name, field_value in values.items()
                if is_per_rank(name, field_value)
            }
            return replace(value, **changed)
        return value

    def is_per_rank(name: str, value: object) -> bool:
        """Return whether a field is a per-rank list, or may contain one.

        Tensors with one entry per rank have names that end in _W. A tensor that is part of a larger
        buffer is not changed, because it may contain flags that peers write. Addresses in the
        memory of peers are computed from the address of these flags, so a copy would make stores go
        to arbitrary addresses.
        """
        if isinstance(value, torch.Tensor):
            return name.endswith("_W") and value.untyped_storage().nbytes() == value.nbytes
        return is_dataclass(value) or isinstance(value, tuple | list)

    def swap_handle(handle: Handle) -> Handle:
        swapped: Handle = swap(handle)
        return swapped

    return {"handle": swap_handle, "dispatched": _roll_counts}


def _roll_counts(tokens: Dispatched) -> Dispatched:
    """Give each expert the count of the previous expert, if rows are batched by expert."""
    if not isinstance(tokens, BatchedTokens):
        return tokens
    return replace(tokens, counts_e=tokens.counts_e.roll(1))


def _double_rows(_problem: Problem) -> dict[str, Any]:
    def double_rows(output: torch.Tensor, _tokens: Dispatched) -> None:
        output.mul_(2)

    return {"rows": double_rows}


def _rotate_rows(_problem: Problem) -> dict[str, Any]:
    def rotate_rows(output: torch.Tensor, tokens: Dispatched) -> None:
        if not isinstance(tokens, BatchedTokens):
            output.copy_(output.roll(1, 0))
            return
        for expert, count in enumerate(tokens.counts_e.tolist()):
            output[expert, :count] = output[expert, :count].roll(1, 0)

    return {"rows": rotate_rows}


def _reuse_rows(_problem: Problem) -> dict[str, Any]:
    history: list[Dispatched] = []

    def insert_previous_rows(tokens: Dispatched) -> Dispatched:
        """Replace the first rows with the rows of the previous call."""
        history.append(_copy_tokens(tokens))
        if len(history) < 2:
            return tokens
        previous, current = history[-2], _copy_tokens(tokens)
        old, new = _get_rows(previous), _get_rows(current)
        overlap = tuple(slice(min(a, b)) for a, b in zip(old.shape, new.shape, strict=True))
        new[overlap] = old[overlap]
        return current

    return {"dispatched": insert_previous_rows}


def _get_rows(tokens: Dispatched) -> torch.Tensor:
    return tokens.x_eCH if isinstance(tokens, BatchedTokens) else tokens.x_TH


def _copy_tokens(tokens: Dispatched) -> Dispatched:
    if isinstance(tokens, BatchedTokens):
        return replace(tokens, x_eCH=tokens.x_eCH.clone())
    return replace(tokens, x_TH=tokens.x_TH.clone())


def _skip_when_idle(_problem: Problem) -> CallMutant:
    """Make a mutant in which a rank computes nothing in calls in which it has no tokens."""
    is_idle: list[bool] = []

    def record_idle(args: CallArguments) -> CallArguments:
        is_idle.append(len(args.x_TH) == 0)
        return args

    def zero_if_idle(output: torch.Tensor, _tokens: Dispatched) -> None:
        if is_idle[-1]:
            output.zero_()

    return replace(_make_no_defect("idle_rank_rests"), arguments=record_idle, rows=zero_if_idle)


RANK_MUTANTS: tuple[RankMutant, ...] = (
    RankMutant(
        "rank_block_offset",
        "expert ids are shifted by the number of experts of a rank",
        _has_many_pairs,
        _inject_on_all_ranks("rank_block_offset", shift_by_a_rank),
    ),
    RankMutant(
        "last_expert_lost",
        "the last expert of each rank gets no rows",
        _has_many_pairs,
        _inject_on_all_ranks("last_expert_lost", drop_last_experts),
    ),
    RankMutant(
        "peer_counts_swapped",
        "the last rank confuses counts or memory of ranks 0 and 1, or counts of its experts",
        _has_uneven_counts,
        _inject_on_last_rank("peer_counts_swapped", _swap_counts),
        timeout_s=6.0,
    ),
    RankMutant(
        "weights_on_both_sides",
        "the router weight is applied by the experts and again by the combine",
        _uses_router_weights,
        _inject_on_all_ranks("weights_on_both_sides", square_router_weights),
    ),
    RankMutant(
        "contribution_twice",
        "the contribution of the last rank is added twice",
        _is_busy_on_last_rank,
        _inject_on_last_rank("contribution_twice", _double_rows),
    ),
    RankMutant(
        "rows_reordered",
        "the last rank returns its rows in another order",
        _is_busy_on_last_rank,
        _inject_on_last_rank("rows_reordered", _rotate_rows),
    ),
    RankMutant(
        "stale_rows",
        "the last rank computes the rows of the previous call",
        _is_busy_on_last_rank,
        _inject_on_last_rank("stale_rows", _reuse_rows),
    ),
    RankMutant(
        "idle_rank_rests",
        "a rank without tokens computes nothing for the others",
        _has_idle_rank,
        _skip_when_idle,
    ),
)
