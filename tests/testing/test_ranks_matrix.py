"""Cases of every valid pairing are proven over two and four ranks, on the CPU with gloo.

The Triton interpreter is slow, so parts with Triton kernels run only a few cases that differ much.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import minimal_rank_parts as parts
import pytest
import torch
from shares import computed_once

from modular_kernel.catalog import load_catalog, this_machine
from modular_kernel.errors import ConfigurationError, IncompatibleError
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.problem import Parallel, Problem
from modular_kernel.testing import Proof
from modular_kernel.testing.cases.case import command
from modular_kernel.testing.cases.nearest import describe_changes
from modular_kernel.testing.cases.ranks import (
    PLACEMENTS,
    RankCase,
    RankSelection,
    parse_placement,
    placement_name,
    rank_cases_for,
    rank_pairings,
)
from modular_kernel.testing.ranks.pool import RankPool
from modular_kernel.testing.verify.checks import check_numeric
from modular_kernel.testing.verify.over_ranks import RankTrial, prove_ranks

MACHINE = this_machine(device="cpu")
WORLD_SIZES = (2, 4)
# World size -> parts of the names of the cases that run for parts with Triton kernels. Together
# they have each placement, an uneven number of experts, and ranks without tokens.
_FEW_CASES = {2: ("uniform-7", "skips", "out_of_range"), 4: ("duplicates",)}

Pool = Callable[[int], RankPool]


def select_cases(prepare_finalize: str, experts: str, world_size: int) -> RankSelection:
    """Return the cases of a pairing that run in this file, and all refused cases."""
    selection_of_all = rank_cases_for(prepare_finalize, experts, MACHINE, world_size)
    catalog = load_catalog()
    # The batched part communicates in the same way as the other all-to-all part, so four ranks test
    # little more.
    is_interpreted = catalog.prepare_finalize(prepare_finalize).requires.triton
    has_few_cases = world_size == 4 and (experts == "NaiveBatchedExperts" or is_interpreted)
    if not (catalog.experts(experts).requires.triton or has_few_cases):
        return selection_of_all
    few_cases = [
        next(
            case
            for case in selection_of_all.cases
            if name_part in f"{case.routing}-{case.tokens[0]}"
        )
        for name_part in _FEW_CASES[world_size]
    ]
    return RankSelection(tuple(few_cases), selection_of_all.refused)


PAIRINGS = computed_once(
    "rank-pairings", lambda: {world: rank_pairings(MACHINE, world) for world in WORLD_SIZES}
)
SELECTIONS = computed_once(
    "rank-cases",
    lambda: [select_cases(*pair, world) for world in WORLD_SIZES for pair in PAIRINGS[world]],
)
CASES = [case for selection in SELECTIONS for case in selection.cases]
REFUSED = [pair for selection in SELECTIONS for pair in selection.refused]


@pytest.mark.budget(quick=15.0, rest=60.0)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case_over_ranks_is_proven(case: RankCase, rank_pool: Pool) -> None:
    proof = prove_ranks(case, rank_pool(case.world_size), MACHINE)
    assert proof.passed, str(proof)


def test_refused_cases_have_a_reason() -> None:
    assert [str(case) for case, verdict in REFUSED if not verdict.rejections] == []


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_cases_cover_placements_and_idle_ranks(world_size: int) -> None:
    pairs = PAIRINGS[world_size]
    assert len({pf for pf, _ in pairs}) >= 3
    cases = [case for case in CASES if case.world_size == world_size]
    assert {placement_name(case.problem.placement) for case in cases} == set(PLACEMENTS)
    assert any(sum(case.tokens) == 0 for case in cases)
    assert any(0 in case.tokens and sum(case.tokens) for case in cases)
    assert any(len(set(map(len, case.problem.placement.slots))) > 1 for case in cases)


def make_smoke_case(name: str, number: int = 0, world_size: int = 2) -> RankCase:
    """Return a smoke case of a part of `minimal_rank_parts`."""
    part = getattr(parts, name)
    return rank_cases_for(part, "TorchExperts", MACHINE, world_size).cases[number]


def prove_smoke_case(name: str, rank_pool: Pool, number: int = 0) -> Proof:
    return prove_ranks(make_smoke_case(name, number), rank_pool(2), MACHINE)


@pytest.mark.parametrize("number", range(8))
def test_the_simplest_part_is_proven(number: int, rank_pool: Pool) -> None:
    proof = prove_smoke_case("SumOverRanks", rank_pool, number)
    assert proof.passed, str(proof)


def test_a_part_that_supports_few_shapes_gets_cases_of_these_shapes(rank_pool: Pool) -> None:
    selected = rank_cases_for(parts.SupportsFewShapes, "TorchExperts", MACHINE, 2)
    default = rank_cases_for(parts.SumOverRanks, "TorchExperts", MACHINE, 2)
    assert len(selected.cases) == len(default.cases)
    for case in selected.cases:
        problem = case.problem
        assert (problem.hidden, problem.dtype) == (256, torch.bfloat16)
        assert problem.placement.is_linear
        assert problem.experts in (4, 6)
    assert {case.routing for case in selected.cases} == {case.routing for case in default.cases}
    proof = prove_ranks(selected.cases[-1], rank_pool(2), MACHINE)
    assert proof.passed, str(proof)


def test_replaced_cases_are_reported() -> None:
    selected = rank_cases_for(parts.SupportsFewShapes, "TorchExperts", MACHINE, 2)
    assert all(not verdict.ok for _, verdict in selected.refused)
    replacements = dict(selected.replacements)
    first, _ = selected.refused[0]
    assert describe_changes(first.problem, replacements[first].problem) == (
        "hidden 48 -> 256, experts 5 -> 6, dtype torch.float32 -> torch.bfloat16"
    )
    # Cases that are refused for reasons other than their shape have no replacement.
    for case, verdict in selected.refused:
        if case not in replacements:
            assert {rejection.rule for rejection in verdict.rejections} - {
                "hidden",
                "dtype",
                "placement",
            }


def test_cases_refused_for_other_reasons_are_not_replaced() -> None:
    selected = rank_cases_for("MoEPrepareAndFinalizeNoEP", "TorchExperts", MACHINE, 2)
    assert (selected.cases, selected.replacements) == ((), ())


def test_a_missing_reduction_is_detected_on_each_rank(rank_pool: Pool) -> None:
    proof = prove_smoke_case("OmitsReduction", rank_pool)
    assert not proof.passed
    for rank in range(2):
        assert any(line.startswith(f"rank {rank}: numeric: ") for line in proof.failures)
    assert 0 < proof.bound < proof.error < float("inf")
    assert "--world-size 2 --rank-tokens 7,7 --placement linear" in str(proof)


def test_a_rank_that_raises_is_named_first(rank_pool: Pool) -> None:
    proof = prove_smoke_case("RaisesOnRankOne", rank_pool)
    first, second = proof.failures
    assert first == "rank 1: numeric: raised ValueError: only here"
    assert second.startswith("rank 0: did not answer after another rank failed\n")
    assert "in all_reduce" in second
    assert proof.error == float("inf")


def test_counting_an_invalid_id_on_two_ranks_is_detected(rank_pool: Pool) -> None:
    numbers = range(
        len(rank_cases_for(parts.CountsInvalidIdsTwice, "TorchExperts", MACHINE, 2).cases)
    )
    (number,) = (
        case_number
        for case_number in numbers
        if make_smoke_case("CountsInvalidIdsTwice", case_number).routing == "out_of_range"
    )
    proof = prove_smoke_case("CountsInvalidIdsTwice", rank_pool, number)
    assert proof.failures
    assert all("invalid_ids: counted" in failure for failure in proof.failures)


def format_verdict(
    part: object, world_size: int, experts: int = 8, placement: object = "linear"
) -> str:
    """Return the verdict on a case as a string."""
    parallel = Parallel(world_size, placement)  # type: ignore[arg-type]
    problem = Problem(4, 32, 32, experts, 2, dtype="float32", parallel=parallel)  # type: ignore[arg-type]
    case = RankCase(part, "TorchExperts", problem, tokens=(4,) * world_size)  # type: ignore[arg-type]
    return str(case.verdict(MACHINE))


def test_refusals_name_the_world_size() -> None:
    verdict = format_verdict("MoEPrepareAndFinalizeNoEP", 2)
    assert "[world_size] MoEPrepareAndFinalizeNoEP / problem: got 2, need 1" in verdict
    assert "[world_size] SupportsTwoRanks / problem: got 4, need 2" in format_verdict(
        parts.SupportsTwoRanks, 4
    )
    assert format_verdict(parts.SupportsTwoRanks, 2).endswith("valid")


def test_refusals_name_the_placement() -> None:
    verdict = format_verdict(parts.SupportsTwoRanks, 2, experts=7)
    assert (
        "[placement] SupportsTwoRanks / problem: got experts=7, need a multiple of world_size 2"
        in verdict
    )
    round_robin = format_verdict(parts.SupportsTwoRanks, 2, placement=Placement.round_robin(8, 2))
    assert (
        "[placement] SupportsTwoRanks / problem: got another placement, need linear" in round_robin
    )
    assert format_verdict(parts.SumOverRanks, 2, experts=7).endswith("valid")


def check_replay_inputs(trial: RankTrial) -> Iterator[str]:
    """Check that inputs for graph replays have the shapes of the first call, but other values."""
    first = trial.copy_first_sample()
    for sample, expected in trial.expected_replays:
        yield from sample.compare(expected).problems
        for name, tensor in sample.inputs.tensors().items():
            if tensor.shape != first.inputs.tensors()[name].shape:
                yield f"{name} has another shape"
    replay, _ = trial.expected_replays[0]
    if torch.equal(replay.inputs.x_TH, first.inputs.x_TH):
        yield "the same values"


def test_graph_replays_over_ranks_get_other_values(rank_pool: Pool) -> None:
    cases = rank_cases_for("TorchAll2AllPrepareAndFinalize", "TorchExperts", MACHINE, 2).cases
    proof = prove_ranks(cases[0], rank_pool(2), MACHINE, checks=[check_replay_inputs])
    assert proof.passed, str(proof)


def check_no_host_handshake(trial: RankTrial) -> Iterator[str]:
    """Check that the part has blocks of a fixed capacity, as without handshakes on the host."""
    part: Any = trial.kernel.prepare_finalize
    if part.manager.checked or part.fixed_capacity is None:
        yield "handshakes on the host"


def test_unchecked_cases_have_no_handshake_on_the_host(rank_pool: Pool) -> None:
    cases = rank_cases_for("TorchAll2AllPrepareAndFinalize", "TorchExperts", MACHINE, 2, "full")
    unchecked = [case for case in cases.cases if not case.checked]
    assert len(unchecked) > 20
    checks = [check_numeric, check_no_host_handshake]
    proof = prove_ranks(unchecked[0], rank_pool(2), MACHINE, checks=checks)
    assert proof.passed, str(proof)
    assert str(unchecked[0]).endswith("-unchecked")
    assert "--unchecked" in command(unchecked[0])
    checked = replace(unchecked[0], checked=True)
    proof = prove_ranks(checked, rank_pool(2), MACHINE, checks=checks)
    assert any("handshakes on the host" in failure for failure in proof.failures)


def test_a_part_that_always_has_handshakes_has_no_unchecked_case() -> None:
    cases = rank_cases_for("SymmMemPrepareAndFinalize", "TorchExperts", MACHINE, 2, "full").cases
    assert cases
    assert all(case.checked for case in cases)
    with pytest.raises(ConfigurationError, match="unchecked"):
        replace(cases[0], checked=False)


def test_proving_a_refused_pairing_raises(rank_pool: Pool) -> None:
    problem = Problem(4, 32, 32, 8, 2, parallel=Parallel(2))
    case = RankCase("MoEPrepareAndFinalizeNoEP", "TorchExperts", problem, tokens=(4, 4))
    with pytest.raises(IncompatibleError, match="world_size"):
        prove_ranks(case, rank_pool(2), MACHINE)
    with pytest.raises(ConfigurationError, match="the pool: got 4 ranks, need 2 ranks"):
        prove_ranks(make_smoke_case("SumOverRanks"), RankPool(4), MACHINE)


@pytest.mark.parametrize("tokens", [(4,), (4, 5), (4, 4, 4)])
def test_tokens_of_a_case_must_match_its_ranks_and_problem(tokens: object) -> None:
    problem = Problem(4, 32, 32, 8, 2, parallel=Parallel(2))
    with pytest.raises(ConfigurationError, match="tokens"):
        RankCase("TorchAll2AllPrepareAndFinalize", "TorchExperts", problem, tokens=tokens)  # type: ignore[arg-type]


def test_replicated_input_requires_equal_tokens_on_all_ranks() -> None:
    problem = Problem(4, 32, 32, 8, 2, parallel=Parallel(2))
    with pytest.raises(ConfigurationError, match="replicated input"):
        RankCase(parts.SumOverRanks, "TorchExperts", problem, tokens=(4, 3))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*PLACEMENTS, "2,0/1,3,4"])
def test_placements_have_names(name: str) -> None:
    placement = parse_placement(name, 5, 2)
    assert placement_name(placement) == name
    assert placement.experts == 5


@pytest.mark.parametrize("placement", ["spiral", "0,1/", "0,x/1"])
def test_an_invalid_placement_is_refused(placement: str) -> None:
    with pytest.raises(ConfigurationError, match="placement"):
        parse_placement(placement, 4, 2)
