"""run_moe_lora reads only the factors that it uses, and does not change rows without an adapter."""

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
    """Rows of -0.0 keep their sign bits, because nothing is added to them."""
    c = make_call()
    c.ids[4] = torch.tensor([-1, 5, 2**31 - 1], dtype=torch.int32)
    c.weights[4] = torch.nan
    slots = c.info.weight_indices.clone()
    slots[:4] = torch.tensor([-1, 4, -(2**31), 2**31 - 1], dtype=torch.int32)
    slots[5:7] = 3  # The adapter in slot 3 has rank 0.
    c.output[:7] = -0.0
    actual = replace_info(c, weight_indices=slots).run(strategy)
    assert bool(torch.signbit(actual[:7]).all())
    assert torch.equal(actual[slots < 0], c.output[slots < 0])
    assert bool((actual[7:][slots[7:] == 2] != c.output[7:][slots[7:] == 2]).any(1).all())


@WITH_KERNELS_AND_TORCH
@pytest.mark.parametrize("strategy", ["staged", "fused"])
def test_other_adapters_and_experts_are_not_read(strategy: str) -> None:
    """Odd tokens use slot 2 and experts 0 to 2. All other factors are NaN or infinite."""
    c = make_call()
    c.ids.remainder_(3)
    c.weights.nan_to_num_(0.3)
    c.info.weight_indices[:] = torch.where(torch.arange(21, device=DEVICE) % 2 > 0, 2, 1).int()
    expected = expected_outputs(c)["out"]
    for tensor in c.buffers:
        tensor[[0, 3]] = torch.nan
        tensor[:, 3:] = torch.nan
        tensor[1] = torch.inf  # Even tokens use slot 1.
    actual = c.run(strategy)
    assert_close(actual[1::2], expected[1::2])
    assert not actual[::2].isfinite().any()


@WITH_KERNELS_AND_TORCH
@pytest.mark.parametrize("strategy", ["staged", "fused"])
def test_strided_arguments_give_the_same_result(strategy: str) -> None:
    """The buffers are slices of larger tensors, and rows of x and of the output have gaps."""
    c = make_call()
    expected = c.run(strategy)

    def copy_with_gaps(tensor: torch.Tensor) -> torch.Tensor:
        wide = torch.full(
            [2 * n for n in tensor.shape], torch.nan, device=DEVICE, dtype=tensor.dtype
        )
        slice_of_wide = wide[tuple(slice(n) for n in tensor.shape)]
        return slice_of_wide.copy_(tensor)

    ranks = c.info.lora_ranks.T.contiguous().T
    strided = replace_info(c, lora_ranks=ranks, scalings=c.info.scalings.repeat_interleave(2)[::2])
    strided = replace(
        strided, x=copy_with_gaps(c.x), buffers=[copy_with_gaps(tensor) for tensor in c.buffers]
    )
    strided = replace(strided, ids=c.ids.T.contiguous().T, weights=c.weights.T.contiguous().T)
    out = copy_with_gaps(c.output)
    run_moe_lora(
        strided.x,
        strided.ids,
        strided.weights,
        strided.info,
        *strided.buffers,
        out,
        strategy=strategy,
    )
    if DEVICE.type == "cpu":
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    else:  # Kernels for rows aligned to 16 bytes sum in a different order.
        assert_close(out, expected.double())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_adapters_by_sequence_equal_adapters_by_token(dtype: torch.dtype) -> None:
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
def test_invalid_ranks_and_ids_are_ignored(sizes: Sizes, strategy: str) -> None:
    """The rank of the last slot exceeds that of the buffers, and no memory follows this slot.
    Some ids are E, which is out of range.
    """
    c = make_call(sizes)
    c.buffers = [tensor.nan_to_num_(0.1) for tensor in c.buffers]
    c.ids[::4, 0] = sizes.experts
    c.weights[::4, 0] = torch.nan
    c = replace_info(c, lora_ranks=[2, -1, 5, 99])
    assert_close(c.run(strategy), expected_outputs(c)["out"])


def test_a_last_dimension_of_size_1_may_have_any_stride() -> None:
    c = make_call(Sizes(rank=1))
    expected = c.run()
    for index in (1, 3):
        tensor = c.buffers[index]
        c.buffers[index] = tensor.as_strided(tensor.shape, (*tensor.stride()[:-1], 7))
    assert torch.equal(c.run(), expected)
    assert not torch.equal(expected, c.output)
