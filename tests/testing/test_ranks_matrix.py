"""Every pairing over ranks that the rules allow, on the CPU over gloo: two ranks and four.

What the interpreter runs is slow, so the parts of Triton get the cases that differ most.
"""

from collections.abc import Callable, Iterator

import pytest
import rank_parts as parts
import torch
from shares import drawn_once

from modular_kernel.catalog import load_catalog, this_machine
from modular_kernel.errors import ConfigurationError, IncompatibleError
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.problem import Parallel, Problem
from modular_kernel.testing import Proof
from modular_kernel.testing.cases.nearest import difference
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
from modular_kernel.testing.verify.over_ranks import RankTrial, prove_ranks

MACHINE = this_machine(device="cpu")
WORLDS = (2, 4)
# Of Triton's parts and a few others, by number of ranks: each placement once, a rest, and ranks
# without tokens.
_FEW = {2: ("uniform-7", "skips", "out_of_range"), 4: ("duplicates",)}

Pool = Callable[[int], RankPool]


def selection(prepare_finalize: str, experts: str, world_size: int) -> RankSelection:
    """The cases of a pairing that are run here, and all that are refused."""
    found = rank_cases_for(prepare_finalize, experts, MACHINE, world_size)
    catalog = load_catalog()
    # Between ranks the batched part is the other all-to-all, so four of them tell little more.
    interpreted = catalog.prepare_finalize(prepare_finalize).requires.triton
    brief = world_size == 4 and (experts == "NaiveBatchedExperts" or interpreted)
    if not (catalog.experts(experts).requires.triton or brief):
        return found
    few = [
        next(case for case in found.cases if word in f"{case.routing}-{case.tokens[0]}")
        for word in _FEW[world_size]
    ]
    return RankSelection(tuple(few), found.refused)


PAIRINGS = drawn_once(
    "rank-pairings", lambda: {world: rank_pairings(MACHINE, world) for world in WORLDS}
)
SELECTIONS = drawn_once(
    "rank-cases",
    lambda: [selection(*pair, world) for world in WORLDS for pair in PAIRINGS[world]],
)
CASES = [case for found in SELECTIONS for case in found.cases]
REFUSED = [pair for found in SELECTIONS for pair in found.refused]


@pytest.mark.budget(quick=15.0, rest=60.0)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_proven(case: RankCase, rank_pool: Pool) -> None:
    proof = prove_ranks(case, rank_pool(case.world_size), MACHINE)
    assert proof.passed, str(proof)


def test_what_is_refused_has_a_reason() -> None:
    assert [str(case) for case, verdict in REFUSED if not verdict.rejections] == []


@pytest.mark.parametrize("world_size", WORLDS)
def test_there_are_pairings_and_every_kind_of_case(world_size: int) -> None:
    pairs = PAIRINGS[world_size]
    assert len({pf for pf, _ in pairs}) >= 3
    cases = [case for case in CASES if case.world_size == world_size]
    assert {placement_name(case.problem.placement) for case in cases} == set(PLACEMENTS)
    assert any(sum(case.tokens) == 0 for case in cases)
    assert any(0 in case.tokens and sum(case.tokens) for case in cases)
    assert any(len(set(map(len, case.problem.placement.slots))) > 1 for case in cases)


def stand_in(name: str, number: int = 0, world_size: int = 2) -> RankCase:
    """A smoke case of one of the plainest parts."""
    part = getattr(parts, name)
    return rank_cases_for(part, "TorchExperts", MACHINE, world_size).cases[number]


def proof_of(name: str, rank_pool: Pool, number: int = 0) -> Proof:
    return prove_ranks(stand_in(name, number), rank_pool(2), MACHINE)


@pytest.mark.parametrize("number", range(8))
def test_the_plainest_part_is_proven(number: int, rank_pool: Pool) -> None:
    proof = proof_of("SumOverRanks", rank_pool, number)
    assert proof.passed, str(proof)


def test_a_choosy_part_gets_cases_of_its_own_shapes(rank_pool: Pool) -> None:
    found = rank_cases_for(parts.Choosy, "TorchExperts", MACHINE, 2)
    plain = rank_cases_for(parts.SumOverRanks, "TorchExperts", MACHINE, 2)
    assert len(found.cases) == len(plain.cases)
    for case in found.cases:
        problem = case.problem
        assert (problem.hidden, problem.dtype) == (256, torch.bfloat16)
        assert problem.placement.is_linear
        assert problem.experts in (4, 6)
    assert {case.routing for case in found.cases} == {case.routing for case in plain.cases}
    proof = prove_ranks(found.cases[-1], rank_pool(2), MACHINE)
    assert proof.passed, str(proof)


def test_what_another_shape_stands_for_is_told() -> None:
    found = rank_cases_for(parts.Choosy, "TorchExperts", MACHINE, 2)
    assert all(not verdict.ok for _, verdict in found.refused)
    fitted = dict(found.replacements)
    first, _ = found.refused[0]
    assert difference(first.problem, fitted[first].problem) == (
        "hidden 48 -> 256, experts 5 -> 6, dtype torch.float32 -> torch.bfloat16"
    )
    # What no shape mends is refused, and nothing stands for it.
    for case, verdict in found.refused:
        if case not in fitted:
            assert {each.rule for each in verdict.rejections} - {"hidden", "dtype", "placement"}


def test_other_reasons_are_not_mended() -> None:
    one = rank_cases_for("MoEPrepareAndFinalizeNoEP", "TorchExperts", MACHINE, 2)
    assert (one.cases, one.replacements) == ((), ())


def test_a_part_that_forgets_the_other_ranks_is_found_on_each(rank_pool: Pool) -> None:
    proof = proof_of("Unsummed", rank_pool)
    assert not proof.passed
    for rank in range(2):
        assert any(line.startswith(f"rank {rank}: numeric: ") for line in proof.failures)
    assert 0 < proof.bound < proof.error < float("inf")
    assert "--world-size 2 --rank-tokens 7,7 --placement linear" in str(proof)


def test_a_rank_that_raises_is_named_first(rank_pool: Pool) -> None:
    proof = proof_of("WrongOnRankOne", rank_pool)
    first, second = proof.failures
    assert first == "rank 1: numeric: raised ValueError: only here"
    assert second.startswith("rank 0: did not answer after another rank failed\n")
    assert "in all_reduce" in second
    assert proof.error == float("inf")


def test_counting_an_invalid_id_on_two_ranks_is_found(rank_pool: Pool) -> None:
    numbers = range(len(rank_cases_for(parts.CountsTwice, "TorchExperts", MACHINE, 2).cases))
    (wrong,) = (n for n in numbers if stand_in("CountsTwice", n).routing == "out_of_range")
    proof = proof_of("CountsTwice", rank_pool, wrong)
    assert proof.failures
    assert all("invalid_ids: counted" in failure for failure in proof.failures)


def refused(part: object, world_size: int, experts: int = 8, placement: object = "linear") -> str:
    """The words of a refusal."""
    parallel = Parallel(world_size, placement)  # type: ignore[arg-type]
    problem = Problem(4, 32, 32, experts, 2, dtype="float32", parallel=parallel)  # type: ignore[arg-type]
    case = RankCase(part, "TorchExperts", problem, tokens=(4,) * world_size)  # type: ignore[arg-type]
    return str(case.verdict(MACHINE))


def test_refusals_name_the_world_size() -> None:
    text = refused("MoEPrepareAndFinalizeNoEP", 2)
    assert "[world_size] MoEPrepareAndFinalizeNoEP / problem: got 2, need 1 to 1" in text
    assert "[world_size] AtMostTwo / problem: got 4, need 2 to 2" in refused(parts.AtMostTwo, 4)
    assert refused(parts.AtMostTwo, 2).endswith("valid")


def test_refusals_name_the_placement() -> None:
    rest = refused(parts.AtMostTwo, 2, experts=7)
    assert "[placement] AtMostTwo / problem: got experts=7, need a multiple of world_size 2" in rest
    dealt = refused(parts.AtMostTwo, 2, placement=Placement.round_robin(8, 2))
    assert "[placement] AtMostTwo / problem: got another placement, need linear" in dealt
    assert refused(parts.SumOverRanks, 2, experts=7).endswith("valid")


def other_values(trial: RankTrial) -> Iterator[str]:
    """What a graph captured on the first call would be replayed on: as many tokens on each rank."""
    again = trial.first_again()
    for sample, want in trial.replayed:
        yield from sample.compare(want).problems
        for name, tensor in sample.inputs.tensors().items():
            if tensor.shape != again.inputs.tensors()[name].shape:
                yield f"{name} has another shape"
    new, _ = trial.replayed[0]
    if torch.equal(new.inputs.x_TH, again.inputs.x_TH):
        yield "the same values"


def test_a_graph_over_ranks_is_replayed_on_other_values(rank_pool: Pool) -> None:
    cases = rank_cases_for("TorchAll2AllPrepareAndFinalize", "TorchExperts", MACHINE, 2).cases
    proof = prove_ranks(cases[0], rank_pool(2), MACHINE, checks=[other_values])
    assert proof.passed, str(proof)


def test_a_refused_pairing_is_no_proof(rank_pool: Pool) -> None:
    problem = Problem(4, 32, 32, 8, 2, parallel=Parallel(2))
    case = RankCase("MoEPrepareAndFinalizeNoEP", "TorchExperts", problem, tokens=(4, 4))
    with pytest.raises(IncompatibleError, match="world_size"):
        prove_ranks(case, rank_pool(2), MACHINE)
    with pytest.raises(ConfigurationError, match="the pool: got 4 ranks, need 2 ranks"):
        prove_ranks(stand_in("SumOverRanks"), RankPool(4), MACHINE)


@pytest.mark.parametrize("tokens", [(4,), (4, 5), (4, 4, 4)])
def test_a_case_has_tokens_for_each_rank_and_no_more_than_its_problem(tokens: object) -> None:
    problem = Problem(4, 32, 32, 8, 2, parallel=Parallel(2))
    with pytest.raises(ConfigurationError, match="tokens"):
        RankCase("TorchAll2AllPrepareAndFinalize", "TorchExperts", problem, tokens=tokens)  # type: ignore[arg-type]


def test_replicated_input_is_the_same_on_all_ranks() -> None:
    problem = Problem(4, 32, 32, 8, 2, parallel=Parallel(2))
    with pytest.raises(ConfigurationError, match="replicated input"):
        RankCase(parts.SumOverRanks, "TorchExperts", problem, tokens=(4, 3))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*PLACEMENTS, "2,0/1,3,4"])
def test_placements_have_names(name: str) -> None:
    placement = parse_placement(name, 5, 2)
    assert placement_name(placement) == name
    assert placement.experts == 5


@pytest.mark.parametrize("text", ["spiral", "0,1/", "0,x/1"])
def test_a_placement_that_is_not_understood(text: str) -> None:
    with pytest.raises(ConfigurationError, match="placement"):
        parse_placement(text, 4, 2)
