"""The number of Python functions that a call of a kernel runs on the host, without and with replay.

Launches of Triton kernels are not counted.
"""

from collections import Counter
from operator import le

import pytest
import torch
from call_counts import (
    count_calls,
    count_functions,
    count_functions_of_replay,
    count_functions_on_rank,
)
from ep_layers import ALL2ALL, GATHERED, REPLICATED, Layer
from ep_layers import BATCHED as BATCHED_RANKS
from grouped_gemm_stand_in import H200
from rank_fixtures import make_ranks_fixture
from replayed_parts import SMALL, AddExperts, Prepare, make_inputs

import modular_kernel as mk
from experts.triton.configs.select import on_device, override_config
from experts.triton.dequantized import dequantized_config as dequantized
from experts.triton.dequantized.dequantized_path import DequantizedPath
from experts.triton.grouped_w4 import grouped_w4_config as grouped_w4
from experts.triton.grouped_w4.grouped_w4_path import GroupedW4Path
from modular_kernel import plan
from modular_kernel.operators.experts import EXPERTS_FORWARD
from modular_kernel.operators.pairing import Pairing, serialize_layer
from modular_kernel.testing.cases.case import Case
from modular_kernel.testing.ranks.pool import RankPool
from modular_kernel.testing.verify.sample import Sample

pytestmark = pytest.mark.cpu  # calls are counted with the interpreter on

NO_EP, BATCHED = "MoEPrepareAndFinalizeNoEP", "BatchedPrepareAndFinalize"
# The number of function calls in version 0.1.0, with the interpreter on, by (prepare/finalize part,
# experts part, scheme, number of tokens).
CALLS_OF_0_1_0 = {
    (NO_EP, "TritonExperts", "none", 1): 252,
    (NO_EP, "TritonExperts", "none", 8): 326,
    (NO_EP, "TritonExperts", "none", 128): 454,
    (NO_EP, "TritonExperts", "fp8_w8a8_channel", 1): 343,
    (NO_EP, "TritonExperts", "fp8_w8a8_channel", 8): 530,
    (NO_EP, "TritonExperts", "fp8_w8a8_channel", 128): 734,
    (NO_EP, "GroupedGemmExperts", "none", 8): 317,
    (NO_EP, "GroupedGemmExperts", "none", 128): 401,
    (BATCHED, "BatchedTritonExperts", "none", 8): 273,
}


def count_host_calls(pf: str, experts: str, problem: mk.Problem) -> Counter[str]:
    kernel = mk.make_kernel(pf, experts, problem)
    case = Case(prepare_finalize=pf, experts=experts, problem=problem)
    inputs = Sample(case, torch.device("cpu"), tokens=problem.tokens, seed_offset=0).inputs
    return count_functions(lambda: kernel(inputs.x_TH, inputs.weights, inputs.routing))


ranks = make_ranks_fixture(2)


def make_problem(quant: str, tokens: int) -> mk.Problem:
    sizes = {"hidden": 128, "intermediate": 256, "experts": 8, "top_k": 2}
    return mk.Problem(tokens=tokens, quant=quant, **sizes)


@pytest.mark.share(3)
@pytest.mark.parametrize("call", CALLS_OF_0_1_0, ids=lambda call: "-".join(map(str, call[1:])))
def test_an_eager_call_stays_within_its_budget_of_python_calls(
    call: tuple[str, str, str, int],
) -> None:
    pf, experts, quant, tokens = call
    counts = count_host_calls(pf, experts, make_problem(quant, tokens))
    assert counts["/modular_kernel/kernel.py:__call__"] == 1
    assert sum(counts.values()) <= 0.57 * CALLS_OF_0_1_0[call], counts.most_common(20)


# Where version 0.1.0 has no count, the limit is slightly more than the current count. The slack is
# so small that an additional function call for each matrix or each part exceeds the limit.
MAX_CALLS = 370
SLACK = 8


def compute_limit(current_calls: int) -> int:
    assert current_calls <= MAX_CALLS
    return min(current_calls + SLACK, MAX_CALLS)


INT4, MXFP4 = "int4_w4a16_group:group=32", "mxfp4_w4a16"
CALLS_WITH_4_BIT_WEIGHTS = {
    (NO_EP, "TritonExperts", INT4, 1): 135,
    (NO_EP, "TritonExperts", INT4, 8): 164,
    (NO_EP, "TritonExperts", INT4, 128): 154,
    (NO_EP, "TritonExperts", MXFP4, 1): 135,
    (NO_EP, "TritonExperts", MXFP4, 8): 164,
    (NO_EP, "TritonExperts", MXFP4, 128): 164,
    (BATCHED, "BatchedTritonExperts", INT4, 8): 145,
    (BATCHED, "BatchedTritonExperts", MXFP4, 8): 145,
}


@pytest.mark.share(3)
@pytest.mark.parametrize(
    "call", CALLS_WITH_4_BIT_WEIGHTS, ids=lambda call: "-".join(map(str, call[1:]))
)
def test_an_eager_call_with_4_bit_weights_stays_within_its_budget(
    call: tuple[str, str, str, int],
) -> None:
    pf, experts, quant, tokens = call
    counts = count_host_calls(pf, experts, make_problem(quant, tokens))
    assert sum(counts.values()) <= compute_limit(CALLS_WITH_4_BIT_WEIGHTS[call]), (
        counts.most_common(20)
    )


def assert_within(counts: tuple[int, int], limits: tuple[int, int]) -> None:
    """Compare the numbers of calls of Python and C functions with their limits."""
    assert all(map(le, counts, limits)), (counts, limits)


def test_a_replayed_call_stays_within_its_budget() -> None:
    """The calls are those of a kernel, and of the operator that compiled models call."""
    pairing = Pairing(Prepare, AddExperts)
    x_TH, weights, routing = make_inputs(tokens=1)
    ids_TK, weights_TK = routing.topk_ids_TK, routing.topk_weights_TK
    layer_json, pairing_name = serialize_layer(SMALL), str(pairing)

    def call_operator() -> torch.Tensor:
        output: torch.Tensor = EXPERTS_FORWARD(
            x_TH, ids_TK, weights_TK, [weights.w1, weights.w2], "w1,w2", layer_json, pairing_name
        )
        return output

    with torch.no_grad():
        counts = count_calls(call_operator)
        (kernel,) = pairing.kernels.values()
        assert kernel.counters()["replayed_calls"] == 2
        assert_within(counts, (16, 42))
        assert_within(count_calls(lambda: kernel(x_TH, weights, routing)), (11, 30))


def test_a_replayed_call_in_its_own_workspace_stays_within_its_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call with more tokens than MAX_SHARED_TOKENS uses its own workspace."""
    monkeypatch.setattr(plan, "MAX_SHARED_TOKENS", 4)
    part = AddExperts(SMALL)
    kernel = mk.FusedMoEModularKernel(Prepare(SMALL), part, machine=mk.Machine("cpu"))
    args = make_inputs(tokens=8)
    kernel(*args)  # the first call is not recorded
    with torch.no_grad():
        assert_within(count_calls(lambda: kernel(*args)), (12, 33))
    assert part.host_calls == 2
    assert kernel.counters()["replayed_calls"] == 2


# The number of function calls on paths that use TMA on an H200, by (path, scheme, tokens).
CALLS_WITH_TMA = {
    ("dequantized", INT4, 8): 225,
    ("dequantized", MXFP4, 128): 231,
    ("grouped_w4", INT4, 128): 264,
    ("grouped_w4", MXFP4, 8): 252,
}


@pytest.mark.parametrize("call", CALLS_WITH_TMA, ids=lambda call: "-".join(map(str, call)))
def test_an_eager_call_of_grouped_gemms_stays_within_its_budget(
    call: tuple[str, str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two GEMMs are replaced, because the interpreter cannot run them."""
    path, quant, tokens = call
    problem, products = make_problem(quant, tokens), []
    for cls in (DequantizedPath, GroupedW4Path):
        monkeypatch.setattr(cls, "multiply", lambda *_: products.append(path))
    launches = {
        "dequantized": dequantized.default_config(problem),
        "grouped_w4": grouped_w4.default_config(problem, 64),
    }
    with on_device(H200), override_config(launches[path]):
        counts = count_host_calls(NO_EP, "TritonExperts", problem)
    assert len(products) == 3 * 2
    assert any(f"/experts/triton/{path}/" in name for name in counts)
    assert sum(counts.values()) <= compute_limit(CALLS_WITH_TMA[call]), counts.most_common(20)


# The number of function calls on each of two gloo ranks, by the two parts.
CALLS_OVER_RANKS = {
    (ALL2ALL, "TorchExperts"): 319,
    (ALL2ALL, "TritonExperts"): 301,
    (GATHERED, "TritonExperts"): 314,
    (REPLICATED, "TritonExperts"): 245,
    (BATCHED_RANKS, "NaiveBatchedExperts"): 362,
    (BATCHED_RANKS, "BatchedTritonExperts"): 296,
}


@pytest.mark.parametrize("call", CALLS_OVER_RANKS, ids=" ".join)
def test_an_eager_call_over_two_ranks_stays_within_its_budget(
    ranks: RankPool, call: tuple[str, str]
) -> None:
    part, experts = call
    layer = Layer(part, (7, 7) if part == REPLICATED else (7, 5), experts_part=experts)
    for counts in ranks.run(count_functions_on_rank, layer):
        assert sum(counts.values()) <= compute_limit(CALLS_OVER_RANKS[call]), counts.most_common(20)


# The number of function calls in a replay on each of two gloo ranks, by prepare/finalize part. Up
# to six of them are for tensors that are not aligned.
REPLAY_CALLS_OVER_RANKS = {
    GATHERED: 73,
    ALL2ALL: 73,
    BATCHED_RANKS: 73,
    REPLICATED: 76,
    "SymmMemPrepareAndFinalize": 40,
    "HostThenRankPrepareAndFinalize": 49,
}


@pytest.mark.parametrize("part", REPLAY_CALLS_OVER_RANKS)
def test_a_replayed_call_over_two_ranks_stays_within_its_budget(ranks: RankPool, part: str) -> None:
    experts = "BatchedTritonExperts" if part == BATCHED_RANKS else "TritonExperts"
    layer = Layer(part, (7, 7) if part == REPLICATED else (7, 5), experts_part=experts)
    for counts in ranks.run(count_functions_of_replay, layer):
        assert sum(counts.values()) <= REPLAY_CALLS_OVER_RANKS[part], counts.most_common(40)
