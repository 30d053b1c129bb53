"""Expert parallelism without an exchange: each rank has all tokens, and rank outputs are summed."""

from dataclasses import replace

import pytest
import torch
from ep_moe_steps import DEVICE, nan_tensor, random_normal, run_steps

# SGLang spells `run_moe_ep_preproess` in this way.
from experts.compat.ep_moe import post_reorder, run_moe_ep_preproess
from experts.grouped_gemm import GroupedGemmExperts
from modular_kernel import ExpertWeights, Problem, Routing, make_kernel
from modular_kernel.reference import float64_reference
from modular_kernel.spec.problem import IdSpace
from modular_kernel.tensors import DispatchedRouting, StandardShape, StandardTokens
from modular_kernel.testing.random_inputs import random_inputs
from modular_kernel.workspace import Workspace

NO_EP = "MoEPrepareAndFinalizeNoEP"

# An example with ten tokens, four experts and top-1.
IDS = [1, 3, 2, 1, 0, 2, 3, 1, 2, 0]
WEIGHTS = [0.6, 0.8, 0.7, 0.5, 0.9, 0.6, 0.7, 0.4, 0.8, 0.5]
SRC2DST = [2, 8, 5, 3, 0, 6, 9, 4, 7, 1]
SEG_INDPTR = [0, 2, 5, 8, 10]


def test_preprocess_of_the_example() -> None:
    ids = torch.tensor(IDS, device=DEVICE)[:, None]
    reorder_topk_ids, src2dst, seg_indptr = run_moe_ep_preproess(ids, 4)
    assert reorder_topk_ids.tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3]
    assert src2dst.tolist() == SRC2DST
    assert seg_indptr.tolist() == SEG_INDPTR
    assert (src2dst.dtype, seg_indptr.dtype) == (torch.int32, torch.int64)


def test_post_reorder_of_the_example() -> None:
    """With top-1, each token reads the row of its only pair. Token 0 reads row 2."""
    ids = torch.tensor(IDS, device=DEVICE)[:, None]
    weights = torch.tensor(WEIGHTS, device=DEVICE)[:, None]
    src2dst = torch.tensor(SRC2DST, dtype=torch.int32, device=DEVICE)
    down = random_normal(10, 48)
    out = nan_tensor(10, 48)
    post_reorder(down, out, src2dst, ids, weights, 0, 3)
    assert torch.equal(out, weights * down[src2dst.long()])
    assert torch.equal(out[0], torch.tensor(0.6, device=DEVICE) * down[2])


def test_the_example_on_two_ranks_sums_up_to_the_output() -> None:
    """Each rank writes the rows of the tokens of its experts, and exact zeros for other tokens."""
    ids = torch.tensor(IDS, device=DEVICE)[:, None]
    weights = torch.tensor(WEIGHTS, device=DEVICE)[:, None]
    inputs = (
        random_normal(10, 48),
        random_normal(4, 64, 48, seed=1) / 7,
        random_normal(4, 48, 32, seed=2) / 6,
    )
    output = run_steps(*inputs, ids, weights, (0, 3))
    rank_outputs = [run_steps(*inputs, ids, weights, local) for local in ((0, 1), (2, 3))]
    nonzero_rows = [[t for t in range(10) if bool((out[t] != 0).any())] for out in rank_outputs]
    assert nonzero_rows == [[0, 3, 4, 7, 9], [1, 2, 5, 6, 8]]
    assert torch.equal(rank_outputs[0] + rank_outputs[1], output)
    problem = Problem(10, 48, 32, 4, 1, torch.float32)
    routing = Routing(weights, ids)
    exact = float64_reference(inputs[0], ExpertWeights(*inputs[1:]), routing, problem)
    assert torch.allclose(output.double(), exact, atol=1e-6)


def test_steps_without_tokens_return_an_empty_output() -> None:
    ids = torch.empty(0, 2, dtype=torch.int64, device=DEVICE)
    out = run_steps(
        random_normal(0, 48),
        random_normal(4, 64, 48),
        random_normal(4, 48, 32),
        ids,
        random_normal(0, 2),
        (1, 2),
    )
    assert out.shape == (0, 48)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_expert_parallel_ranks_equal_tensor_parallel_ranks(world: int, dtype: torch.dtype) -> None:
    """The outputs of ranks with some of the experts, and of ranks with a shard of every expert,
    have the same sum.
    """
    problem = Problem(23, 64, 128, 8, 3, dtype, expert_map=True)
    x_TH, weights, routing = random_inputs(replace(problem, expert_map=False), DEVICE)
    ids_TK = routing.topk_ids_TK.clone()
    ids_TK[5] = -1
    routing = Routing(routing.topk_weights_TK, ids_TK)
    full_problem = replace(problem, expert_map=False)
    exact = float64_reference(x_TH, weights, routing, full_problem)
    one_rank_output = make_kernel(NO_EP, "TritonExperts", full_problem)(x_TH, weights, routing)
    ep_sum, tp_sum = torch.zeros_like(exact), torch.zeros_like(exact)
    for rank in range(world):
        num_local = 8 // world
        expert_map = torch.full((8,), -1, dtype=torch.int32, device=DEVICE)
        local = slice(rank * num_local, (rank + 1) * num_local)
        expert_map[local] = torch.arange(num_local, dtype=torch.int32, device=DEVICE)
        local_weights = ExpertWeights(weights.w1[local], weights.w2[local], expert_map=expert_map)
        local_problem = replace(problem, local_experts=num_local)
        kernel = make_kernel(NO_EP, "GroupedGemmExperts", local_problem, poison=True)
        ep_sum += kernel(x_TH, local_weights, routing)
        gate, up = weights.w1.chunk(2, 1)
        shard = slice(rank * 128 // world, (rank + 1) * 128 // world)
        w1 = torch.cat([gate[:, shard], up[:, shard]], 1)
        shard_problem = replace(full_problem, intermediate=128 // world)
        kernel = make_kernel(NO_EP, "TritonExperts", shard_problem)
        tp_sum += kernel(x_TH, ExpertWeights(w1, weights.w2[..., shard]), routing)
    # Each further rank rounds its output once more.
    bound = 1.25 * compute_relative_error(one_rank_output, exact)
    bound += (world - 1) * torch.finfo(dtype).eps / 4
    assert compute_relative_error(ep_sum, exact) <= bound
    assert compute_relative_error(ep_sum, tp_sum) <= 2 * bound
    assert bool((ep_sum[5] == 0).all())


def compute_relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("world", [1, 2, 4])
def test_steps_equal_grouped_gemm_experts(world: int) -> None:
    problem = Problem(23, 64, 48, 4, 2, torch.float32, expert_map=True, local_experts=4 // world)
    x_TH, weights, routing = random_inputs(replace(problem, local_experts=4), DEVICE)
    for rank in range(world):
        start, end = rank * problem.e, (rank + 1) * problem.e - 1
        expert_map = torch.full((4,), -1, dtype=torch.int32, device=DEVICE)
        expert_map[start : end + 1] = torch.arange(problem.e, dtype=torch.int32, device=DEVICE)
        local = slice(start, end + 1)
        local_weights = ExpertWeights(weights.w1[local], weights.w2[local], expert_map=expert_map)
        expected = make_kernel(NO_EP, "GroupedGemmExperts", problem)(x_TH, local_weights, routing)
        ids_TK, weights_TK = routing.topk_ids_TK, routing.topk_weights_TK
        output = run_steps(x_TH, weights.w1, weights.w2, ids_TK, weights_TK, (start, end))
        assert torch.allclose(output, expected, rtol=1e-5, atol=1e-5)


def test_local_ids_need_no_expert_map() -> None:
    """A dispatcher that localizes ids passes local ids of this rank's experts, and otherwise -1."""
    problem = Problem(19, 48, 80, 3, 2, torch.bfloat16)
    x_TH, weights, routing = random_inputs(problem, DEVICE)
    local_ids = routing.topk_ids_TK.clone()
    local_ids[::3, 0] = -1
    expected = make_kernel(NO_EP, "TritonExperts", problem)(
        x_TH, weights, Routing(routing.topk_weights_TK, local_ids)
    )
    experts = GroupedGemmExperts(problem)
    shapes = experts.workspace_shapes(StandardShape(19, 2))
    specs = {**shapes.extra, "workspace13": shapes.workspace13, "workspace2": shapes.workspace2}
    counter = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    dispatched = DispatchedRouting(
        routing.topk_weights_TK, local_ids, IdSpace.LOCAL, 3, None, counter
    )
    out = nan_tensor(19, 48, dtype=torch.bfloat16)
    workspace = Workspace(specs, DEVICE, poison=True)
    experts.apply(
        StandardTokens(x_TH, dispatched), weights=weights, workspace=workspace, output=out
    )
    assert compute_relative_error(out, expected) < 2.0**-8
