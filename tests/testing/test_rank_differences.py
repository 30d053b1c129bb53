"""A wrong part over ranks is reported with what differs, not only with the error of its output."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from rank_parts import SumOverRanks, Unsummed

from experts import TorchExperts
from modular_kernel.catalog import this_machine
from modular_kernel.compatibility.rules import judge
from modular_kernel.contracts import PrepareAndFinalize
from modular_kernel.spec.placement import Placement, pairs_to_slots
from modular_kernel.spec.problem import IdSpace, Parallel, Problem
from modular_kernel.tensors import ContiguousTokens, DispatchedRouting
from modular_kernel.testing.cases.inputs import make_inputs
from modular_kernel.testing.cases.ranks import RankCase, rank_cases_for
from modular_kernel.testing.ranks.pool import RankPool
from modular_kernel.testing.verify.checks import numeric
from modular_kernel.testing.verify.over_ranks import build_kernel, prove_ranks, run_checks
from modular_kernel.testing.verify.rank_differences import dispatch_difference

MACHINE = this_machine(device="cpu")


class _Changed(SumOverRanks):
    """Changes what arrives."""

    requires = SumOverRanks.requires

    def changed(self, tokens):
        raise NotImplementedError

    def prepare(self, x_TH, routing, *, weights, call):
        tokens, handle = super().prepare(x_TH, routing, weights=weights, call=call)
        return self.changed(tokens), handle


class LosesAToken(_Changed):
    """Marks every pair of the first token as another rank's."""

    requires = SumOverRanks.requires

    def changed(self, tokens):
        ids_TK = tokens.routing.topk_ids_TK.clone()
        ids_TK[0] = -1
        return replace(tokens, routing=replace(tokens.routing, topk_ids_TK=ids_TK))


class CountsFromTheEnd(_Changed):
    """Numbers its local experts in the wrong direction."""

    requires = SumOverRanks.requires

    def changed(self, tokens):
        ids_TK = tokens.routing.topk_ids_TK
        ids_TK = torch.where(ids_TK < 0, ids_TK, self.problem.e - 1 - ids_TK)
        return replace(tokens, routing=replace(tokens.routing, topk_ids_TK=ids_TK))


class ScalesARow(_Changed):
    """Multiplies the rows by two."""

    requires = SumOverRanks.requires

    def changed(self, tokens):
        return replace(tokens, x_TH=tokens.x_TH * 2)


class MixesRows(_Changed):
    """Adds the next row to each one."""

    requires = SumOverRanks.requires

    def changed(self, tokens):
        return replace(tokens, x_TH=tokens.x_TH + tokens.x_TH.roll(1, 0))


class ExchangesRows(_Changed):
    """Rolls the rows, but not their routing."""

    requires = SumOverRanks.requires

    def changed(self, tokens):
        return replace(tokens, x_TH=tokens.x_TH.roll(1, 0))


class HalvesWeights(SumOverRanks):
    """Halves the router weights, for the experts and for finalize."""

    requires = SumOverRanks.requires

    def prepare(self, x_TH, routing, *, weights, call):
        halved = replace(routing, topk_weights_TK=routing.topk_weights_TK / 2)
        return super().prepare(x_TH, halved, weights=weights, call=call)


class Doubles(SumOverRanks):
    """Doubles the output."""

    requires = SumOverRanks.requires

    def finalize(self, expert_output, *, handle, reduce, out):
        super().finalize(expert_output, handle=handle, reduce=reduce, out=out)
        out.mul_(2)


class RollsRows(SumOverRanks):
    """Returns the rows in another order."""

    requires = SumOverRanks.requires

    def finalize(self, expert_output, *, handle, reduce, out):
        super().finalize(expert_output, handle=handle, reduce=reduce, out=out)
        out.copy_(out.roll(1, 0))


class PlacesInBlocks(SumOverRanks):
    """Ignores the placement."""

    requires = SumOverRanks.requires

    def prepare(self, x_TH, routing, *, weights, call):
        tokens, handle = super().prepare(x_TH, routing, weights=weights, call=call)
        linear = Placement.linear(self.problem.experts, self.problem.parallel.world_size)
        rank_TK, slot_TK, _ = pairs_to_slots(routing.topk_ids_TK, linear.tables())
        ids_TK = torch.where(rank_TK == self.problem.parallel.rank, slot_TK, -1)
        ids_TK = ids_TK.to(routing.topk_ids_TK.dtype)
        return replace(tokens, routing=replace(tokens.routing, topk_ids_TK=ids_TK)), handle


def case_of(part: type[PrepareAndFinalize]) -> RankCase:
    """An unquantized case with tokens on both ranks and a linear placement."""
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
    ("part", "text"),
    [
        (LosesAToken, "differs in received counts: ["),
        (CountsFromTheEnd, "differs in placement: "),
        (ScalesARow, "differs in activations: a received row is token 0 times 2"),
        (MixesRows, "differs in activations: a row received for local expert "),
        (ExchangesRows, "differs in placement: local expert "),
        (HalvesWeights, "differs in router weights: token "),
        (Unsummed, "differs in combine: the output has the pairs of this rank's experts only"),
        (Doubles, "differs in combine: the output is 2 times the reference"),
        (RollsRows, "differs in order of rows: output row "),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_part_is_told_what_differs(
    part: type[PrepareAndFinalize], text: str, rank_pool: Callable[[int], RankPool]
) -> None:
    proof = prove_ranks(case_of(part), rank_pool(2), MACHINE)
    (line,) = [failure for failure in proof.failures if " differs in " in failure]
    assert text in line, proof.failures
    assert "\n" not in line


def test_a_part_that_ignores_the_placement_is_told(
    rank_pool: Callable[[int], RankPool],
) -> None:
    case = case_of(PlacesInBlocks)
    round_robin = Parallel(2, Placement.round_robin(case.problem.experts, 2))
    case = replace(case, problem=replace(case.problem, parallel=round_robin))
    (line,) = (
        failure
        for failure in prove_ranks(case, rank_pool(2), MACHINE).failures
        if " differs in " in failure
    )
    assert "differs in placement: " in line
    assert "these are the counts of the linear placement" in line


def test_a_correct_part_has_no_such_line(rank_pool: Callable[[int], RankPool]) -> None:
    proof = prove_ranks(case_of(SumOverRanks), rank_pool(2), MACHINE)
    assert proof.failures == ()


@pytest.mark.parametrize(("factor", "expected"), [(1.0, ""), (2.0, "scales: a received row is ")])
def test_quantized_rows_are_compared_by_their_values(factor: float, expected: str) -> None:
    problem = Problem(
        *(6, 32, 32, 4, 2), dtype=torch.float32, parallel=Parallel(2), quant="int8_w8a8_channel"
    )
    whole = replace(problem, parallel=Parallel(), local_experts=None)
    inputs = make_inputs(whole, "uniform", torch.device("cpu"))
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
    received = ContiguousTokens(x_TH, routing, scale * factor)
    assert dispatch_difference([received], inputs, problem).startswith(expected)
    assert bool(dispatch_difference([received], inputs, problem)) is bool(expected)


def test_a_part_that_declares_nothing_is_not_given_other_placements() -> None:
    declared = replace(SumOverRanks.requires, linear_placement=True)
    default = type(declared)(activation_format=declared.activation_format, reduces=declared.reduces)
    assert default.linear_placement
    part = type("Silent", (SumOverRanks,), {"requires": declared})
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
def test_own_parts_agree_with_the_reference_dispatch(
    pair: tuple[str, str], rank_pool: Callable[[int], RankPool]
) -> None:
    """Rows of every rank or of some, one row a token or a pair, quantized or not."""
    cases = rank_cases_for(*pair, MACHINE, 2).cases
    plain = [case for case in cases if not case.problem.scheme.quantized][:4]
    quantized = [case for case in cases if case.problem.scheme.quantizes_activations][:4]
    assert plain
    assert quantized
    for case in (*plain, *quantized):
        task = case, MACHINE, build_kernel, (numeric,)
        reports = rank_pool(2).run(run_checks, *task, timeout=300)
        assert [report.dispatch for report in reports] == ["", ""], str(case)
