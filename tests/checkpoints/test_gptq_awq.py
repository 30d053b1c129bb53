"""Imports of 4-bit GPTQ and AWQ tensors, which these tests pack value by value, and changes of the
group size and slices of imported weights.
"""

from typing import Any

import pytest
import torch

from modular_kernel.checkpoints import (
    GroupWeights,
    drop_zero_points,
    fit_group,
    from_awq,
    from_gptq,
    regroup,
    shard_columns,
    shard_rows,
)
from modular_kernel.errors import (
    ConfigurationError,
    DtypeError,
    InputError,
    ShapeError,
    WeightsError,
)
from modular_kernel.quant.quantized_weights import check_weights_quantized, dequantize
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import ExpertWeights

# The nibble in which AWQ stores each of eight columns. The importer uses the inverse permutation.
AWQ_NIBBLE_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)


def pack_nibbles(nibbles: list[int]) -> int:
    """Return eight nibbles as a signed int32, with the first nibble in the lowest bits."""
    word = sum(nibble << (4 * index) for index, nibble in enumerate(nibbles))
    return word - (1 << 32) if word >= 1 << 31 else word


def pack_gptq(values: torch.Tensor, zeros: torch.Tensor, offset: int = 1) -> tuple[Any, Any]:
    """Pack values (N, K) and zeros (N, G), both from 0 to 15.

    offset: subtracted from each zero point.

    Returns qweight (K / 8, N) and qzeros (G, N / 8).
    """
    (rows, depth), groups = values.shape, zeros.shape[1]
    values_NK, zeros_NG = values.tolist(), zeros.tolist()
    qweight = [
        [pack_nibbles(values_NK[n][k : k + 8]) for n in range(rows)] for k in range(0, depth, 8)
    ]
    qzeros = [
        [pack_nibbles([zeros_NG[n + i][g] - offset for i in range(8)]) for n in range(0, rows, 8)]
        for g in range(groups)
    ]
    return torch.tensor(qweight, dtype=torch.int32), torch.tensor(qzeros, dtype=torch.int32)


def pack_awq(values: torch.Tensor, zeros: torch.Tensor) -> tuple[Any, Any]:
    """Pack values (N, K) and zeros (N, G) into qweight (K, N / 8) and qzeros (G, N / 8)."""

    def pack_word(values: list[int]) -> int:
        nibbles = [0] * 8
        for column, value in enumerate(values):
            nibbles[AWQ_NIBBLE_OF_COLUMN[column]] = value
        return pack_nibbles(nibbles)

    def pack_matrix(matrix: torch.Tensor) -> torch.Tensor:
        columns = matrix.T.tolist()
        return torch.tensor(
            [
                [pack_word(column[n : n + 8]) for n in range(0, len(column), 8)]
                for column in columns
            ],
            dtype=torch.int32,
        )

    return pack_matrix(values), pack_matrix(zeros)


def make_random_groups(
    rows: int = 16, depth: int = 64, group: int = 16, seed: int = 0, min_zero: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values (N, K) and zero points (N, G), both from 0 to 15, and scales (N, G)."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-depth // group)
    values = torch.randint(0, 16, (rows, depth), generator=generator)
    zeros = torch.randint(min_zero, 16, (rows, groups), generator=generator)
    return values, zeros, torch.rand(rows, groups, generator=generator) + 0.5


def dequantize_by_hand(
    values: torch.Tensor, zeros: torch.Tensor | None, scales: torch.Tensor, group: int
) -> torch.Tensor:
    """Compute (q - z) * s, one value at a time."""
    rows, depth = values.shape
    return torch.tensor(
        [
            [
                (int(values[n, k]) - (8 if zeros is None else int(zeros[n, k // group])))
                * float(scales[n, k // group])
                for k in range(depth)
            ]
            for n in range(rows)
        ]
    )


def dequantize_imported(weights: GroupWeights) -> torch.Tensor:
    """Return the values (N, K) of the stored tensors."""
    zeros = None if weights.zero_point is None else weights.zero_point[None]
    scheme = QuantScheme.parse(weights.quant)
    return dequantize(weights.w[None], weights.scale[None], zeros, scheme)[0]


@pytest.mark.parametrize("group", [16, 32, 48, -1])
@pytest.mark.parametrize("kind", ["gptq", "gptq_v2", "awq"])
def test_imported_values_equal_the_packed_values(kind: str, group: int) -> None:
    group_size = 64 if group == -1 else group
    values, zeros, scales = make_random_groups(group=group_size, min_zero=int(kind == "gptq"))
    if kind == "awq":
        qweight, qzeros = pack_awq(values, zeros)
        imported = from_awq(qweight, scales.T, qzeros, group=group)
    else:
        offset = int(kind == "gptq")
        qweight, qzeros = pack_gptq(values, zeros, offset)
        imported = from_gptq(qweight, scales.T, qzeros, group=group, minus_one=bool(offset))
    assert imported.w.dtype == torch.uint8
    assert imported.w.shape == (16, 32)
    assert imported.scale.is_contiguous()
    assert imported.zero_point is not None
    assert imported.zero_point.shape == (8, -(-64 // group_size))
    assert imported.group == group_size
    assert imported.depth == 64
    assert imported.quant == str(QuantScheme.parse(imported.quant))
    torch.testing.assert_close(
        dequantize_imported(imported), dequantize_by_hand(values, zeros, scales, group_size)
    )


def test_from_gptq_decodes_known_words() -> None:
    """An int32 word has eight values of a row, the first in the lowest nibble. Stored zero points
    are decreased by one.
    """
    qweight = torch.tensor([[0x76543210] + [0] * 7, [0x0FEDCBA9] + [0] * 7], dtype=torch.int32)
    scales = torch.full((1, 8), 2.0)
    qzeros = torch.tensor([[0x76543214]], dtype=torch.int32)
    imported = from_gptq(qweight, scales, qzeros, group=16)
    assert imported.w[0].tolist() == [0x10, 0x32, 0x54, 0x76, 0xA9, 0xCB, 0xED, 0x0F]
    assert imported.zero_point is not None
    assert imported.zero_point[:, 0].tolist() == [0x25, 0x43, 0x65, 0x87]
    assert dequantize_imported(imported)[0, :4].tolist() == [-10.0, -8.0, -6.0, -4.0]


def test_from_awq_decodes_known_words() -> None:
    """Columns 0 to 7 of a word are in nibbles 0, 4, 1, 5, 2, 6, 3, 7."""
    qweight = torch.tensor([[0x75316420], [0]], dtype=torch.int32)
    imported = from_awq(qweight, torch.ones(1, 8), torch.tensor([[0x75316420]]).int(), group=2)
    assert imported.w[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert imported.zero_point is not None
    assert imported.zero_point[:, 0].tolist() == [0x10, 0x32, 0x54, 0x76]


def test_stacked_experts_are_imported() -> None:
    experts = [make_random_groups(seed=seed) for seed in range(3)]
    packed = [pack_gptq(values, zeros) for values, zeros, _ in experts]
    imported = from_gptq(
        torch.stack([qweight for qweight, _ in packed]),
        torch.stack([scales.T for *_, scales in experts]),
        torch.stack([qzeros for _, qzeros in packed]),
        group=16,
    )
    assert imported.w.shape == (3, 16, 32)
    assert imported.zero_point is not None
    assert imported.zero_point.shape == (3, 8, 4)
    for e, (values, zeros, scales) in enumerate(experts):
        expert_weights = GroupWeights(imported.w[e], imported.scale[e], imported.zero_point[e], 16)
        torch.testing.assert_close(
            dequantize_imported(expert_weights), dequantize_by_hand(values, zeros, scales, 16)
        )


def test_drop_zero_points_requires_symmetric_weights() -> None:
    values, zeros, scales = make_random_groups()
    for import_weights, pack in ((from_gptq, pack_gptq), (from_awq, pack_awq)):
        qweight, qzeros = pack(values, torch.full_like(zeros, 8))
        imported = drop_zero_points(import_weights(qweight, scales.T, qzeros, group=16))
        assert imported.zero_point is None
        assert imported.quant == "int4_w4a16_group:group=16"
        torch.testing.assert_close(
            dequantize_imported(imported), dequantize_by_hand(values, None, scales, 16)
        )
        without_zero_points = import_weights(qweight, scales.T, None, group=16)
        assert torch.equal(dequantize_imported(without_zero_points), dequantize_imported(imported))
        assert drop_zero_points(without_zero_points) is without_zero_points
        for low, high in ((7, 8), (8, 9)):  # two zero points that share a byte
            mixed_zeros = torch.full_like(zeros, 8)
            mixed_zeros[14, 0], mixed_zeros[15, 0] = low, high
            asymmetric = import_weights(qweight, scales.T, pack(values, mixed_zeros)[1], group=16)
            with pytest.raises(WeightsError, match=r"zero_point: got a zero point of [79], need 8"):
                drop_zero_points(asymmetric)


def test_from_gptq_accepts_only_g_idx_in_order() -> None:
    values, zeros, scales = make_random_groups()
    qweight, qzeros = pack_gptq(values, zeros)
    in_order = torch.arange(64) // 16
    from_gptq(qweight, scales.T, qzeros, group=16, g_idx=in_order.int())
    with pytest.raises(WeightsError, match="act-order"):
        from_gptq(qweight, scales.T, qzeros, group=16, g_idx=in_order.flip(0))
    with pytest.raises(WeightsError, match="g_idx"):
        from_gptq(qweight, scales.T, qzeros, group=16, g_idx=in_order[:32])
    for dtype in (torch.float8_e4m3fn, torch.float32, torch.bool):
        with pytest.raises(DtypeError, match=r"g_idx: got .*, need int32 or int64"):
            from_gptq(qweight, scales.T, qzeros, group=16, g_idx=in_order.to(dtype))


def test_invalid_tensors_are_refused() -> None:
    values, zeros, scales = make_random_groups()
    qweight, qzeros = pack_gptq(values, zeros)
    with pytest.raises(DtypeError, match="qweight: got int64, need int32"):
        from_gptq(qweight.long(), scales.T, qzeros, group=16)
    with pytest.raises(DtypeError, match="qzeros: got uint8"):
        from_gptq(qweight, scales.T, qzeros.to(torch.uint8), group=16)
    with pytest.raises(DtypeError, match="scales: got int32"):
        from_gptq(qweight, scales.T.int(), qzeros, group=16)
    with pytest.raises(ShapeError, match=r"scales: got \(16, 4\), need .* = \(4, 16\)"):
        from_gptq(qweight, scales, qzeros, group=16)
    with pytest.raises(ShapeError, match="scales"):
        from_gptq(qweight, scales.T, qzeros, group=32)
    with pytest.raises(ShapeError, match="qzeros"):
        from_awq(pack_awq(values, zeros)[0], scales.T, qzeros[:2], group=16)
    with pytest.raises(ShapeError, match="qweight"):
        from_awq(qweight.flatten(), scales.T, qzeros, group=16)
    for group in (0, 15, -2):
        with pytest.raises(ConfigurationError, match="group: got"):
            from_gptq(qweight, scales.T, qzeros, group=group)
    all_fifteen = torch.full_like(qzeros, -1)
    with pytest.raises(WeightsError, match="a stored 15"):
        from_gptq(qweight, scales.T, all_fifteen, group=16)
    imported = from_gptq(qweight, scales.T, all_fifteen, group=16, minus_one=False)
    assert imported.zero_point is not None
    assert imported.zero_point.unique().tolist() == [0xFF]


# Groups and shards


def import_random_weights(
    depth: int = 256, group: int = 128, rows: int = 16
) -> tuple[GroupWeights, Any]:
    """Return imported random GPTQ weights and their values."""
    values, zeros, scales = make_random_groups(rows, depth, group)
    qweight, qzeros = pack_gptq(values, zeros)
    imported = from_gptq(qweight, scales.T, qzeros, group=group)
    return imported, dequantize_by_hand(values, zeros, scales, group)


@pytest.mark.parametrize("group", [128, 64, 32, 2])
def test_regroup_to_smaller_groups_keeps_values(group: int) -> None:
    imported, values = import_random_weights()
    smaller = regroup(imported, group)
    assert smaller.scale.shape == (16, 256 // group)
    assert torch.equal(dequantize_imported(smaller), dequantize_imported(imported))
    torch.testing.assert_close(dequantize_imported(smaller), values)


@pytest.mark.parametrize("group", [256, 128, 96, 300, 10])
def test_regroup_of_a_whole_row_group_accepts_any_size(group: int) -> None:
    imported, values = import_random_weights(group=256)
    assert torch.equal(dequantize_imported(regroup(imported, group)), dequantize_imported(imported))
    torch.testing.assert_close(dequantize_imported(regroup(imported, group)), values)


def test_partial_last_group_keeps_values() -> None:
    imported, values = import_random_weights(depth=80, group=64)
    assert imported.scale.shape == (16, 2)
    assert torch.equal(dequantize_imported(regroup(imported, 32)), dequantize_imported(imported))
    torch.testing.assert_close(dequantize_imported(imported), values)


@pytest.mark.parametrize("group", [0, 3, 96, 256])
def test_regroup_refuses_other_sizes(group: int) -> None:
    with pytest.raises(ConfigurationError, match="an even divisor of 128"):
        regroup(import_random_weights()[0], group)


def test_fit_group_returns_the_largest_divisor() -> None:
    assert [fit_group(128, columns) for columns in (256, 192, 96, 32)] == [128, 64, 32, 32]
    for columns in (48, 100):
        with pytest.raises(
            ConfigurationError, match=f"group: got 128, need .* {columns}, at least 32"
        ):
            fit_group(128, columns)


@pytest.mark.parametrize(
    ("depth", "group", "world", "shard_group"),
    [(256, 128, 2, 128), (256, 128, 4, 64), (256, 128, 8, 32), (384, 128, 2, 64), (96, 96, 2, 48)],
)
def test_shard_columns_returns_slices(depth: int, group: int, world: int, shard_group: int) -> None:
    imported, values = import_random_weights(depth, group)
    for rank in range(world):
        shard = shard_columns(imported, rank, world)
        width = depth // world
        assert shard.group == shard_group
        assert shard.w.is_contiguous()
        assert shard.scale.shape == (16, -(-width // shard_group))
        expected = values[:, rank * width : (rank + 1) * width]
        torch.testing.assert_close(dequantize_imported(shard), expected)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_shard_rows_returns_slices(world: int) -> None:
    imported, values = import_random_weights()
    for rank in range(world):
        shard = shard_rows(imported, rank, world)
        share = 16 // world
        torch.testing.assert_close(
            dequantize_imported(shard), values[rank * share : (rank + 1) * share]
        )


def test_invalid_shards_are_refused() -> None:
    imported, _ = import_random_weights()
    with pytest.raises(ConfigurationError, match="rank: got 2"):
        shard_columns(imported, 2, 2)
    with pytest.raises(ConfigurationError, match="columns: got 256, need an even number for each"):
        shard_columns(imported, 0, 3)
    with pytest.raises(ConfigurationError, match="rows: got 16, need"):
        shard_rows(imported, 0, 16)
    with pytest.raises(ConfigurationError, match="group: got 128"):
        shard_columns(imported, 0, 16)


def test_imported_weights_are_valid_layer_weights() -> None:
    """TP shards of w2 need groups of 32, so w1 is regrouped, too. The second case has groups of
    whole rows.
    """
    for group, shard_group in ((64, 32), (-1, 128)):
        group_size = 64 if group == 64 else None
        w1 = make_random_groups(32, 128, group_size or 128)
        w2 = make_random_groups(128, 64, group_size or 64)
        up, down = (
            from_gptq(pack_gptq(v, z)[0][None], s.T[None], pack_gptq(v, z)[1][None], group=group)
            for v, z, s in (w1, w2)
        )
        down = shard_columns(down, 1, 2)
        group_size = down.group if group == 64 else 128
        up, down = regroup(up, group_size), regroup(down, group_size)
        assert up.quant == down.quant == f"int4_w4a16_group:group={shard_group},zero_points=true"
        weights = ExpertWeights(
            up.w,
            down.w,
            w1_scale=up.scale,
            w2_scale=down.scale,
            w1_zero_point=up.zero_point,
            w2_zero_point=down.zero_point,
        )
        problem = Problem(2, 128, 32, 1, 1, activation="relu2", quant=up.quant)
        check_weights_quantized(weights, problem, torch.device("cpu"))


@pytest.mark.parametrize("value", [None, 3, "words", [[1]], 2.5])
@pytest.mark.parametrize("name", ["qweight", "scales", "group", "bits"])
def test_arguments_of_wrong_types_are_named(name: str, value: object) -> None:
    arguments: dict[str, Any] = {
        "qweight": torch.zeros(4, 8, dtype=torch.int32),
        "scales": torch.ones(1, 8),
        "qzeros": None,
        "group": 32,
        "bits": 4,
    }
    from_gptq(**arguments)
    with pytest.raises(InputError) as caught:
        from_gptq(**arguments | {name: value})
    assert caught.value.what == name
