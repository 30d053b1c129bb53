"""The layout of scales written by quantizing operations, and the tiles of large layers."""

from dataclasses import replace

import pytest
import torch
from ops_fixtures import DEVICE, make_path_fixture, random_normal

from modular_kernel.errors import ShapeError
from modular_kernel.ops import activation, quantize, quantize_tiles
from modular_kernel.ops.quantize import (
    QuantizedRows,
    activation_and_quantize,
    quantize_rows,
    quantize_specs,
    take_quantized,
)
from modular_kernel.ops.valid_rows import BatchedRows
from modular_kernel.spec.problem import ActivationSpec
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.workspace import Workspace

path = make_path_fixture(quantize, activation)


def zero_buffers(
    scheme: QuantScheme, rows: int, columns: int, segments: int, along_rows: bool
) -> QuantizedRows:
    specs = quantize_specs("a", scheme, rows, columns, segments=segments)
    workspace, shape = Workspace(specs, torch.device(DEVICE)), (rows, columns)
    out = take_quantized(workspace, "a", scheme, shape, segments=segments, along_rows=along_rows)
    out.q_RK.view(torch.uint8).zero_()
    out.scale.zero_()
    return out


@pytest.mark.parametrize("min_streamed_values", [1 << 23, 0])
@pytest.mark.parametrize("columns", [32, 96, 128, 104])
@pytest.mark.parametrize("activation_kind", ["none", "silu"])
@pytest.mark.usefixtures("path")
def test_column_major_scales_of_streamed_tiles_equal_row_major_scales(
    activation_kind: str, columns: int, min_streamed_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results equal those with row-major scales and other tiles, bit for bit.
    Rows after a count are NaN. A group has 32 columns; the last group of 104 columns is partial.
    """
    monkeypatch.setattr(quantize_tiles, "_STREAM_COLUMNS", 128)
    monkeypatch.setattr(quantize_tiles, "_STREAM_PROGRAMS", 3)
    monkeypatch.setattr(quantize_tiles, "_VALUES_PER_TILE", 256)
    scheme = QuantScheme.parse("fp8_w8a8_block:block=8x32")
    spec = ActivationSpec("silu")
    counts = [7, 0, 11] if min_streamed_values else [25]
    segments, capacity = len(counts), 33 // len(counts)
    counts_e = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    valid = [i * capacity + c for i, count in enumerate(counts) for c in range(count)]
    x = torch.full(
        (33, columns * (1 if activation_kind == "none" else 2)), torch.nan, dtype=torch.bfloat16
    )
    x[valid] = random_normal(len(valid), x.shape[1], dtype=torch.bfloat16).cpu()
    x = x.to(DEVICE)
    outputs = []
    for along_rows in (False, True):
        out = zero_buffers(scheme, 33, columns, segments, along_rows)
        with monkeypatch.context() as patch:
            patch.setattr(
                quantize_tiles,
                "_MIN_STREAMED_VALUES",
                min_streamed_values if along_rows else 1 << 23,
            )
            if activation_kind == "none":
                quantize_rows(x, scheme, out=out, valid_rows=BatchedRows(counts_e))
            else:
                activation_and_quantize(x, spec, scheme, out=out, valid_rows=BatchedRows(counts_e))
        outputs.append(out)
    row_major, column_major = outputs
    assert torch.equal(column_major.q_RK.view(torch.uint8), row_major.q_RK.view(torch.uint8))
    scales, groups = column_major.scale_of_rows, -(-columns // 32)
    assert scales.shape == ((3, 11, groups) if min_streamed_values else (33, groups))
    assert scales.stride()[-2:] == (1, capacity)
    assert torch.equal(scales.reshape(33, groups), row_major.scale_of_rows)


@pytest.mark.parametrize("group", [1, 2, 16, 48, 128, 1024, 1536, 2048])
@pytest.mark.parametrize("groups", [1, 6, 2048])
def test_large_inputs_are_streamed(group: int, groups: int) -> None:
    """Inputs of at least 2^23 values in one segment are streamed, if a row has several groups, and
    the number of columns of a group is a power of two, at most 1024.
    """
    columns = group * groups
    rows = -(-(1 << 23) // columns)
    for capacity, is_large in ((rows, True), (rows - 1, False)):
        base = quantize_tiles.tile_rows(1, max(1, capacity), group, max(1, capacity))
        tiles = quantize_tiles.tile_groups(base, columns, group)
        is_streamed = is_large and groups > 1 and group in (1, 2, 16, 128, 1024)
        assert tiles.stages == (3 if is_streamed else 1)
        for size in (tiles.block_r, tiles.block_c, tiles.block_g):
            assert size & (size - 1) == 0, tiles
        assert groups % tiles.block_g == 0
        assert not is_streamed or tiles.block_c == group
        assert is_streamed or tiles is base
    segments = quantize_tiles.tile_rows(2, rows, group, rows)
    assert quantize_tiles.tile_groups(segments, columns, group) is segments


def test_other_segments_of_scales_than_of_rows_are_refused() -> None:
    scheme, counts = QuantScheme.parse("fp8_w8a8_channel"), torch.ones(2, dtype=torch.int32)
    out = zero_buffers(scheme, 6, 8, 1, True)
    with pytest.raises(ShapeError, match="segments of scales: got 1, need 2"):
        quantize_rows(
            random_normal(6, 8), scheme, out=out, valid_rows=BatchedRows(counts.to(DEVICE))
        )
    wrong_shape = replace(out, scale=out.scale.view(2, 3, 1))
    with pytest.raises(ShapeError, match=r"need \(2, 1, 3\)"):
        quantize_rows(random_normal(6, 8), scheme, out=wrong_shape)


def test_tiles_of_large_layers_fill_an_h200() -> None:
    """A tile contains whole groups, and an H200 can run all programs at the same time."""
    for rows, columns, tiles_per_row in ((9216, 14336, 14), (135168, 2048, 2), (49152, 768, 3)):
        tiles = tile_large_layer(rows, columns)
        assert tiles.block_r * tiles.block_g * tiles.block_c == 2048
        assert columns == tiles_per_row * tiles.block_g * tiles.block_c
        assert 1000 < tiles.programs_per_segment * tiles_per_row <= 1056
        assert tiles.num_warps == 4
    few_rows = tile_large_layer(16, 7168)
    assert (few_rows.block_r, few_rows.block_g, few_rows.stages) == (16, 1, 1)
    assert tile_large_layer(49152, 768, segments=2).stages == 1
    odd_columns = tile_large_layer(4096, 2880)
    assert (odd_columns.block_r, odd_columns.block_g, odd_columns.stages) == (16, 1, 3)


def tile_large_layer(rows: int, columns: int, segments: int = 1) -> quantize_tiles.TileConfig:
    base = quantize_tiles.tile_rows(segments, rows, 128, 8192)
    return quantize_tiles.tile_groups(base, columns, 128)
