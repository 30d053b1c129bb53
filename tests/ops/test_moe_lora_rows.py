"""Memory that run_moe_lora reads and writes: rows without an adapter, other slots, strides, ids."""

from dataclasses import replace

import pytest
import torch
from moe_lora_calls import (
    DEVICE,
    WITH_KERNELS_AND_TORCH,
    Sizes,
    assert_close,
    expected_outputs,
    make_call,
    make_implementation_fixture,
    replace_ids,
    replace_info,
)

from modular_kernel.ops.moe_lora import run_moe_lora
from modular_kernel.spec.lora import slots_from_sequences

_implementation = make_implementation_fixture()


@WITH_KERNELS_AND_TORCH
@pytest.mark.parametrize("strategy", ["staged", "fused"])
def test_rows_without_an_adapter_or_an_expert_keep_their_bits(strategy: str) -> None:
    """Negative zeros are kept, too, because nothing is added to these rows."""
    c = make_call()
    c.ids[4] = torch.tensor([-1, 5, 2**31 - 1], dtype=torch.int32)
    c.weights[4] = torch.nan
    slots = c.info.weight_indices.clone()
    slots[:4] = torch.tensor([-1, 4, -(2**31), 2**31 - 1], dtype=torch.int32)
    slots[5:7] = 3  # of rank 0
    c.output[:7] = -0.0
    got = replace_info(c, weight_indices=slots).run(strategy)
    assert bool(torch.signbit(got[:7]).all())
    assert torch.equal(got[slots < 0], c.output[slots < 0])
    assert bool((got[7:][slots[7:] == 2] != c.output[7:][slots[7:] == 2]).any(1).all())


@WITH_KERNELS_AND_TORCH
@pytest.mark.parametrize("strategy", ["staged", "fused"])
def test_other_adapters_and_experts_are_not_read(strategy: str) -> None:
    """Tokens have one slot and three experts; all other factors, and a second slot, are NaN."""
    c = make_call()
    c.ids.remainder_(3)
    c.weights.nan_to_num_(0.3)
    c.info.weight_indices[:] = torch.where(torch.arange(21, device=DEVICE) % 2 > 0, 2, 1).int()
    want = expected_outputs(c)["out"]
    for each in c.buffers:
        each[[0, 3]] = torch.nan
        each[:, 3:] = torch.nan
        each[1] = torch.inf  # of the even tokens
    got = c.run(strategy)
    assert_close(got[1::2], want[1::2])
    assert not got[::2].isfinite().any()


@WITH_KERNELS_AND_TORCH
@pytest.mark.parametrize("strategy", ["staged", "fused"])
def test_strides_are_used(strategy: str) -> None:
    """Buffers are parts of larger ones, and rows of x and of the output have gaps."""
    c = make_call()
    want = c.run(strategy)

    def parted(each: torch.Tensor) -> torch.Tensor:
        wide = torch.full([2 * n for n in each.shape], torch.nan, device=DEVICE, dtype=each.dtype)
        part = wide[tuple(slice(n) for n in each.shape)]
        return part.copy_(each)

    ranks = c.info.lora_ranks.T.contiguous().T
    apart = replace_info(c, lora_ranks=ranks, scalings=c.info.scalings.repeat_interleave(2)[::2])
    apart = replace(apart, x=parted(c.x), buffers=[parted(each) for each in c.buffers])
    apart = replace(apart, ids=c.ids.T.contiguous().T, weights=c.weights.T.contiguous().T)
    out = parted(c.output)
    run_moe_lora(
        apart.x, apart.ids, apart.weights, apart.info, *apart.buffers, out, strategy=strategy
    )
    if DEVICE.type == "cpu":  # plain torch multiplies copies of parts with gaps
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    else:  # compiled for rows on 16 bytes, a kernel loads and sums them in another order
        assert_close(out, want.double())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_adapters_of_sequences_and_of_tokens(dtype: torch.dtype) -> None:
    c = replace_ids(make_call(), make_call().ids.to(dtype))
    starts = torch.tensor([0, 5, 5, 20], dtype=dtype, device=DEVICE)
    slots = torch.tensor([2, 0, 1], dtype=dtype, device=DEVICE)
    by_sequence = replace_info(c, weight_indices=slots, seg_indptr=starts)
    by_token = replace_info(c, weight_indices=slots_from_sequences(starts, slots, 21))
    assert by_token.info.weight_indices.tolist() == [2] * 5 + [1] * 15 + [-1]
    assert torch.equal(by_sequence.run(), by_token.run())
    wide = replace_info(c, weight_indices=torch.full((21,), 1 << 32, device=DEVICE))
    assert torch.equal(wide.run(), c.output)  # not slot 0


@WITH_KERNELS_AND_TORCH
@pytest.mark.parametrize("strategy", ["staged", "fused"])
@pytest.mark.parametrize("sizes", [Sizes(), Sizes(experts=9, rank=4)], ids=str)
def test_one_rank_for_all_experts_and_ranks_above_the_buffers(sizes: Sizes, strategy: str) -> None:
    """Fewer experts than ranks, of which an id selects one too many, and more of them.

    After the last slot, whose rank exceeds the buffers, there is no memory.
    """
    c = make_call(sizes)
    c.buffers = [each.nan_to_num_(0.1) for each in c.buffers]
    c.ids[::4, 0] = sizes.experts
    c.weights[::4, 0] = torch.nan
    c = replace_info(c, lora_ranks=[2, -1, 5, 99])
    assert_close(c.run(strategy), expected_outputs(c)["out"])


def test_a_last_dimension_of_size_1_may_have_any_stride() -> None:
    c = make_call(Sizes(rank=1))
    want = c.run()
    for number in (1, 3):
        each = c.buffers[number]
        c.buffers[number] = each.as_strided(each.shape, (*each.stride()[:-1], 7))
    assert torch.equal(c.run(), want)
    assert not torch.equal(want, c.output)
