"""The steps of EPMoE: rows sorted by expert, the activation, and the sum per token."""

import pytest
import torch
from ep_moe_steps import DEVICE, FP8, nan_tensor, random_ids, random_normal

# SGLang spells `run_moe_ep_preproess` in this way.
from experts.compat.ep_moe import post_reorder, pre_reorder, run_moe_ep_preproess, silu_and_mul
from modular_kernel.errors import ConfigurationError, DtypeError, LayoutError, ShapeError
from modular_kernel.ops.sort import sort_pairs, sort_specs
from modular_kernel.spec.problem import IdSpace
from modular_kernel.tensors import DispatchedRouting
from modular_kernel.workspace import Workspace


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(0, 2, 3), (1, 1, 1), (37, 4, 9)])
def test_preprocess_sorts_pairs_by_expert(
    tokens: int, top_k: int, experts: int, dtype: torch.dtype
) -> None:
    """`src2dst` is the inverse of a stable sort by expert, in which skipped pairs come first."""
    ids = random_ids(tokens, top_k, experts).to(dtype)
    reorder_topk_ids, src2dst, seg_indptr = run_moe_ep_preproess(ids, experts)
    flat_ids = ids.flatten().tolist()
    order = sorted(range(len(flat_ids)), key=flat_ids.__getitem__)
    assert [order[row] for row in src2dst.tolist()] == list(range(len(flat_ids)))
    assert reorder_topk_ids.tolist() == sorted(flat_ids)
    expected_indptr = [sum(i < expert for i in flat_ids) for expert in range(experts + 1)]
    assert seg_indptr.tolist() == expected_indptr


def test_preprocess_agrees_with_sort_pairs() -> None:
    ids = random_ids(50, 3, 7).abs()
    counter = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    routing = DispatchedRouting(None, ids, IdSpace.LOCAL, 7, None, counter)
    workspace = Workspace(sort_specs(50, 3, 16, 7), DEVICE, poison=True)
    order = sort_pairs(routing, block_m=16, num_local=7, workspace=workspace)
    _, src2dst, seg_indptr = run_moe_ep_preproess(ids, 7)
    assert torch.equal(order.row_of_pair_TK.flatten(), src2dst)
    assert torch.equal(order.starts.long(), seg_indptr)


@pytest.mark.parametrize("top_k", [1, 3, 16, 22])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, FP8])
def test_pre_reorder_copies_and_scales_rows_of_local_pairs(
    out_dtype: torch.dtype, top_k: int
) -> None:
    ids = random_ids(13, top_k, 6)
    _, src2dst, _ = run_moe_ep_preproess(ids, 6)
    # 1100 columns are not a multiple of any block size. Some scaled values exceed 448, the maximum
    # of FP8.
    x = random_normal(13, 1100, dtype=torch.bfloat16) * 40
    scales = torch.tensor([0.11, 1.0, 3.0], device=DEVICE) if out_dtype is FP8 else None
    rows = torch.full((13 * top_k, 1100), 2.0, device=DEVICE).to(out_dtype)
    pre_reorder(x, rows, src2dst, ids, scales, 2, 4)
    expected = torch.full((13 * top_k, 1100), 2.0, device=DEVICE)
    for pair, expert in enumerate(ids.flatten().tolist()):
        if 2 <= expert <= 4:
            scale = 1.0 if scales is None else 1 / scales[expert - 2]
            expected[src2dst[pair]] = x[pair // top_k].float() * scale
    expected = expected.clamp(-448, 448) if out_dtype is FP8 else expected
    assert torch.equal(rows.float(), expected.to(out_dtype).float())


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, FP8])
def test_silu_and_mul_scales_rows_of_local_pairs(out_dtype: torch.dtype) -> None:
    ids = random_ids(21, 1, 6).flatten().sort().values
    gateup = random_normal(21, 2 * 130, dtype=torch.bfloat16) * 20
    scales = torch.tensor([0.07, 1.0, 3.0], device=DEVICE) if out_dtype is FP8 else None
    down = torch.full((21, 130), 2.0, device=DEVICE).to(out_dtype)
    silu_and_mul(gateup, down, ids, scales, 2, 4)
    gate, up = gateup.double().chunk(2, dim=1)
    scale = torch.ones(21, 1, device=DEVICE)
    if scales is not None:
        scale = scales[(ids - 2).clamp(0, 2)][:, None]
    expected = torch.nn.functional.silu(gate) * up / scale
    is_local = (ids >= 2) & (ids <= 4)
    assert 0 < int(is_local.sum()) < 21
    assert bool((down[~is_local].float() == 2.0).all())
    expected = expected[is_local].clamp(-448, 448) if out_dtype is FP8 else expected[is_local]
    actual = down[is_local].double()
    half_ulp = 2.0**-4 if out_dtype is FP8 else 2.0**-8  # relative
    assert bool(((actual - expected).abs() <= 1.01 * half_ulp * expected.abs() + 2.0**-10).all())
    if out_dtype is FP8:
        assert actual.abs().max() == 448


def test_post_reorder_reads_only_rows_of_local_pairs() -> None:
    """A token without a local pair gets zeros, even if its rows and weights are NaN."""
    ids = torch.tensor([[0, 2], [3, -1], [1, 1], [-1, -1]], device=DEVICE)
    _, src2dst, _ = run_moe_ep_preproess(ids, 4)
    weights = torch.tensor([[0.5, 0.25], [1, 1], [2, 3], [1, 1]], device=DEVICE)
    down, out = random_normal(8, 70, dtype=torch.bfloat16), nan_tensor(4, 70, dtype=torch.bfloat16)
    local_rows = [int(row) for row, i in zip(src2dst, ids.flatten(), strict=True) if 0 <= i <= 1]
    down[[row for row in range(8) if row not in local_rows]] = float("nan")
    weights[1] = float("nan")
    post_reorder(down, out, src2dst, ids, weights, 0, 1)
    row_of_pair0, row_of_pair4, row_of_pair5 = (
        down[src2dst[pair].long()].float() for pair in (0, 4, 5)
    )
    expected = torch.stack(
        [
            0.5 * row_of_pair0,
            0 * row_of_pair0,
            2 * row_of_pair4 + 3 * row_of_pair5,
            0 * row_of_pair0,
        ]
    ).to(torch.bfloat16)
    assert torch.equal(out, expected)


def test_invalid_step_arguments_are_refused() -> None:
    ids = random_ids(6, 2, 4)
    reorder_ids, src2dst, _ = run_moe_ep_preproess(ids, 4)
    x, rows = random_normal(6, 48), nan_tensor(12, 48)
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
        pre_reorder(random_normal(48, 6).T, rows, src2dst, ids, None, 0, 1)
    with pytest.raises(ShapeError, match="gateup_output"):
        silu_and_mul(nan_tensor(12, 90), rows, reorder_ids, None, 0, 1)
    with pytest.raises(DtypeError, match="topk_weights: got float64, need float32"):
        post_reorder(rows, x, src2dst, ids, random_normal(6, 2).double(), 0, 1)
