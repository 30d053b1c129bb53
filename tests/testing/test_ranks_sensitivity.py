"""The cases over ranks detect defects: each mutant of `RANK_MUTANTS` is killed in every pairing.

`test_ranks_matrix` proves the same cases without a mutant.
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
from modular_kernel.testing.input_mutations.run import CallMutantResult
from modular_kernel.testing.ranks.pool import RankPool
from modular_kernel.testing.verify.over_ranks import prove_ranks

MACHINE = this_machine(device="cpu")
# Mutants that behave differently on four ranks than on two.
FOUR_RANK_MUTANTS = (
    "rank_block_offset",
    "peer_counts_swapped",
    "contribution_twice",
    "idle_rank_rests",
)
# Parts with replicated input exchange no counts, and their ranks all have the same tokens, so these
# mutants do not occur.
NEEDS_OWN_TOKENS = ("peer_counts_swapped", "idle_rank_rests")
# With four ranks on one host, the combine of this part does not read the counts of other ranks.
UNREAD_COUNTS = "HostThenRankPrepareAndFinalize", "peer_counts_swapped"

# Mutants that behave differently with these interpreted experts than with TorchExperts. `tests/gpu`
# runs all mutants with compiled kernels.
INTERPRETED_MUTANTS = {
    "TritonExperts": ("idle_rank_rests", "rows_reordered"),
    "GroupedGemmExperts": ("rows_reordered",),
    "BatchedTritonExperts": ("peer_counts_swapped", "rows_reordered", "stale_rows"),
}

Pool = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def known_failures() -> dict[Case, str | None]:
    """Return a cache of the cases that were run without a mutant, with their first failure."""
    return dict.fromkeys(CASES)


def can_occur(pairing: tuple[str, str], mutant: RankMutant) -> bool:
    part = load_catalog().prepare_finalize(pairing[0])
    return not (part.requires.replicated_input and mutant.name in NEEDS_OWN_TOKENS)


def list_pairings_with_mutants(world_size: int) -> list[object]:
    """Return the pairings and mutants to test, as pytest parameters.

    On two ranks, pairings with TorchExperts have every mutant that can occur, and other pairings
    have only those in INTERPRETED_MUTANTS. On four ranks, only TorchExperts with FOUR_RANK_MUTANTS
    is tested.
    """
    pairs = [
        (pairing, mutant)
        for pairing in PAIRINGS[2]
        for mutant in RANK_MUTANTS
        if can_occur(pairing, mutant)
        and mutant.name in INTERPRETED_MUTANTS.get(pairing[1], (mutant.name,))
        and (world_size == 2 or (mutant.name in FOUR_RANK_MUTANTS and pairing[1] == "TorchExperts"))
        and (world_size == 2 or (pairing[0], mutant.name) != UNREAD_COUNTS)
    ]
    return [pytest.param(*pair, id=f"{'+'.join(pair[0])}-{pair[1].name}") for pair in pairs]


def list_survivors(
    pairing: tuple[str, str],
    mutant: RankMutant,
    pool: RankPool,
    known_failures: dict[Case, str | None],
) -> list[str]:
    kills = sensitivity_ranks(*pairing, pool, mutants=[mutant], known_failures=known_failures)
    assert kills, "no case has the mutant"
    return [str(kill) for kill in kills if not kill.ok or kill.no_effect_reason]


@pytest.mark.share(6)
@pytest.mark.parametrize(("pairing", "mutant"), list_pairings_with_mutants(2))
def test_mutant_is_killed_on_two_ranks(
    pairing: tuple[str, str],
    mutant: RankMutant,
    rank_pool: Pool,
    known_failures: dict[Case, str | None],
) -> None:
    assert list_survivors(pairing, mutant, rank_pool(2), known_failures) == []


@pytest.mark.share(6)
@pytest.mark.parametrize(("pairing", "mutant"), list_pairings_with_mutants(4))
def test_mutant_is_killed_on_four_ranks(
    pairing: tuple[str, str],
    mutant: RankMutant,
    rank_pool: Pool,
    known_failures: dict[Case, str | None],
) -> None:
    assert list_survivors(pairing, mutant, rank_pool(4), known_failures) == []


@pytest.mark.cpu  # The kernels of the part are interpreted.
def test_a_mutant_of_unread_values_has_no_effect(
    rank_pool: Pool, known_failures: dict[Case, str | None]
) -> None:
    (mutant,) = (m for m in RANK_MUTANTS if m.name == UNREAD_COUNTS[1])
    pair = UNREAD_COUNTS[0], "TorchExperts"
    (kill,) = sensitivity_ranks(
        *pair, rank_pool(4), mutants=[mutant], known_failures=known_failures
    )
    assert kill.no_effect_reason == "what it changes is never read", str(kill)
    assert (kill.ok, kill.killed_by) == (True, None)


@dataclass(frozen=True)
class Inner:
    counts_W: tuple[int, ...]
    step: int


@dataclass(frozen=True)
class Outer(Handle):
    inner: Inner
    rows_TK: torch.Tensor


def test_reads_of_changed_values_are_recorded() -> None:
    original = Outer(Inner((1, 2), 7), torch.arange(3))
    copy = replace(original, inner=replace(original.inner), rows_TK=original.rows_TK.clone())
    effect.record_effect("defect", Effect.NONE)
    assert effect.record_reads("defect", original, copy) is original
    assert effect.pop_effect("defect") is Effect.NONE

    changed: Any = effect.record_reads(
        "defect",
        original,
        replace(original, inner=Inner((2, 1), 7), rows_TK=original.rows_TK.roll(1)),
    )
    assert isinstance(changed, Outer)
    assert (changed.inner.step, type(changed.inner).__name__) == (7, "Inner")
    assert effect.pop_effect("defect") is Effect.UNREAD
    assert changed.inner.counts_W == (2, 1)
    assert effect.pop_effect("defect") is Effect.USED
    assert changed.rows_TK.tolist() == [2, 0, 1]
    assert effect.pop_effect("defect") is Effect.USED
    assert effect.pop_effect("not recorded") is Effect.USED  # for example, because the rank died


def test_a_failure_of_a_mutant_without_effect_is_not_ok() -> None:
    case = CASES[0]
    kill = CallMutantResult.from_effect("defect", case, None, "numeric: far off", Effect.NONE)
    assert not kill.ok
    assert (kill.killed_by, kill.failure_without_mutant) == (None, "numeric: far off")
    assert str(CallMutantResult.from_effect("defect", case, None, None, Effect.NONE)).endswith(
        "no effect: the tensors it changes are absent"
    )
    assert not CallMutantResult.from_effect("defect", case, None, None, Effect.USED).ok


def test_mutants_occur_in_every_pairing_in_which_they_can() -> None:
    for pairing in PAIRINGS[2]:
        cases = rank_cases_for(*pairing, MACHINE, 2).cases
        for mutant in RANK_MUTANTS:
            assert any(map(mutant.applies, cases)) == can_occur(pairing, mutant), mutant.name


def test_mutant_names_are_unique() -> None:
    names = [mutant.name for mutant in RANK_MUTANTS]
    assert len(names) == len(set(names)) >= 8
    interpreted = {name for mutant_names in INTERPRETED_MUTANTS.values() for name in mutant_names}
    assert {*FOUR_RANK_MUTANTS, *NEEDS_OWN_TOKENS, *interpreted} <= set(names)
    assert all(mutant.description for mutant in RANK_MUTANTS)


def test_a_defect_is_detected_on_the_receiving_rank(rank_pool: Pool) -> None:
    pairing = "TorchAll2AllPrepareAndFinalize", "TorchExperts"
    case = rank_cases_for(*pairing, MACHINE, 2).cases[0]
    proof = prove_ranks(case, rank_pool(2), MACHINE, partial(build_mutant, "contribution_twice"))
    assert any(failure.startswith("rank 0: numeric: ") for failure in proof.failures)


# Mutants that are applied to the last rank only: (mutant, routing of the case, check that must
# fail).
LAST_RANK_MUTANTS = (
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


@pytest.mark.parametrize(("name", "routing", "check"), LAST_RANK_MUTANTS)
def test_a_defect_of_one_rank_is_detected_on_that_rank(
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
class PeerMemoryHandle(Handle):
    """A handle with flags in shared memory and offsets of other ranks' memory."""

    flags_W: torch.Tensor
    deltas_W: torch.Tensor


def test_swapped_counts_keep_addresses_valid() -> None:
    """The mutant swaps the offsets of other ranks' memory, but the flags must stay in the same
    memory.
    """
    (mutant,) = (m for m in RANK_MUTANTS if m.name == "peer_counts_swapped")
    problem = Problem(tokens=4, hidden=48, intermediate=80, experts=4, top_k=2)
    problem_of_last_rank = replace(problem, parallel=Parallel(world_size=2, rank=1))
    handle = PeerMemoryHandle(torch.zeros(64, dtype=torch.int32)[:2], torch.tensor([-4096, 0]))
    swapped = mutant.make(problem_of_last_rank).handle(handle)
    assert swapped.deltas_W.tolist() == [0, -4096]
    assert swapped.flags_W.data_ptr() == handle.flags_W.data_ptr()
