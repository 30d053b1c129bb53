"""The harness can see across ranks: every defect of its battery is killed in every pairing.

Where a defect is put into a case of test_ranks_matrix, that file shows that it passes without.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from test_ranks_matrix import CASES, PAIRINGS

from modular_kernel.catalog import load_catalog, this_machine
from modular_kernel.spec.problem import Parallel, Problem
from modular_kernel.tensors import Handle
from modular_kernel.testing import Case
from modular_kernel.testing.cases.ranks import rank_cases_for
from modular_kernel.testing.input_mutations import effect
from modular_kernel.testing.input_mutations.effect import Effect
from modular_kernel.testing.input_mutations.over_ranks import sensitivity_ranks
from modular_kernel.testing.input_mutations.rank_operators import (
    RANK_MUTANTS,
    RankMutant,
    build_mutant,
    build_on_last_rank,
)
from modular_kernel.testing.input_mutations.run import Kill
from modular_kernel.testing.ranks.pool import RankPool
from modular_kernel.testing.verify.over_ranks import prove_ranks

MACHINE = this_machine(device="cpu")
# More ranks than two make a difference to who has it and whose rows are whose.
OF_FOUR = ("rank_block_offset", "peer_counts_swapped", "contribution_twice", "idle_rank_rests")
# Where input is replicated nothing is counted, and no rank is without tokens alone.
NEEDS_OWN_TOKENS = ("peer_counts_swapped", "idle_rank_rests")
# On one host of four ranks its combine reads counts of no other rank.
COUNTS_HOSTS = "HostThenRankPrepareAndFinalize", "peer_counts_swapped"

# What interpreted experts can do wrong in a way of their own; the rest is the other part's, and
# `tests/gpu` finds all of it behind compiled ones.
OF_INTERPRETED = {
    "TritonExperts": ("idle_rank_rests", "rows_reordered"),
    "GroupedGemmExperts": ("rows_reordered",),
    "BatchedTritonExperts": ("peer_counts_swapped", "rows_reordered", "stale_rows"),
}

Pool = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def proven() -> dict[Case, str | None]:
    """Cases that were proven without a mutant, and their first failure."""
    return dict.fromkeys(CASES)


def occurs(pairing: tuple[str, str], mutant: RankMutant) -> bool:
    part = load_catalog().prepare_finalize(pairing[0])
    return not (part.requires.replicated_input and mutant.name in NEEDS_OWN_TOKENS)


def triples(world_size: int) -> list[object]:
    """Every pairing of plain torch with every defect that it can have, others with their own; on
    four ranks in plain torch alone."""
    found = [
        (pairing, mutant)
        for pairing in PAIRINGS[2]
        for mutant in RANK_MUTANTS
        if occurs(pairing, mutant)
        and mutant.name in OF_INTERPRETED.get(pairing[1], (mutant.name,))
        and (world_size == 2 or (mutant.name in OF_FOUR and pairing[1] == "TorchExperts"))
        and (world_size == 2 or (pairing[0], mutant.name) != COUNTS_HOSTS)
    ]
    return [pytest.param(*pair, id=f"{'+'.join(pair[0])}-{pair[1].name}") for pair in found]


def survivors(
    pairing: tuple[str, str], mutant: RankMutant, pool: RankPool, proven: dict[Case, str | None]
) -> list[str]:
    kills = sensitivity_ranks(*pairing, pool, mutants=[mutant], proven=proven)
    assert kills, "no case shows it"
    return [str(kill) for kill in kills if not kill.ok or kill.nothing]


@pytest.mark.share(6)
@pytest.mark.parametrize(("pairing", "mutant"), triples(2))
def test_killed_on_two_ranks(
    pairing: tuple[str, str], mutant: RankMutant, rank_pool: Pool, proven: dict[Case, str | None]
) -> None:
    assert survivors(pairing, mutant, rank_pool(2), proven) == []


@pytest.mark.share(6)
@pytest.mark.parametrize(("pairing", "mutant"), triples(4))
def test_killed_on_four_ranks(
    pairing: tuple[str, str], mutant: RankMutant, rank_pool: Pool, proven: dict[Case, str | None]
) -> None:
    assert survivors(pairing, mutant, rank_pool(4), proven) == []


@pytest.mark.cpu  # its kernels are interpreted
def test_what_nobody_reads_is_neither_killed_nor_a_survivor(
    rank_pool: Pool, proven: dict[Case, str | None]
) -> None:
    (mutant,) = (each for each in RANK_MUTANTS if each.name == COUNTS_HOSTS[1])
    pair = COUNTS_HOSTS[0], "TorchExperts"
    (kill,) = sensitivity_ranks(*pair, rank_pool(4), mutants=[mutant], proven=proven)
    assert kill.nothing == "what it changes is never read", str(kill)
    assert (kill.ok, kill.killed_by) == (True, None)


@dataclass(frozen=True)
class Inner:
    counts_W: tuple[int, ...]
    step: int


@dataclass(frozen=True)
class Outer(Handle):
    inner: Inner
    rows_TK: torch.Tensor


def test_an_effect_is_what_somebody_reads() -> None:
    given = Outer(Inner((1, 2), 7), torch.arange(3))
    again = replace(given, inner=replace(given.inner), rows_TK=given.rows_TK.clone())
    effect.record_effect("defect", Effect.NONE)
    assert effect.with_recorded_reads("defect", given, again) is given
    assert effect.pop_effect("defect") is Effect.NONE

    told: Any = effect.with_recorded_reads(
        "defect", given, replace(given, inner=Inner((2, 1), 7), rows_TK=given.rows_TK.roll(1))
    )
    assert isinstance(told, Outer)
    assert (told.inner.step, type(told.inner).__name__) == (7, "Inner")
    assert effect.pop_effect("defect") is Effect.UNREAD
    assert told.inner.counts_W == (2, 1)
    assert effect.pop_effect("defect") is Effect.USED
    assert told.rows_TK.tolist() == [2, 0, 1]
    assert effect.pop_effect("defect") is Effect.USED
    assert effect.pop_effect("unheard of") is Effect.USED  # such as of a rank that was lost


def test_what_fails_with_a_defect_that_changes_nothing_fails_without_it() -> None:
    case = CASES[0]
    kill = Kill.from_effect("defect", case, None, "numeric: far off", Effect.NONE)
    assert (kill.ok, kill.killed_by, kill.unsound) == (False, None, "numeric: far off")
    assert str(Kill.from_effect("defect", case, None, None, Effect.NONE)).endswith(
        "no effect: the tensors it changes are absent"
    )
    assert not Kill.from_effect("defect", case, None, None, Effect.USED).ok


def test_defects_occur_exactly_where_they_can() -> None:
    for pairing in PAIRINGS[2]:
        cases = rank_cases_for(*pairing, MACHINE, 2).cases
        for mutant in RANK_MUTANTS:
            assert any(map(mutant.applies, cases)) == occurs(pairing, mutant), mutant.name


def test_the_battery_names_its_defects() -> None:
    names = [mutant.name for mutant in RANK_MUTANTS]
    assert len(names) == len(set(names)) >= 8
    own = {name for few in OF_INTERPRETED.values() for name in few}
    assert {*OF_FOUR, *NEEDS_OWN_TOKENS, *own} <= set(names)
    assert all(mutant.description for mutant in RANK_MUTANTS)


def test_a_rank_without_the_defect_finds_it_in_what_it_gets(rank_pool: Pool) -> None:
    pairing = "TorchAll2AllPrepareAndFinalize", "TorchExperts"
    case = rank_cases_for(*pairing, MACHINE, 2).cases[0]
    proof = prove_ranks(case, rank_pool(2), MACHINE, partial(build_mutant, "contribution_twice"))
    assert any(failure.startswith("rank 0: numeric: ") for failure in proof.failures)


# Promises besides the numbers, broken by the last rank alone: the defect, the routing of the case
# that shows it, and the check that finds it there.
PROMISES = (
    ("workspace_overrun", "uniform", "red_zones"),
    ("output_overrun", "uniform", "out_given"),
    ("another_tensor_returned", "uniform", "out_given"),
    ("x_written", "uniform", "inputs_unchanged"),
    ("ids_written", "uniform", "inputs_unchanged"),
    ("sentinel_written", "skips", "inputs_unchanged"),
    ("stale_output", "uniform", "plan_reused"),
    ("accumulates", "uniform", "numeric"),
    ("last_token_unwritten", "uniform", "numeric"),
    ("smaller_plan_call", "uniform", "plan_shrunk"),
    ("dispatch_on_self", "uniform", "interleaved"),
    ("out_of_range_uncounted", "out_of_range", "invalid_ids"),
    ("empty_call_fails", "out_of_range", "numeric"),
)


@pytest.mark.parametrize(("name", "routing", "check"), PROMISES)
def test_a_promise_broken_on_one_rank_is_found_there(
    name: str, routing: str, check: str, rank_pool: Pool
) -> None:
    pairing = "AllGatherReduceScatterPrepareAndFinalize", "TorchExperts"
    cases = rank_cases_for(*pairing, MACHINE, 2).cases
    case = next(case for case in cases if case.routing == routing)
    if name == "out_of_range_uncounted":  # the last rank has no tokens in the smoke case
        case = replace(case, tokens=case.tokens[::-1])
    proof = prove_ranks(case, rank_pool(2), MACHINE, partial(build_on_last_rank, name))
    assert any(failure.startswith(f"rank 1: {check}: ") for failure in proof.failures), str(proof)


@dataclass(frozen=True)
class Told(Handle):
    """What a part that writes to its peers' memory keeps of a call."""

    flags_W: torch.Tensor
    deltas_W: torch.Tensor


def test_confused_memory_is_still_memory() -> None:
    """Distances to peers' memory change places; flags there do not move away from them."""
    (mutant,) = (each for each in RANK_MUTANTS if each.name == "peer_counts_swapped")
    problem = Problem(tokens=4, hidden=48, intermediate=80, experts=4, top_k=2)
    last = replace(problem, parallel=Parallel(world_size=2, rank=1))
    told = Told(torch.zeros(64, dtype=torch.int32)[:2], torch.tensor([-4096, 0]))
    confused = mutant.make(last).handle(told)
    assert confused.deltas_W.tolist() == [0, -4096]
    assert confused.flags_W.data_ptr() == told.flags_W.data_ptr()
