"""Importing 4-bit GPTQ and AWQ tensors, which are packed here value by value; groups and shards."""

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

# The nibble in which AWQ stores each of eight columns. The importer has the inverse permutation.
AWQ_NIBBLE_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)


def pack_nibbles(nibbles: list[int]) -> int:
    """Return eight nibbles as a signed int32, the first one in the lowest bits."""
    value = sum(nibble << (4 * place) for place, nibble in enumerate(nibbles))
    return value - (1 << 32) if value >= 1 << 31 else value


def pack_gptq(values: torch.Tensor, zeros: torch.Tensor, less: int = 1) -> tuple[Any, Any]:
    """Pack values (N, K) and zeros (N, G), 0 to 15, into qweight (K / 8, N) and qzeros (G, N / 8).

    less: subtracted from each zero point.
    """
    (rows, depth), groups = values.shape, zeros.shape[1]
    v, z = values.tolist(), zeros.tolist()
    qweight = [
        [pack_nibbles([v[n][8 * block + i] for i in range(8)]) for n in range(rows)]
        for block in range(depth // 8)
    ]
    qzeros = [
        [pack_nibbles([z[8 * block + i][g] - less for i in range(8)]) for block in range(rows // 8)]
        for g in range(groups)
    ]
    return torch.tensor(qweight, dtype=torch.int32), torch.tensor(qzeros, dtype=torch.int32)


def pack_awq(values: torch.Tensor, zeros: torch.Tensor) -> tuple[Any, Any]:
    """Pack values (N, K) and zeros (N, G) into qweight (K, N / 8) and qzeros (G, N / 8)."""

    def packed(columns: list[int]) -> int:
        nibbles = [0] * 8
        for n, value in enumerate(columns):
            nibbles[AWQ_NIBBLE_OF_COLUMN[n]] = value
        return pack_nibbles(nibbles)

    def table(source: torch.Tensor) -> torch.Tensor:
        s = source.tolist()
        return torch.tensor(
            [
                [packed([s[8 * b + n][k] for n in range(8)]) for b in range(source.shape[0] // 8)]
                for k in range(source.shape[1])
            ],
            dtype=torch.int32,
        )

    return table(values), table(zeros)


def random_groups(
    rows: int = 16, depth: int = 64, group: int = 16, seed: int = 0, least_zero: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values (N, K) and zero points (N, G), 0 to 15, and scales (N, G)."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-depth // group)
    values = torch.randint(0, 16, (rows, depth), generator=generator)
    zeros = torch.randint(least_zero, 16, (rows, groups), generator=generator)
    return values, zeros, torch.rand(rows, groups, generator=generator) + 0.5


def dequantize_by_hand(
    values: torch.Tensor, zeros: torch.Tensor | None, scales: torch.Tensor, group: int
) -> torch.Tensor:
    """Compute (q - z) s, one value at a time."""
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


def dequantized(weights: GroupWeights) -> torch.Tensor:
    """Return the values (N, K) of the stored tensors."""
    zeros = None if weights.zero_point is None else weights.zero_point[None]
    scheme = QuantScheme.parse(weights.quant)
    return dequantize(weights.w[None], weights.scale[None], zeros, scheme)[0]


@pytest.mark.parametrize("group", [16, 32, 48, -1])
@pytest.mark.parametrize("kind", ["gptq", "gptq_v2", "awq"])
def test_imported_values_equal_the_packed_values(kind: str, group: int) -> None:
    wide = 64 if group == -1 else group
    values, zeros, scales = random_groups(group=wide, least_zero=int(kind == "gptq"))
    if kind == "awq":
        qweight, qzeros = pack_awq(values, zeros)
        made = from_awq(qweight, scales.T, qzeros, group=group)
    else:
        less = int(kind == "gptq")
        qweight, qzeros = pack_gptq(values, zeros, less)
        made = from_gptq(qweight, scales.T, qzeros, group=group, minus_one=bool(less))
    assert made.w.dtype == torch.uint8
    assert made.w.shape == (16, 32)
    assert made.scale.is_contiguous()
    assert made.zero_point is not None
    assert made.zero_point.shape == (8, -(-64 // wide))
    assert made.group == wide
    assert made.depth == 64
    assert made.quant == str(QuantScheme.parse(made.quant))
    torch.testing.assert_close(dequantized(made), dequantize_by_hand(values, zeros, scales, wide))


def test_from_gptq_decodes_known_words() -> None:
    """An int32 has k = 0 to 7 of a row, lowest nibble first; stored zero points are one less."""
    qweight = torch.tensor([[0x76543210] + [0] * 7, [0x0FEDCBA9] + [0] * 7], dtype=torch.int32)
    scales = torch.full((1, 8), 2.0)
    qzeros = torch.tensor([[0x76543214]], dtype=torch.int32)
    made = from_gptq(qweight, scales, qzeros, group=16)
    assert made.w[0].tolist() == [0x10, 0x32, 0x54, 0x76, 0xA9, 0xCB, 0xED, 0x0F]
    assert made.zero_point is not None
    assert made.zero_point[:, 0].tolist() == [0x25, 0x43, 0x65, 0x87]
    assert dequantized(made)[0, :4].tolist() == [-10.0, -8.0, -6.0, -4.0]


def test_from_awq_decodes_known_words() -> None:
    """Columns 0 to 7 are in nibbles 0, 4, 1, 5, 2, 6, 3, 7."""
    qweight = torch.tensor([[0x75316420], [0]], dtype=torch.int32)
    made = from_awq(qweight, torch.ones(1, 8), torch.tensor([[0x75316420]]).int(), group=2)
    assert made.w[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert made.zero_point is not None
    assert made.zero_point[:, 0].tolist() == [0x10, 0x32, 0x54, 0x76]


def test_stacked_experts_are_imported() -> None:
    each = [random_groups(seed=seed) for seed in range(3)]
    packed = [pack_gptq(v, z) for v, z, _ in each]
    made = from_gptq(
        torch.stack([q for q, _ in packed]),
        torch.stack([s.T for *_, s in each]),
        torch.stack([z for _, z in packed]),
        group=16,
    )
    assert made.w.shape == (3, 16, 32)
    assert made.zero_point is not None
    assert made.zero_point.shape == (3, 8, 4)
    for e, (v, z, s) in enumerate(each):
        one = GroupWeights(made.w[e], made.scale[e], made.zero_point[e], 16)
        torch.testing.assert_close(dequantized(one), dequantize_by_hand(v, z, s, 16))


def test_drop_zero_points_requires_symmetric_weights() -> None:
    values, zeros, scales = random_groups()
    for read, pack in ((from_gptq, pack_gptq), (from_awq, pack_awq)):
        qweight, qzeros = pack(values, torch.full_like(zeros, 8))
        made = drop_zero_points(read(qweight, scales.T, qzeros, group=16))
        assert made.zero_point is None
        assert made.quant == "int4_w4a16_group:group=16"
        torch.testing.assert_close(dequantized(made), dequantize_by_hand(values, None, scales, 16))
        bare = read(qweight, scales.T, None, group=16)
        assert torch.equal(dequantized(bare), dequantized(made))
        assert drop_zero_points(bare) is bare
        for low, high in ((7, 8), (8, 9)):  # two zero points that share a byte
            mixed = torch.full_like(zeros, 8)
            mixed[14, 0], mixed[15, 0] = low, high
            other = read(qweight, scales.T, pack(values, mixed)[1], group=16)
            with pytest.raises(WeightsError, match=r"zero_point: got a zero point of [79], need 8"):
                drop_zero_points(other)


def test_from_gptq_accepts_g_idx_in_order_only() -> None:
    values, zeros, scales = random_groups()
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
    values, zeros, scales = random_groups()
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
    fifteen = torch.full_like(qzeros, -1)
    with pytest.raises(WeightsError, match="a stored 15"):
        from_gptq(qweight, scales.T, fifteen, group=16)
    kept = from_gptq(qweight, scales.T, fifteen, group=16, minus_one=False)
    assert kept.zero_point is not None
    assert kept.zero_point.unique().tolist() == [0xFF]


# Groups and shards


def imported_example(
    depth: int = 256, group: int = 128, rows: int = 16
) -> tuple[GroupWeights, Any]:
    """Return random GPTQ weights as imported, and their values."""
    values, zeros, scales = random_groups(rows, depth, group)
    qweight, qzeros = pack_gptq(values, zeros)
    made = from_gptq(qweight, scales.T, qzeros, group=group)
    return made, dequantize_by_hand(values, zeros, scales, group)


@pytest.mark.parametrize("group", [128, 64, 32, 2])
def test_regroup_to_smaller_groups_keeps_values(group: int) -> None:
    made, values = imported_example()
    smaller = regroup(made, group)
    assert smaller.scale.shape == (16, 256 // group)
    assert torch.equal(dequantized(smaller), dequantized(made))
    torch.testing.assert_close(dequantized(smaller), values)


@pytest.mark.parametrize("group", [256, 128, 96, 300, 10])
def test_regroup_of_a_whole_row_group_accepts_any_size(group: int) -> None:
    made, values = imported_example(group=256)
    assert torch.equal(dequantized(regroup(made, group)), dequantized(made))
    torch.testing.assert_close(dequantized(regroup(made, group)), values)


def test_partial_last_group_keeps_values() -> None:
    made, values = imported_example(depth=80, group=64)
    assert made.scale.shape == (16, 2)
    assert torch.equal(dequantized(regroup(made, 32)), dequantized(made))
    torch.testing.assert_close(dequantized(made), values)


@pytest.mark.parametrize("group", [0, 3, 96, 256])
def test_regroup_refuses_other_sizes(group: int) -> None:
    with pytest.raises(ConfigurationError, match="an even divisor of 128"):
        regroup(imported_example()[0], group)


def test_fit_group_returns_the_largest_divisor() -> None:
    assert [fit_group(128, columns) for columns in (256, 192, 96, 32)] == [128, 64, 32, 32]
    for columns in (48, 100):
        with pytest.raises(
            ConfigurationError, match=f"group: got 128, need .* {columns}, at least 32"
        ):
            fit_group(128, columns)


@pytest.mark.parametrize(
    ("depth", "group", "world", "left"),
    [(256, 128, 2, 128), (256, 128, 4, 64), (256, 128, 8, 32), (384, 128, 2, 64), (96, 96, 2, 48)],
)
def test_shard_columns_returns_slices(depth: int, group: int, world: int, left: int) -> None:
    made, values = imported_example(depth, group)
    for rank in range(world):
        shard = shard_columns(made, rank, world)
        share = depth // world
        assert shard.group == left
        assert shard.w.is_contiguous()
        assert shard.scale.shape == (16, -(-share // left))
        part = values[:, rank * share : (rank + 1) * share]
        torch.testing.assert_close(dequantized(shard), part)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_shard_rows_returns_slices(world: int) -> None:
    made, values = imported_example()
    for rank in range(world):
        shard = shard_rows(made, rank, world)
        share = 16 // world
        torch.testing.assert_close(dequantized(shard), values[rank * share : (rank + 1) * share])


def test_invalid_shards_are_refused() -> None:
    made, _ = imported_example()
    with pytest.raises(ConfigurationError, match="rank: got 2"):
        shard_columns(made, 2, 2)
    with pytest.raises(ConfigurationError, match="columns: got 256, need an even number for each"):
        shard_columns(made, 0, 3)
    with pytest.raises(ConfigurationError, match="rows: got 16, need"):
        shard_rows(made, 0, 16)
    with pytest.raises(ConfigurationError, match="group: got 128"):
        shard_columns(made, 0, 16)


def test_imported_weights_are_accepted_as_a_layer() -> None:
    """TP shards of w2 need groups of 32, so w1 is regrouped too; then groups of whole rows."""
    for group, left in ((64, 32), (-1, 128)):
        wide = 64 if group == 64 else None
        w1 = random_groups(32, 128, wide or 128)
        w2 = random_groups(128, 64, wide or 64)
        up, down = (
            from_gptq(pack_gptq(v, z)[0][None], s.T[None], pack_gptq(v, z)[1][None], group=group)
            for v, z, s in (w1, w2)
        )
        down = shard_columns(down, 1, 2)
        one = down.group if group == 64 else 128
        up, down = regroup(up, one), regroup(down, one)
        assert up.quant == down.quant == f"int4_w4a16_group:group={left},zero_points=true"
        weights = ExpertWeights(
            up.w,
            down.w,
            w1_scale=up.scale,
            w2_scale=down.scale,
            w1_zero_point=up.zero_point,
            w2_zero_point=down.zero_point,
        )
        made = Problem(2, 128, 32, 1, 1, activation="relu2", quant=up.quant)
        check_weights_quantized(weights, made, torch.device("cpu"))


@pytest.mark.parametrize("value", [None, 3, "words", [[1]], 2.5])
@pytest.mark.parametrize("name", ["qweight", "scales", "group", "bits"])
def test_arguments_of_wrong_types_are_named(name: str, value: object) -> None:
    given: dict[str, Any] = {
        "qweight": torch.zeros(4, 8, dtype=torch.int32),
        "scales": torch.ones(1, 8),
        "qzeros": None,
        "group": 32,
        "bits": 4,
    }
    from_gptq(**given)
    with pytest.raises(InputError) as caught:
        from_gptq(**given | {name: value})
    assert caught.value.what == name
