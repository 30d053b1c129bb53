"""CutlassExpertsFP8 returns the same bits as the path `grouped_tma` of TritonExperts.

The GEMMs of CutlassExpertsFP8 are written in CuTe DSL, and those of `grouped_tma` in Gluon.
"""

from dataclasses import replace

import pytest
import torch

from experts.triton.configs.select import override_config
from experts.triton.grouped_tma.grouped_tma_config import default_config
from modular_kernel import Machine, Problem, check, make_kernel
from modular_kernel.machine import current_machine
from modular_kernel.spec.problem import Combine
from modular_kernel.testing.random_inputs import random_inputs

PREPARE_FINALIZE = "MoEPrepareAndFinalizeNoEP"
BASE = Problem(300, 512, 256, 4, 2, "bfloat16", "fp8_w8a8_block")


def probe_machine() -> Machine:
    return current_machine(("nvidia_cutlass_dsl", "tvm_ffi"))


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not check(PREPARE_FINALIZE, "CutlassExpertsFP8", BASE, probe_machine()).ok,
        reason="needs sm_90 and cutlass",
    ),
]


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tokens": 1, "experts": 8},
        {"tokens": 17, "hidden": 256, "intermediate": 384, "experts": 8},  # an odd number of tiles
        {"tokens": 513, "hidden": 1024, "intermediate": 768, "experts": 8},
        {"tokens": 257, "hidden": 2048, "intermediate": 640, "experts": 16, "top_k": 4},
        {"tokens": 64, "hidden": 128, "intermediate": 128, "experts": 3, "top_k": 1},
        {"tokens": 1000, "hidden": 384, "intermediate": 896, "experts": 5, "top_k": 3},
        {"combine": Combine.TOPK_UNWEIGHTED},
    ],
)
def test_outputs_are_bitwise_equal(change: dict[str, object], skewed: bool) -> None:
    problem = replace(BASE, **change)
    torch.manual_seed(problem.tokens)
    x_TH, weights, routing = random_inputs(problem, torch.device("cuda"))
    if skewed:  # few experts get nearly every token, and some tokens have no expert
        ids_TK = routing.topk_ids_TK % max(1, problem.experts // 4)
        ids_TK[::7] = -1
        ids_TK[::11] = problem.experts - 1
        routing = replace(routing, topk_ids_TK=ids_TK)
    outputs = []
    with override_config(default_config(problem)):
        for name in ("TritonExperts", "CutlassExpertsFP8"):
            plan = make_kernel(PREPARE_FINALIZE, name, problem).plan()
            output = plan(x_TH, weights, routing).clone()
            repeated = plan(x_TH, weights, routing).clone()
            assert torch.equal(output, repeated)
            outputs.append(output)
    assert torch.equal(*outputs)


def test_graph_replays_are_bitwise_equal() -> None:
    x_TH, weights, routing = random_inputs(BASE, torch.device("cuda"))
    with override_config(default_config(BASE)):
        plan = make_kernel(PREPARE_FINALIZE, "CutlassExpertsFP8", BASE).plan()
        expected = plan(x_TH, weights, routing).clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = plan(x_TH, weights, routing)
        output.fill_(torch.nan)
        graph.replay()
        assert torch.equal(output, expected)
