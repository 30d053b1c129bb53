"""Kernels that quantize rows to nvfp4, tile by tile, equal quant.nvfp4 bit for bit."""

import pytest
import torch
from ops_fixtures import DEVICE, make_path_fixture, random_normal

from modular_kernel.errors import DtypeError, LayoutError, ShapeError
from modular_kernel.ops import fp4_rows
from modular_kernel.ops.activation import gated_activation_ref
from modular_kernel.ops.fp4_rows import (
    Fp4Rows,
    batched_tile_specs,
    fp4_specs,
    list_tiles,
    make_batched_tiles,
    quantize_tiles,
    tile_scales,
    tiled_scale_spec,
)
from modular_kernel.quant import nvfp4
from modular_kernel.quant.scale_layout import from_tiles, to_tiles
from modular_kernel.quant.scale_tiles import unpack_pairs
from modular_kernel.spec.problem import ActivationSpec
from modular_kernel.workspace import Workspace

path = make_path_fixture(fp4_rows)

# Three experts have 130, 0 and 5 rows, in three tiles. The tests allocate memory for four tiles.
ROWS, TILES = 135, [(0, 0, 130), (0, 128, 130), (2, 130, 135)]
SCALES = (0.011, 1.0, 0.37)


def make_tiles_tensor(tiles: list[tuple[int, int, int]], capacity: int) -> torch.Tensor:
    """Return the tensor that kernels read, with (expert, first row, end) of each tile."""
    out = torch.full((3 * capacity + 1,), 0x3F3F3F3F, dtype=torch.int32)
    out[: 3 * capacity].view(3, -1)[:, : len(tiles)] = torch.tensor(tiles, dtype=torch.int32).T
    out[-1] = len(tiles)
    return out.to(DEVICE)


def allocate_rows(rows: int, columns: int, tiles: int) -> Fp4Rows:
    specs = fp4_specs("x", rows, columns, tiles).values()
    return Fp4Rows(*(torch.full(s.shape, 0x55, dtype=s.dtype, device=DEVICE) for s in specs))


def assert_rows(out: Fp4Rows, values: torch.Tensor, scale_e: torch.Tensor) -> None:
    """Assert that the rows of all tiles are the quantized `values`, and nothing else is written."""
    groups = values.shape[1] // 16
    for tile, (expert, first, end) in enumerate(TILES):
        rows = slice(first, min(first + 128, end))
        codes, scale = nvfp4.quantize(values[rows], 1 / scale_e[expert])
        assert torch.equal(unpack_pairs(out.q_RK[rows], 1), codes)
        assert torch.equal(out.scale[tile], to_tiles(scale)[0])
        tile_scale = from_tiles(out.scale[tile, None], 128, groups)
        assert not tile_scale[rows.stop - first :].any()
    assert (out.scale[len(TILES) :] == 0x55).all()
    assert (out.q_RK[TILES[-1][2] :] == 0x55).all()


def test_representable_values_are_preserved(path: str) -> None:
    scale_e = torch.ones(3, device=DEVICE)
    x = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6], device=DEVICE).repeat(ROWS, 4)
    x[:, 16:] *= -8
    out = allocate_rows(ROWS, 32, 4)
    quantize_tiles(x.bfloat16(), make_tiles_tensor(TILES, 4), scale_e, out=out)
    scale = from_tiles(out.scale[:1], 128, 2).view(torch.float8_e4m3fn)
    codes, global_scale = unpack_pairs(out.q_RK[:128], 1), torch.ones(1, device=DEVICE)
    assert torch.equal(nvfp4.dequantize(codes, scale, global_scale), x[:128])


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("columns", [16, 240, 256, 400, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_equal_the_reference(columns: int, dtype: torch.dtype) -> None:
    scale_e = torch.tensor(SCALES, device=DEVICE)
    x = random_normal(ROWS + 3, columns, dtype=dtype)
    x[3, :16] = 0
    x[4, :16] = 3e4  # exceeds the largest scale
    x[5, :16] *= 1e-4  # so that the scale is zero or the smallest subnormal
    out = allocate_rows(ROWS + 3, columns, 4)
    quantize_tiles(x, make_tiles_tensor(TILES, 4), scale_e, out=out)
    assert_rows(out, x, scale_e)


@pytest.mark.usefixtures("path")
def test_ties_round_to_even() -> None:
    scale_e = torch.ones(3, device=DEVICE)
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0], device=DEVICE).repeat(ROWS, 2)
    out = allocate_rows(ROWS, 16, 4)
    quantize_tiles(x, make_tiles_tensor(TILES, 4), scale_e, out=out)
    codes = unpack_pairs(out.q_RK[:1], 1)[0, :8]
    assert codes.tolist() == [0, 2, 2, 4, 4, 6, 6, 7]


@pytest.mark.usefixtures("path")
def test_scales_between_two_codes_round_to_even() -> None:
    """17/16 and 19/16 are ties, and so are 0.5, 1.5 and 2.5 times the smallest scale, 2**-9."""
    scale_e = torch.ones(3, device=DEVICE)
    exact_scales = torch.tensor([17 / 16, 19 / 16, 0.5 / 512, 1.5 / 512, 2.5 / 512], device=DEVICE)
    x = (exact_scales * 6).repeat_interleave(16).repeat(ROWS, 1)
    out = allocate_rows(ROWS, 80, 4)
    quantize_tiles(x, make_tiles_tensor(TILES, 4), scale_e, out=out)
    assert from_tiles(out.scale[:1], 128, 5)[0].tolist() == [0x38, 0x3A, 0, 2, 2]


@pytest.mark.usefixtures("path")
def test_nonfinite_values_affect_only_their_group() -> None:
    scale_e = torch.ones(3, device=DEVICE)
    x = random_normal(ROWS, 64, dtype=torch.float32)
    x[0, 3], x[1, 17], x[2, 40] = torch.nan, torch.inf, -torch.inf
    out = allocate_rows(ROWS, 64, 4)
    quantize_tiles(x, make_tiles_tensor(TILES, 4), scale_e, out=out)
    assert_rows(out, x, scale_e)
    scale = from_tiles(out.scale[:1], 128, 4).view(torch.float8_e4m3fn).float()
    assert scale.isnan().nonzero().tolist() == [[0, 0]]


@pytest.mark.usefixtures("path")
def test_scales_of_every_magnitude_round_correctly() -> None:
    """Scales cover the whole range of e4m3, including subnormals."""
    scale_e = torch.ones(3, device=DEVICE)
    sizes = torch.logspace(-12, 3.5, ROWS * 8, base=10.0, device=DEVICE).view(ROWS, 8, 1)
    x = (sizes * torch.linspace(-1, 1, 16, device=DEVICE)).flatten(1)
    out = allocate_rows(ROWS, 128, 4)
    quantize_tiles(x, make_tiles_tensor(TILES, 4), scale_e, out=out)
    assert_rows(out, x, scale_e)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    "kind", ["silu", "relu2", "swiglu_oai:limit=1.2", "silu:interleaved=true", "gelu_no_mul"]
)
def test_activated_rows_equal_the_reference(kind: str) -> None:
    act, scale_e = ActivationSpec.parse(kind), torch.tensor(SCALES, device=DEVICE)
    x = random_normal(ROWS, 320 * (2 if act.gated else 1), dtype=torch.bfloat16)
    out = allocate_rows(ROWS, 320, 4)
    quantize_tiles(x, make_tiles_tensor(TILES, 4), scale_e, out=out, act=act)
    h = gated_activation_ref(x, act).to(x.dtype)
    codes, scale = nvfp4.quantize(h[:128], 1 / scale_e[0])
    # Exponentials can differ in the last bit, which changes a few codes.
    is_equal = unpack_pairs(out.q_RK[:128], 1) == codes
    assert is_equal.float().mean() > 0.995
    actual_scale = from_tiles(out.scale[:1], 128, 20)
    assert (actual_scale == scale.view(torch.uint8)).float().mean() > 0.99


@pytest.mark.usefixtures("path")
def test_gathered_rows_equal_the_reference() -> None:
    scale_e = torch.tensor(SCALES, device=DEVICE)
    x = random_normal(40, 256, dtype=torch.bfloat16)
    source = (torch.arange(ROWS, device=DEVICE) * 7 % 40).int()
    out = allocate_rows(ROWS, 256, 4)
    quantize_tiles(x, make_tiles_tensor(TILES, 4), scale_e, out=out, source_R=source)
    assert_rows(out, x[source.long()], scale_e)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("shape", [(2, 128, 16), (3, 384, 8), (1, 130, 20), (2, 256, 45)])
def test_tile_scales_equals_the_reference(shape: tuple[int, int, int]) -> None:
    scale = torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)
    out = torch.full(tiled_scale_spec(*shape).shape, 0x55, dtype=torch.uint8, device=DEVICE)
    tile_scales(scale.view(torch.float8_e4m3fn), out)
    assert torch.equal(out, to_tiles(scale).flatten(0, 1))


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    ("counts", "capacity"),
    [([3, 0, 130, 200], 200), ([0, 0], 7), ([128], 128), ([1] * 33, 1), ([256, 129], 256)],
)
def test_tiles_cover_all_batched_rows(counts: list[int], capacity: int) -> None:
    counts_e = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    workspace = Workspace(batched_tile_specs(len(counts), capacity), counts_e.device)
    tiles = list_tiles(make_batched_tiles(counts_e, capacity, workspace))
    rows = [
        row for _, first, end in tiles for row in range(first, min(first + 128, end))
    ]  # fmt: skip
    assert rows == [e * capacity + row for e, count in enumerate(counts) for row in range(count)]
    assert all(first % capacity % 128 == 0 for _, first, _ in tiles)


def assert_refused(error: type[Exception], match: str, **changes: object) -> None:
    arguments: dict[str, object] = {
        "x": torch.zeros(135, 64, device=DEVICE),
        "tiles": make_tiles_tensor(TILES, 4),
        "scale_e": torch.ones(3, device=DEVICE),
        "out": allocate_rows(135, 64, 4),
    }
    with pytest.raises(error, match=match):
        quantize_tiles(**(arguments | changes))  # type: ignore[arg-type]


def test_invalid_arguments_are_refused() -> None:
    zeros = torch.zeros
    assert_refused(ShapeError, "rows to quantize", x=zeros(135, 48))
    assert_refused(ShapeError, "rows to quantize", act=ActivationSpec.parse("silu"))
    assert_refused(LayoutError, "contiguous rows", x=zeros(64, 135).T)
    assert_refused(ShapeError, "scales of tiles", out=allocate_rows(135, 64, 3))
    assert_refused(ShapeError, "a multiple of 16", x=zeros(135, 40), out=allocate_rows(135, 40, 4))
    assert_refused(DtypeError, "tiles", tiles=make_tiles_tensor(TILES, 4).long())
    assert_refused(DtypeError, "scales of experts", scale_e=torch.ones(3).double())
    assert_refused(ShapeError, "max_tiles . 1 values", tiles=make_tiles_tensor(TILES, 4)[:-1])
    assert_refused(LayoutError, "scales of experts", scale_e=torch.ones(6)[::2])
    assert_refused(LayoutError, "scales of experts", scale_e=torch.ones(3, 1))
    assert_refused(ShapeError, "at least 135", x=zeros(134, 64))
    source = torch.zeros(135, dtype=torch.int32)
    assert_refused(ShapeError, "sources of rows", source_R=source[:134])
    assert_refused(
        LayoutError, "sources of rows", source_R=torch.zeros(270, dtype=torch.int32)[::2]
    )
    assert_refused(DtypeError, "sources of rows", source_R=source.long())
    scale, spec = zeros(2, 128, 16).to(torch.float8_e4m3fn), tiled_scale_spec(2, 128, 16)
    with pytest.raises(ShapeError, match="tiled scales"):
        tile_scales(scale, zeros(3, 2048, dtype=torch.uint8))
    with pytest.raises(LayoutError, match="scales"):
        tile_scales(zeros(2, 16, 128).to(scale.dtype).mT, zeros(spec.shape, dtype=torch.uint8))
    with pytest.raises(DtypeError, match="scales"):
        tile_scales(zeros(2, 128, 16), zeros(spec.shape, dtype=torch.uint8))
    with pytest.raises(DtypeError, match="tiled scales"):
        tile_scales(scale, zeros(spec.shape))
