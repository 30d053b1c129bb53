"""Imports of 8-bit GPTQ weights, per-tensor fp8 weights, and the mxfp4 weights of gpt-oss."""

from dataclasses import replace

import pytest
import torch
from test_gptq_awq import dequantize_imported

from modular_kernel.checkpoints import (
    channel_scale,
    drop_zero_points,
    from_gpt_oss,
    from_gptq,
    merge_scales,
    regroup,
    shard_columns,
    shard_rows,
    static_scale,
)
from modular_kernel.errors import ConfigurationError, DtypeError, ShapeError, WeightsError
from modular_kernel.quant.quantized_weights import check_weights_quantized, dequantize
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import ExpertWeights

CPU, FP8 = torch.device("cpu"), torch.float8_e4m3fn

# 8-bit GPTQ


def pack_bytes(values: list[int]) -> int:
    """Return four bytes as a signed int32, with the first byte in the lowest bits."""
    word = sum(byte << (8 * index) for index, byte in enumerate(values))
    return word - (1 << 32) if word >= 1 << 31 else word


def pack_gptq(values: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """Subtract `offset` from values (M, C), and pack four values of a row into each int32 word.

    The differences must be from 0 to 255. Returns (C / 4, M).
    """
    shifted = (values - offset).tolist()
    words = [
        [pack_bytes(row[column : column + 4]) for row in shifted]
        for column in range(0, values.shape[1], 4)
    ]
    return torch.tensor(words, dtype=torch.int32)


def make_random_groups(rows: int = 8, depth: int = 32, group: int = 8) -> tuple[torch.Tensor, ...]:
    """Return values (N, K) and zero points (N, G), both from 0 to 255, and scales (N, G)."""
    generator = torch.Generator().manual_seed(1)
    groups = -(-depth // group)
    values = torch.randint(0, 256, (rows, depth), generator=generator)
    zeros = torch.randint(1, 256, (rows, groups), generator=generator)
    return values, zeros, torch.rand(rows, groups, generator=generator) + 0.5


@pytest.mark.parametrize(("group", "offset"), [(8, 1), (8, 0), (32, 1), (-1, 1)])
def test_imported_int8_values_equal_the_packed_values(group: int, offset: int) -> None:
    group_size = 32 if group == -1 else group
    values, zeros, scales = make_random_groups(group=group_size)
    # qzeros (G, N / 4): each word has the zero points of four rows.
    qzeros = pack_gptq(zeros.T.contiguous(), offset).T
    imported = from_gptq(
        pack_gptq(values), scales.T, qzeros, group=group, minus_one=bool(offset), bits=8
    )  # fmt: skip
    assert imported.w.dtype == torch.uint8
    assert torch.equal(imported.w.int(), values.int())
    assert imported.zero_point is not None
    assert torch.equal(imported.zero_point.int(), zeros.int())
    assert (imported.group, imported.depth, imported.per_byte) == (group_size, 32, 1)
    assert imported.quant == f"int8_w8a16_group:group={group_size},zero_points=true"
    want = (values - zeros.repeat_interleave(group_size, 1)) * scales.repeat_interleave(
        group_size, 1
    )
    torch.testing.assert_close(dequantize_imported(imported), want)


def test_from_gptq_decodes_known_8_bit_words() -> None:
    """An int32 word has four values that are adjacent along K, the first in the lowest byte. Stored
    zero points are decreased by one.
    """
    qweight = torch.tensor([[0x04030201, -1, 0, 0]], dtype=torch.int32)
    qzeros = torch.tensor([[pack_bytes([127, 0, 1, 254])]], dtype=torch.int32)
    imported = from_gptq(qweight, torch.full((1, 4), 2.0), qzeros, group=4, bits=8)
    assert imported.w.tolist() == [[1, 2, 3, 4], [255] * 4, [0] * 4, [0] * 4]
    assert imported.zero_point is not None
    assert imported.zero_point[:, 0].tolist() == [128, 1, 2, 255]
    assert dequantize_imported(imported)[1].tolist() == [508.0] * 4


def test_int8_without_zero_points_is_offset_by_128() -> None:
    values, zeros, scales = make_random_groups()
    qzeros = pack_gptq(torch.full_like(zeros, 128).T.contiguous(), 1).T
    imported = from_gptq(pack_gptq(values), scales.T, qzeros, group=8, bits=8)
    without_zero_points = drop_zero_points(imported)
    assert without_zero_points.zero_point is None
    assert without_zero_points.quant == "int8_w8a16_group:group=8"
    assert torch.equal(dequantize_imported(without_zero_points), dequantize_imported(imported))
    other_zero_points = from_gptq(
        pack_gptq(values), scales.T, pack_gptq(zeros.T.contiguous(), 1).T, group=8, bits=8
    )
    with pytest.raises(WeightsError, match=r"zero_point: got a zero point of .*, need 128"):
        drop_zero_points(other_zero_points)


def test_int8_groups_and_shards_keep_values() -> None:
    values, zeros, scales = make_random_groups(rows=8, depth=64, group=64)
    imported = from_gptq(
        pack_gptq(values), scales.T, pack_gptq(zeros.T.contiguous(), 1).T, group=64, bits=8
    )
    values_before = dequantize_imported(imported)
    assert torch.equal(dequantize_imported(regroup(imported, 32)), values_before)
    for rank in range(2):
        columns = slice(rank * 32, (rank + 1) * 32)
        assert torch.equal(
            dequantize_imported(shard_columns(imported, rank, 2)), values_before[:, columns]
        )
        assert torch.equal(
            dequantize_imported(shard_rows(imported, rank, 2)),
            values_before[rank * 4 : rank * 4 + 4],
        )
        assert shard_rows(imported, rank, 2).bits == 8


def test_invalid_8_bit_tensors_are_refused() -> None:
    values, zeros, scales = make_random_groups()
    qzeros = pack_gptq(zeros.T.contiguous(), 1).T
    with pytest.raises(ConfigurationError, match=r"group: got 2147483648, need an int >= -1 and"):
        from_gptq(pack_gptq(values), scales.T, qzeros, group=2**31, bits=8)
    with pytest.raises(ShapeError, match=r"qweight: got \(0, 8\), need .* none of size 0"):
        from_gptq(torch.zeros(0, 8, dtype=torch.int32), scales.T, None, group=-1)
    with pytest.raises(ConfigurationError, match="bits: got 3, need 4 or 8"):
        from_gptq(pack_gptq(values), scales.T, qzeros, group=8, bits=3)
    # If read as 4-bit values, there would be twice as many columns, which the scales contradict.
    with pytest.raises(ShapeError, match=r"scales: got \(4, 8\), need .* = \(8, 8\)"):
        from_gptq(pack_gptq(values), scales.T, None, group=8)
    all_ones = torch.full((4, 2), -1, dtype=torch.int32)
    with pytest.raises(WeightsError, match="qzeros: got a stored 255, need at most 254"):
        from_gptq(pack_gptq(values), scales.T, all_ones, group=8, bits=8)


# fp8 with per-tensor scales


def make_fp8_gate_up() -> tuple[torch.Tensor, torch.Tensor]:
    """Return w1 (2, 8, 16) in fp8, and the scales of the gate and up rows of each expert."""
    w = (torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(2)) * 100).to(FP8)
    return w, torch.tensor([[0.5, 0.125], [0.01, 0.03]])


def test_merge_scales_uses_the_larger_scale() -> None:
    w, scales = make_fp8_gate_up()
    merged, scale = merge_scales(w, scales)
    assert scale.tolist() == scales.amax(1).tolist()
    assert merged.dtype == FP8
    # Rows with the larger scale keep their bits.
    assert torch.equal(merged.view(torch.uint8)[0, :4], w.view(torch.uint8)[0, :4])
    assert torch.equal(merged.view(torch.uint8)[1, 4:], w.view(torch.uint8)[1, 4:])
    # Multiplication by 1/4 (expert 0) is exact except for subnormals, and multiplication by 1/3
    # (expert 1) rounds.
    got = merged.float() * scale[:, None, None]
    want = w.float() * scales.repeat_interleave(4, 1)[:, :, None]
    error = (got - want).abs()
    step = 2.0**-9 * scale[:, None, None]  # the distance of neighboring subnormals
    assert bool((error <= torch.maximum(want.abs() / 15.9, step)).all())
    assert float(error[0, 4:].max()) <= float(step[0])
    assert float(error[1, :4].max()) > 0


def test_merge_scales_accepts_one_or_three_scales_per_expert() -> None:
    w = torch.ones(1, 6, 2).to(FP8)
    merged, scale = merge_scales(w, torch.tensor([[1.0, 4.0, 2.0]], dtype=torch.bfloat16))
    assert scale.tolist() == [4.0]
    assert scale.dtype == torch.float32
    assert merged.float()[0, :, 0].tolist() == [0.25, 0.25, 1.0, 1.0, 0.5, 0.5]
    unchanged, scale = merge_scales(w, torch.tensor([[3.0]]))
    assert torch.equal(unchanged.view(torch.uint8), w.view(torch.uint8))
    assert scale.tolist() == [3.0]


def test_weights_with_merged_scales_are_accepted() -> None:
    w, scales = make_fp8_gate_up()
    w1, w1_scale = merge_scales(w, scales)
    input_scale = static_scale(torch.tensor([[0.5], [0.25]]))
    assert input_scale.tolist() == [0.5]
    w2 = torch.ones(2, 16, 4).to(FP8)
    weights = ExpertWeights(
        w1,
        w2,
        w1_scale=w1_scale,
        w2_scale=torch.ones(2),
        a1_scale=input_scale,
        a2_scale=input_scale,
    )
    problem = Problem(1, 16, 4, 2, 1, quant="fp8_w8a8_tensor:static=true")
    check_weights_quantized(weights, problem, CPU)
    row_scale = channel_scale(torch.ones(2, 8, 1, dtype=torch.bfloat16))
    w2_scale = channel_scale(torch.ones(2, 16))
    channel_weights = replace(
        weights, w1_scale=row_scale, w2_scale=w2_scale, a1_scale=None, a2_scale=None
    )
    check_weights_quantized(channel_weights, replace(problem, quant="fp8_w8a8_channel"), CPU)


def test_invalid_scales_are_refused() -> None:
    w, scales = make_fp8_gate_up()
    with pytest.raises(DtypeError, match="w: got bfloat16, need float8_e4m3fn"):
        merge_scales(w.bfloat16(), scales)
    with pytest.raises(ShapeError, match=r"w: got \(8, 16\), need \(e, N, K\)"):
        merge_scales(w[0], scales)
    for shape in ((2,), (3, 2), (2, 3), (2, 0), (2, 2, 1)):
        with pytest.raises(ShapeError, match=r"scale: got .* S dividing N = 8"):
            merge_scales(w, torch.ones(shape))
    for value in (0.0, -1.0, float("nan"), float("inf")):
        invalid_scales = torch.tensor([[1.0, 1.0], [1.0, value]])
        for make in (lambda s: merge_scales(w, s), channel_scale, static_scale):
            with pytest.raises(WeightsError, match=f"got {value}, need finite numbers above 0"):
                make(invalid_scales)
    with pytest.raises(DtypeError, match="scale: got int32, need a floating dtype"):
        merge_scales(w, torch.ones(2, 2, dtype=torch.int32))
    with pytest.raises(ShapeError, match=r"scale: got \(2, 8, 2\), need \(e, N, 1\) or"):
        channel_scale(torch.ones(2, 8, 2))
    with pytest.raises(ShapeError, match="activation scales: got"):
        static_scale(torch.ones(0))


# mxfp4


def test_from_gpt_oss_decodes_known_blocks() -> None:
    """Row 0 has the values 0.5 and 1 (codes 1 and 2) with scale 2, and the values 6 and -6 (codes 7
    and 15) with scale 1/2.
    """
    blocks = torch.zeros(1, 2, 2, 16, dtype=torch.uint8)
    blocks[0, 0, 0, 0], blocks[0, 0, 1, 15] = 0x21, 0xF7
    scales = torch.tensor([[[128, 126], [127, 127]]], dtype=torch.uint8)
    w, scale = from_gpt_oss(blocks, scales)
    assert w.shape == (1, 2, 32)
    assert w.data_ptr() == blocks.data_ptr()
    values = dequantize(w, scale, None, QuantScheme.parse("mxfp4_w4a16"))
    assert values[0, 0, :3].tolist() == [1.0, 2.0, 0.0]
    assert values[0, 0, 62:].tolist() == [3.0, -3.0]
    assert not values[0, 1].any()


def test_gpt_oss_weights_are_accepted() -> None:
    up = from_gpt_oss(torch.zeros(2, 64, 2, 16).byte(), torch.zeros(2, 64, 2).byte())
    down = from_gpt_oss(torch.zeros(2, 64, 1, 16).byte(), torch.zeros(2, 64, 1).byte())
    weights = ExpertWeights(up[0], down[0], w1_scale=up[1], w2_scale=down[1])
    problem = Problem(1, 64, 32, 2, 1, activation="swiglu_oai", quant="mxfp4_w4a16")
    check_weights_quantized(weights, problem, CPU)


def test_invalid_mxfp4_tensors_are_refused() -> None:
    blocks = torch.zeros(1, 2, 2, 16, dtype=torch.uint8)
    scales = torch.zeros(1, 2, 2, dtype=torch.uint8)
    with pytest.raises(DtypeError, match="blocks: got int8"):
        from_gpt_oss(blocks.to(torch.int8), scales)
    with pytest.raises(DtypeError, match="scales: got float32"):
        from_gpt_oss(blocks, scales.float())
    with pytest.raises(ShapeError, match=r"blocks: got \(1, 2, 2, 32\), need .*, 16\)"):
        from_gpt_oss(torch.cat([blocks, blocks], 3), scales)
    with pytest.raises(ShapeError, match=r"scales: got \(1, 2, 1\), need .* = \(1, 2, 2\)"):
        from_gpt_oss(blocks, scales[:, :, :1])
