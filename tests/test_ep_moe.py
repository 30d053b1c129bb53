"""Expert parallelism without an exchange: EPMoE's steps one by one, and ranks that sum up."""

from dataclasses import replace

import pytest
import torch

from experts.compat.ep_moe import (
    grouped_gemm_triton,
    post_reorder,
    pre_reorder,
    run_moe_ep_preproess,
    silu_and_mul,
)
from experts.triton.permuted import GroupedGemmExperts
from modular_kernel import ExpertWeights, Problem, Routing, make_kernel
from modular_kernel.composer import random_inputs
from modular_kernel.errors import (
    ConfigurationError,
    DtypeError,
    InputError,
    LayoutError,
    ShapeError,
)
from modular_kernel.ops.sort import sort_pairs, sort_specs
from modular_kernel.reference import oracle
from modular_kernel.tensors import ContiguousShape, ContiguousTokens, DispatchedRouting
from modular_kernel.types import IdSpace
from modular_kernel.workspace import Workspace

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP8 = torch.float8_e4m3fn
NO_EP = "MoEPrepareAndFinalizeNoEP"
# The example of ten tokens and four experts that the steps are commonly explained by.
IDS = [1, 3, 2, 1, 0, 2, 3, 1, 2, 0]
WEIGHTS = [0.6, 0.8, 0.7, 0.5, 0.9, 0.6, 0.7, 0.4, 0.8, 0.5]
SRC2DST = [2, 8, 5, 3, 0, 6, 9, 4, 7, 1]
SEG_INDPTR = [0, 2, 5, 8, 10]


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def poison(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), device=DEVICE).to(dtype)


def some_ids(tokens: int, top_k: int, experts: int) -> torch.Tensor:
    """Ids from -1 on, so some pairs are skipped."""
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(-1, experts, (tokens, top_k), generator=generator).to(DEVICE)


def test_the_example_s_order() -> None:
    ids = torch.tensor(IDS, device=DEVICE)[:, None]
    reorder_topk_ids, src2dst, seg_indptr = run_moe_ep_preproess(ids, 4)
    assert reorder_topk_ids.tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3]
    assert src2dst.tolist() == SRC2DST
    assert seg_indptr.tolist() == SEG_INDPTR
    assert (src2dst.dtype, seg_indptr.dtype) == (torch.int32, torch.int64)


def test_the_example_s_output() -> None:
    """Token 0 reads row 2 alone, as every token reads the one row of its pair."""
    ids = torch.tensor(IDS, device=DEVICE)[:, None]
    weights = torch.tensor(WEIGHTS, device=DEVICE)[:, None]
    src2dst = torch.tensor(SRC2DST, dtype=torch.int32, device=DEVICE)
    down = values(10, 48)
    out = poison(10, 48)
    post_reorder(down, out, src2dst, ids, weights, 0, 3)
    assert torch.equal(out, weights * down[src2dst.long()])
    assert torch.equal(out[0], torch.tensor(0.6, device=DEVICE) * down[2])


def test_the_example_on_two_ranks() -> None:
    """Each writes the tokens of its experts and exact zeros elsewhere; the sum is the whole."""
    ids = torch.tensor(IDS, device=DEVICE)[:, None]
    weights = torch.tensor(WEIGHTS, device=DEVICE)[:, None]
    inputs = values(10, 48), values(4, 64, 48, seed=1) / 7, values(4, 48, 32, seed=2) / 6
    whole = ep_moe(*inputs, ids, weights, (0, 3))
    ranks = [ep_moe(*inputs, ids, weights, here) for here in ((0, 1), (2, 3))]
    written = [[t for t in range(10) if bool((part[t] != 0).any())] for part in ranks]
    assert written == [[0, 3, 4, 7, 9], [1, 2, 5, 6, 8]]
    assert torch.equal(ranks[0] + ranks[1], whole)
    problem = Problem(10, 48, 32, 4, 1, torch.float32)
    routing = Routing(weights, ids)
    exact = oracle(inputs[0], ExpertWeights(*inputs[1:]), routing, problem)
    assert torch.allclose(whole.double(), exact, atol=1e-6)


def ep_moe(
    x_TH: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    here: tuple[int, int],
) -> torch.Tensor:
    """One rank's part, step by step. w13 and w2 hold all experts; `here` are the rank's."""
    (tokens, hidden), (experts, width, _) = x_TH.shape, w13.shape
    start, end = here
    reorder_ids, src2dst, seg_indptr = run_moe_ep_preproess(ids_TK, experts)
    segments = (end - start + 1, True, seg_indptr[start : end + 2])
    rows, dtype = ids_TK.numel(), x_TH.dtype
    gateup_input, gateup_output = (
        poison(rows, hidden, dtype=dtype),
        poison(rows, width, dtype=dtype),
    )
    pre_reorder(x_TH, gateup_input, src2dst, ids_TK, None, start, end)
    grouped_gemm_triton(gateup_input, w13[start : end + 1], gateup_output, *segments)
    down_input, down_output = (
        poison(rows, width // 2, dtype=dtype),
        poison(rows, hidden, dtype=dtype),
    )
    silu_and_mul(gateup_output, down_input, reorder_ids, None, start, end)
    grouped_gemm_triton(down_input, w2[start : end + 1], down_output, *segments)
    out = poison(tokens, hidden, dtype=dtype)
    post_reorder(down_output, out, src2dst, ids_TK, weights_TK, start, end)
    return out


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(0, 2, 3), (1, 1, 1), (37, 4, 9)])
def test_preprocess(tokens: int, top_k: int, experts: int, dtype: torch.dtype) -> None:
    """src2dst inverts the stable order; segments hold their expert, skipped pairs come first."""
    ids = some_ids(tokens, top_k, experts).to(dtype)
    reorder_topk_ids, src2dst, seg_indptr = run_moe_ep_preproess(ids, experts)
    flat = ids.flatten().tolist()
    order = sorted(range(len(flat)), key=flat.__getitem__)
    assert [order[row] for row in src2dst.tolist()] == list(range(len(flat)))
    assert reorder_topk_ids.tolist() == sorted(flat)
    assert seg_indptr.tolist() == [sum(i < expert for i in flat) for expert in range(experts + 1)]


def test_preprocess_agrees_with_the_part_s_sort() -> None:
    ids = some_ids(50, 3, 7).abs()
    counter = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    routing = DispatchedRouting(None, ids, IdSpace.LOCAL, 7, None, counter)
    workspace = Workspace(sort_specs(50, 3, 16, 7), DEVICE, poison=True)
    order = sort_pairs(routing, block_m=16, num_local=7, workspace=workspace)
    _, src2dst, seg_indptr = run_moe_ep_preproess(ids, 7)
    assert torch.equal(order.row_of_pair_TK.flatten(), src2dst)
    assert torch.equal(order.starts.long(), seg_indptr)


@pytest.mark.parametrize("top_k", [1, 3, 16])
@pytest.mark.parametrize("to", [torch.bfloat16, FP8])
def test_pre_reorder(to: torch.dtype, top_k: int) -> None:
    ids = some_ids(13, top_k, 6)
    _, src2dst, _ = run_moe_ep_preproess(ids, 6)
    x = values(13, 1100, dtype=torch.bfloat16) * 40  # off every block, and beyond 448 with scales
    scales = torch.tensor([0.11, 1.0, 3.0], device=DEVICE) if to is FP8 else None
    rows = torch.full((13 * top_k, 1100), 2.0, device=DEVICE).to(to)
    pre_reorder(x, rows, src2dst, ids, scales, 2, 4)
    want = torch.full((13 * top_k, 1100), 2.0, device=DEVICE)
    for pair, expert in enumerate(ids.flatten().tolist()):
        if 2 <= expert <= 4:
            scale = 1.0 if scales is None else 1 / scales[expert - 2]
            want[src2dst[pair]] = x[pair // top_k].float() * scale
    want = want.clamp(-448, 448) if to is FP8 else want
    assert torch.equal(rows.float(), want.to(to).float())


@pytest.mark.parametrize("to", [torch.bfloat16, FP8])
def test_silu_and_mul(to: torch.dtype) -> None:
    ids = some_ids(21, 1, 6).flatten().sort().values
    gateup = values(21, 2 * 130, dtype=torch.bfloat16) * 20
    scales = torch.tensor([0.07, 1.0, 3.0], device=DEVICE) if to is FP8 else None
    down = torch.full((21, 130), 2.0, device=DEVICE).to(to)
    silu_and_mul(gateup, down, ids, scales, 2, 4)
    gate, up = gateup.double().chunk(2, dim=1)
    scale = torch.ones(21, 1, device=DEVICE)
    if scales is not None:
        scale = scales[(ids - 2).clamp(0, 2)][:, None]
    want = torch.nn.functional.silu(gate) * up / scale
    here = (ids >= 2) & (ids <= 4)
    assert 0 < int(here.sum()) < 21
    assert bool((down[~here].float() == 2.0).all())
    want, got = want[here].clamp(-448, 448) if to is FP8 else want[here], down[here].double()
    step = 2.0**-4 if to is FP8 else 2.0**-8  # half a unit in the last place, relative
    assert bool(((got - want).abs() <= 1.01 * step * want.abs() + 2.0**-10).all())
    if to is FP8:
        assert got.abs().max() == 448


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_gemm(dtype: torch.dtype) -> None:
    """Segments of no row, one, many; experts in any order; rows outside are left alone."""
    a, b = values(211, 72, dtype=dtype), values(5, 40, 72, seed=1, dtype=dtype)
    c = poison(211, 40, dtype=dtype)
    seg_indptr = torch.tensor([3, 3, 4, 4, 150, 190], device=DEVICE)
    weight_indices = torch.tensor([1, 4, 0, 2, 2], device=DEVICE)
    got = grouped_gemm_triton(a, b, c, 5, True, seg_indptr, weight_indices)
    assert got is c
    want = poison(211, 40).double()
    for i, expert in enumerate(weight_indices.tolist()):
        rows = slice(int(seg_indptr[i]), int(seg_indptr[i + 1]))
        want[rows] = a[rows].double() @ b[expert].double().T
    assert torch.equal(c.isnan(), want.isnan())
    inside = c[3:190].double() - want[3:190]
    step = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-20
    assert bool((inside.abs() <= step * want[3:190].abs() + 1e-5).all())


def test_grouped_gemm_of_transposed_weights() -> None:
    a, b = values(30, 72), values(2, 72, 40, seed=1).transpose(1, 2)
    seg_indptr = torch.tensor([0, 17, 30], device=DEVICE)
    c = grouped_gemm_triton(a, b, poison(30, 40), 2, True, seg_indptr)
    assert torch.allclose(c[:17], a[:17] @ b[0].T, atol=1e-4)
    assert torch.allclose(c[17:], a[17:] @ b[1].T, atol=1e-4)


@pytest.mark.parametrize("block_shape", [None, [32, 64]])
def test_grouped_gemm_in_float8(block_shape: list[int] | None) -> None:
    """One scale a segment and an expert, or one a block; 40 and 96 leave ragged blocks."""
    a, b = values(33, 96).to(FP8), values(4, 40, 96, seed=1).to(FP8)
    seg_indptr = torch.tensor([0, 5, 5, 33], device=DEVICE)
    weight_indices = torch.tensor([3, 0, 1], device=DEVICE)
    generator = torch.Generator().manual_seed(5)
    shapes = ((3,), (4,)) if block_shape is None else ((33, 2), (4, 2, 2))
    scale_a, scale_b = ((torch.rand(s, generator=generator) + 0.5).to(DEVICE) for s in shapes)
    c = poison(33, 40, dtype=torch.bfloat16)
    grouped_gemm_triton(
        a, b, c, 3, True, seg_indptr, weight_indices, True, scale_a, scale_b, block_shape
    )
    if block_shape is None:
        rows = scale_a.repeat_interleave(seg_indptr.diff())[:, None]
        weights = scale_b[:, None, None]
    else:
        rows = scale_a.repeat_interleave(64, 1)[:, :96]
        weights = scale_b.repeat_interleave(32, 1)[:, :40].repeat_interleave(64, 2)[..., :96]
    left, right = a.double() * rows, b.double() * weights
    want = torch.cat([left[:5] @ right[3].T, left[5:] @ right[1].T])
    size = torch.cat([left[:5].abs() @ right[3].T.abs(), left[5:].abs() @ right[1].T.abs()])
    # Tensor cores cut fp8 products about 13 bits below the largest of them before they add.
    cut = 2.0**-13 if DEVICE.type == "cuda" else 0.0
    bound = 2.0**-8 * want.abs() + cut * size + 1e-4
    assert bool(((c.double() - want).abs() <= bound).all())


def test_post_reorder_reads_only_rows_of_its_own() -> None:
    """A token without a pair here becomes zeros, whatever the rows and weights elsewhere hold."""
    ids = torch.tensor([[0, 2], [3, -1], [1, 1], [-1, -1]], device=DEVICE)
    _, src2dst, _ = run_moe_ep_preproess(ids, 4)
    weights = torch.tensor([[0.5, 0.25], [1, 1], [2, 3], [1, 1]], device=DEVICE)
    down, out = values(8, 70, dtype=torch.bfloat16), poison(4, 70, dtype=torch.bfloat16)
    here = [int(row) for row, i in zip(src2dst, ids.flatten(), strict=True) if 0 <= i <= 1]
    down[[row for row in range(8) if row not in here]] = float("nan")
    weights[1] = float("nan")
    post_reorder(down, out, src2dst, ids, weights, 0, 1)
    one, two, three = (down[src2dst[pair].long()].float() for pair in (0, 4, 5))
    want = torch.stack([0.5 * one, 0 * one, 2 * two + 3 * three, 0 * one]).to(torch.bfloat16)
    assert torch.equal(out, want)


def test_no_token_launches_nothing() -> None:
    ids = torch.empty(0, 2, dtype=torch.int64, device=DEVICE)
    out = ep_moe(values(0, 48), values(4, 64, 48), values(4, 48, 32), ids, values(0, 2), (1, 2))
    assert out.shape == (0, 48)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_of_experts_equal_ranks_of_columns(world: int, dtype: torch.dtype) -> None:
    """Sums over `world` ranks: each with some experts whole, each with a shard of all, and one."""
    problem = Problem(23, 64, 128, 8, 3, dtype, expert_map=True)
    x_TH, weights, routing = random_inputs(replace(problem, expert_map=False), DEVICE)
    ids_TK = routing.topk_ids_TK.clone()
    ids_TK[5] = -1
    routing = Routing(routing.topk_weights_TK, ids_TK)
    alone = replace(problem, expert_map=False)
    exact = oracle(x_TH, weights, routing, alone)
    single = make_kernel(NO_EP, "TritonExperts", alone)(x_TH, weights, routing)
    by_experts, by_columns = torch.zeros_like(exact), torch.zeros_like(exact)
    for rank in range(world):
        mine = 8 // world
        expert_map = torch.full((8,), -1, dtype=torch.int32, device=DEVICE)
        held = slice(rank * mine, (rank + 1) * mine)
        expert_map[held] = torch.arange(mine, dtype=torch.int32, device=DEVICE)
        part = ExpertWeights(weights.w1[held], weights.w2[held], expert_map=expert_map)
        local = replace(problem, local_experts=mine)
        kernel = make_kernel(NO_EP, "GroupedGemmExperts", local, poison=True)
        by_experts += kernel(x_TH, part, routing)
        gate, up = weights.w1.chunk(2, 1)
        shard = slice(rank * 128 // world, (rank + 1) * 128 // world)
        w1 = torch.cat([gate[:, shard], up[:, shard]], 1)
        columns = replace(alone, intermediate=128 // world)
        kernel = make_kernel(NO_EP, "TritonExperts", columns)
        by_columns += kernel(x_TH, ExpertWeights(w1, weights.w2[..., shard]), routing)
    # One rounding of the output more for each rank than alone has.
    bound = 1.25 * error(single, exact) + (world - 1) * torch.finfo(dtype).eps / 4
    assert error(by_experts, exact) <= bound
    assert error(by_experts, by_columns) <= 2 * bound
    assert bool((by_experts[5] == 0).all())


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_steps_give_what_the_part_gives(world: int) -> None:
    problem = Problem(23, 64, 48, 4, 2, torch.float32, expert_map=True, local_experts=4 // world)
    x_TH, weights, routing = random_inputs(replace(problem, local_experts=4), DEVICE)
    for rank in range(world):
        start, end = rank * problem.e, (rank + 1) * problem.e - 1
        expert_map = torch.full((4,), -1, dtype=torch.int32, device=DEVICE)
        expert_map[start : end + 1] = torch.arange(problem.e, dtype=torch.int32, device=DEVICE)
        held = slice(start, end + 1)
        part = ExpertWeights(weights.w1[held], weights.w2[held], expert_map=expert_map)
        whole = make_kernel(NO_EP, "GroupedGemmExperts", problem)(x_TH, part, routing)
        ids_TK, weights_TK = routing.topk_ids_TK, routing.topk_weights_TK
        steps = ep_moe(x_TH, weights.w1, weights.w2, ids_TK, weights_TK, (start, end))
        assert torch.allclose(steps, whole, rtol=1e-5, atol=1e-5)


def test_local_ids_need_no_map() -> None:
    """What a dispatcher that localises ids hands over: ids of this rank, and -1."""
    problem = Problem(19, 48, 80, 3, 2, torch.bfloat16)
    x_TH, weights, routing = random_inputs(problem, DEVICE)
    local = routing.topk_ids_TK.clone()
    local[::3, 0] = -1
    want = make_kernel(NO_EP, "TritonExperts", problem)(
        x_TH, weights, Routing(routing.topk_weights_TK, local)
    )
    part = GroupedGemmExperts(problem)
    shapes = part.workspace_shapes(ContiguousShape(19, 2))
    specs = {**shapes.extra, "workspace13": shapes.workspace13, "workspace2": shapes.workspace2}
    counter = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    arrived = DispatchedRouting(routing.topk_weights_TK, local, IdSpace.LOCAL, 3, None, counter)
    out = poison(19, 48, dtype=torch.bfloat16)
    workspace = Workspace(specs, DEVICE, poison=True)
    part.apply(ContiguousTokens(x_TH, arrived), weights=weights, workspace=workspace, output=out)
    assert error(out, want) < 2.0**-8


@pytest.mark.parametrize(
    ("change", "raised", "says"),
    [
        ({"weight_column_major": False}, ConfigurationError, "weight_column_major: got False"),
        ({"b": (40, 72)}, ShapeError, r"b: got \(40, 72\), need 3 dimensions"),
        ({"a": (30, 71)}, ShapeError, r"b: got \(2, 40, 72\)"),
        ({"c": (30, 41)}, ShapeError, r"c: got \(30, 41\), need \(30, 40\)"),
        ({"batch_size": 3}, ShapeError, r"seg_indptr: got \(3,\), need \(4,\)"),
        ({"weight_indices": [0, 1, 1]}, ShapeError, "weight_indices"),
        ({"block_shape": [32, 32]}, ConfigurationError, "need use_fp8_w8a8 with it"),
        ({"use_fp8_w8a8": True}, DtypeError, "a: got float32, need float8_e4m3fn"),
        ({"fp8": True}, ConfigurationError, "scale_a: got None"),
        ({"fp8": True, "scale_a": (30,)}, ShapeError, r"scale_a: got \(30,\), need \(2,\)"),
        ({"fp8": True, "scale_a": (2,), "scale_b": (3,)}, ShapeError, "scale_b"),
        ({"fp8": True, "block_shape": [32, 48]}, ConfigurationError, "a multiple of 32"),
    ],
    ids=str,
)
def test_a_bad_grouped_gemm_says_why(
    change: dict[str, object], raised: type[InputError], says: str
) -> None:
    options: dict[str, object] = {"batch_size": 2, "weight_column_major": True}
    shapes = {"a": (30, 72), "b": (2, 40, 72), "c": (30, 40)}
    for name, value in change.items():
        if name in ("scale_a", "scale_b"):
            options[name] = torch.ones(value, device=DEVICE)
        elif name in shapes:
            shapes[name] = value
        elif name == "weight_indices":
            options[name] = torch.tensor(value, device=DEVICE)
        elif name != "fp8":
            options[name] = value
    options |= {name: values(*shape) for name, shape in shapes.items()}
    if "fp8" in change:
        options |= {name: options[name].to(FP8) for name in ("a", "b")}
        options |= {"use_fp8_w8a8": True, "c": options["c"].to(torch.bfloat16)}
    seg_indptr = torch.tensor([0, 17, 30], device=DEVICE)
    with pytest.raises(raised, match=says):
        grouped_gemm_triton(seg_indptr=seg_indptr, **options)


def test_bad_rows_say_why() -> None:
    ids = some_ids(6, 2, 4)
    reorder_ids, src2dst, _ = run_moe_ep_preproess(ids, 4)
    x, rows = values(6, 48), poison(12, 48)
    with pytest.raises(ShapeError, match=r"gateup_input: got \(11, 48\), need \(12, 48\)"):
        pre_reorder(x, rows[:11], src2dst, ids, None, 0, 1)
    with pytest.raises(ShapeError, match=r"a1_scales: got \(4,\), need \(2,\)"):
        pre_reorder(x, rows, src2dst, ids, torch.ones(4, device=DEVICE), 0, 1)
    with pytest.raises(ShapeError, match=r"topk_ids: got \(12,\), need 2 dimensions"):
        pre_reorder(x, rows, src2dst, ids.flatten(), None, 0, 1)
    with pytest.raises(DtypeError, match="topk_ids: got float32, need int32 or int64"):
        run_moe_ep_preproess(ids.float(), 4)
    with pytest.raises(ConfigurationError, match="num_experts: got 0"):
        run_moe_ep_preproess(ids, 0)
    with pytest.raises(LayoutError, match="hidden_states"):
        pre_reorder(values(48, 6).T, rows, src2dst, ids, None, 0, 1)
    with pytest.raises(ShapeError, match="gateup_output"):
        silu_and_mul(poison(12, 90), rows, reorder_ids, None, 0, 1)
    with pytest.raises(DtypeError, match="topk_weights: got float64, need float32"):
        post_reorder(rows, x, src2dst, ids, values(6, 2).double(), 0, 1)
