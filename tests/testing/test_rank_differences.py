"""The report on a defective part over ranks names what differs from the reference: counts, rows,
router weights or output.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from minimal_rank_parts import OmitsReduction, SumOverRanks

from experts import TorchExperts
from modular_kernel.catalog import this_machine
from modular_kernel.compatibility.rules import judge
from modular_kernel.contracts import PrepareAndFinalize
from modular_kernel.spec.placement import Placement, pairs_to_slots
from modular_kernel.spec.problem import IdSpace, Parallel, Problem
from modular_kernel.tensors import DispatchedRouting, StandardTokens
from modular_kernel.testing.cases.inputs import make_inputs
from modular_kernel.testing.cases.ranks import RankCase, rank_cases_for
from modular_kernel.testing.ranks.pool import RankPool
from modular_kernel.testing.verify.checks import check_numeric
from modular_kernel.testing.verify.over_ranks import build_kernel, prove_ranks, run_checks
from modular_kernel.testing.verify.rank_differences import describe_dispatch_difference

MACHINE = this_machine(device="cpu")


class _ChangesTokens(SumOverRanks):
    """Changes the tokens that a rank receives."""

    requires = SumOverRanks.requires

    def change(self, tokens):
        raise NotImplementedError

    def prepare(self, x_TH, routing, *, weights, call):
        tokens, handle = super().prepare(x_TH, routing, weights=weights, call=call)
        return self.change(tokens), handle


class DropsAToken(_ChangesTokens):
    """Marks every pair of the first token as a pair of another rank."""

    requires = SumOverRanks.requires

    def change(self, tokens):
        ids_TK = tokens.routing.topk_ids_TK.clone()
        ids_TK[0] = -1
        return replace(tokens, routing=replace(tokens.routing, topk_ids_TK=ids_TK))


class ReversesExperts(_ChangesTokens):
    """Reverses the order of its local experts."""

    requires = SumOverRanks.requires

    def change(self, tokens):
        ids_TK = tokens.routing.topk_ids_TK
        ids_TK = torch.where(ids_TK < 0, ids_TK, self.problem.e - 1 - ids_TK)
        return replace(tokens, routing=replace(tokens.routing, topk_ids_TK=ids_TK))


class DoublesRows(_ChangesTokens):
    """Multiplies the received rows by two."""

    requires = SumOverRanks.requires

    def change(self, tokens):
        return replace(tokens, x_TH=tokens.x_TH * 2)


class AddsTheNextRow(_ChangesTokens):
    """Adds the next row to each received row."""

    requires = SumOverRanks.requires

    def change(self, tokens):
        return replace(tokens, x_TH=tokens.x_TH + tokens.x_TH.roll(1, 0))


class RollsReceivedRows(_ChangesTokens):
    """Rolls the received rows, but not their routing."""

    requires = SumOverRanks.requires

    def change(self, tokens):
        return replace(tokens, x_TH=tokens.x_TH.roll(1, 0))


class HalvesWeights(SumOverRanks):
    """Halves the router weights in prepare, which finalize uses, too."""

    requires = SumOverRanks.requires

    def prepare(self, x_TH, routing, *, weights, call):
        halved_routing = replace(routing, topk_weights_TK=routing.topk_weights_TK / 2)
        return super().prepare(x_TH, halved_routing, weights=weights, call=call)


class DoublesOutput(SumOverRanks):
    requires = SumOverRanks.requires

    def finalize(self, expert_output, *, handle, reduce, out):
        super().finalize(expert_output, handle=handle, reduce=reduce, out=out)
        out.mul_(2)


class RollsOutput(SumOverRanks):
    """Rolls the rows of the output."""

    requires = SumOverRanks.requires

    def finalize(self, expert_output, *, handle, reduce, out):
        super().finalize(expert_output, handle=handle, reduce=reduce, out=out)
        out.copy_(out.roll(1, 0))


class IgnoresPlacement(SumOverRanks):
    """Uses the linear placement, regardless of the problem's placement."""

    requires = SumOverRanks.requires

    def prepare(self, x_TH, routing, *, weights, call):
        tokens, handle = super().prepare(x_TH, routing, weights=weights, call=call)
        linear = Placement.linear(self.problem.experts, self.problem.parallel.world_size)
        rank_TK, slot_TK, _ = pairs_to_slots(routing.topk_ids_TK, linear.tables())
        ids_TK = torch.where(rank_TK == self.problem.parallel.rank, slot_TK, -1)
        ids_TK = ids_TK.to(routing.topk_ids_TK.dtype)
        return replace(tokens, routing=replace(tokens.routing, topk_ids_TK=ids_TK)), handle


def make_case(part: type[PrepareAndFinalize]) -> RankCase:
    """Return an unquantized case with tokens on both ranks and a linear placement."""
    cases = rank_cases_for(part, "TorchExperts", MACHINE, 2).cases
    return next(
        case
        for case in cases
        if case.routing in ("uniform", "skips")
        and case.problem.placement.is_linear
        and min(case.tokens) > 1
        and not case.problem.scheme.quantized
        and case.problem.experts % 2 == 0
        and not case.problem.apply_router_weight_on_input
    )


@pytest.mark.parametrize(
    ("part", "expected_message"),
    [
        (DropsAToken, "differs in received counts: ["),
        (ReversesExperts, "differs in placement: "),
        (DoublesRows, "differs in activations: a received row is token 0 times 2"),
        (AddsTheNextRow, "differs in activations: a row received for local expert "),
        (RollsReceivedRows, "differs in placement: local expert "),
        (HalvesWeights, "differs in router weights: token "),
        (
            OmitsReduction,
            "differs in combine: the output has the pairs of this rank's experts only",
        ),
        (DoublesOutput, "differs in combine: the output is 2 times the reference"),
        (RollsOutput, "differs in order of rows: output row "),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_differences_name_what_differs(
    part: type[PrepareAndFinalize], expected_message: str, rank_pool: Callable[[int], RankPool]
) -> None:
    proof = prove_ranks(make_case(part), rank_pool(2), MACHINE)
    (message,) = [failure for failure in proof.failures if " differs in " in failure]
    assert expected_message in message, proof.failures
    assert "\n" not in message


def test_an_ignored_placement_is_reported(
    rank_pool: Callable[[int], RankPool],
) -> None:
    case = make_case(IgnoresPlacement)
    round_robin = Parallel(2, Placement.round_robin(case.problem.experts, 2))
    case = replace(case, problem=replace(case.problem, parallel=round_robin))
    (message,) = (
        failure
        for failure in prove_ranks(case, rank_pool(2), MACHINE).failures
        if " differs in " in failure
    )
    assert "differs in placement: " in message
    assert "these are the counts of the linear placement" in message


def test_a_correct_part_has_no_differences(rank_pool: Callable[[int], RankPool]) -> None:
    proof = prove_ranks(make_case(SumOverRanks), rank_pool(2), MACHINE)
    assert proof.failures == ()


@pytest.mark.parametrize(("factor", "expected"), [(1.0, ""), (2.0, "scales: a received row is ")])
def test_quantized_rows_are_compared_by_their_values(factor: float, expected: str) -> None:
    problem = Problem(
        *(6, 32, 32, 4, 2), dtype=torch.float32, parallel=Parallel(2), quant="int8_w8a8_channel"
    )
    global_problem = replace(problem, parallel=Parallel(), local_experts=None)
    inputs = make_inputs(global_problem, "uniform", torch.device("cpu"))
    rank_TK, slot_TK, _ = pairs_to_slots(inputs.routing.topk_ids_TK, problem.placement.tables())
    scale = inputs.x_TH.abs().amax(1, keepdim=True) / 127
    routing = DispatchedRouting(
        inputs.routing.topk_weights_TK,
        torch.where(rank_TK == 0, slot_TK, -1),
        IdSpace.LOCAL,
        problem.e,
        None,
        torch.zeros(1, dtype=torch.int32),
    )
    x_TH = (inputs.x_TH / scale).round().to(torch.int8)
    received = StandardTokens(x_TH, routing, scale * factor)
    assert describe_dispatch_difference([received], inputs, problem).startswith(expected)
    assert bool(describe_dispatch_difference([received], inputs, problem)) is bool(expected)


def test_parts_need_a_linear_placement_by_default() -> None:
    requires = replace(SumOverRanks.requires, linear_placement=True)
    default_requires = type(requires)(
        activation_format=requires.activation_format, reduces=requires.reduces
    )
    assert default_requires.linear_placement
    part = type("DefaultPlacement", (SumOverRanks,), {"requires": requires})
    problem = Problem(8, 64, 32, 4, 2, parallel=Parallel(2, Placement.round_robin(4, 2)))
    rules = [r.rule for r in judge(part, TorchExperts, problem, MACHINE).rejections]
    assert rules == ["placement"]
    linear = replace(problem, parallel=Parallel(2))
    assert judge(part, TorchExperts, linear, MACHINE).ok


PAIRS = (
    ("ReplicatedEPPrepareAndFinalize", "TorchExperts"),
    ("AllGatherReduceScatterPrepareAndFinalize", "TorchExperts"),
    ("TorchAll2AllPrepareAndFinalize", "TorchExperts"),
    ("TorchAll2AllBatchedPrepareAndFinalize", "NaiveBatchedExperts"),
)


@pytest.mark.share(2)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0])
def test_dispatch_of_correct_parts_equals_the_reference(
    pair: tuple[str, str], rank_pool: Callable[[int], RankPool]
) -> None:
    """Rows are dispatched to all ranks or to some, by token or by pair (token, expert), quantized
    or unquantized.
    """
    cases = rank_cases_for(*pair, MACHINE, 2).cases
    unquantized = [case for case in cases if not case.problem.scheme.quantized][:4]
    quantized = [case for case in cases if case.problem.scheme.quantizes_activations][:4]
    assert unquantized
    assert quantized
    for case in (*unquantized, *quantized):
        task = case, MACHINE, build_kernel, (check_numeric,)
        reports = rank_pool(2).run(run_checks, *task, timeout=300)
        assert [report.dispatch for report in reports] == ["", ""], str(case)
