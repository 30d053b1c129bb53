"""4-bit weights in the layout for products from registers: the same values, bit by bit."""

import pytest
import torch
from w4_samples import INTEGERS, SCHEMES, random_weights

from experts.triton.grouped_w4.bitwise_reference import tile_weights, untile_weights
from experts.triton.grouped_w4.layout import PackedFormat, choose_packed_format, list_tile_rows
from modular_kernel.errors import DtypeError, ShapeError
from modular_kernel.spec.quantization import QuantScheme

COLUMNS = 200
MXFP4 = PackedFormat("e2m1")


def _come_back(quant: str, depth: int, gated: bool, step: int, **kinds: object) -> None:
    up_row = 1 if step == 2 else COLUMNS
    s = random_weights(quant, 2, 2 * COLUMNS if gated else COLUMNS, depth, **kinds)  # type: ignore[arg-type]
    rows = list_tile_rows(COLUMNS, step, up_row, gated=gated)
    got = untile_weights(s.tiled(rows), s.packed_format)
    taken = rows.flatten()
    there = taken >= 0
    other = got[:, there, :depth] != s.values[:, taken[there]]
    # Beside a zero point a float32 scale has room for 20 bits.
    assert other.float().mean() < (
        5e-4 if s.packed_format.zero and s.packed_format.scale == "float32" else 1e-9
    )
    assert not got[:, ~there].any()
    assert s.packed_format.kind == "integer" or not got[..., depth:].any()
    assert sorted(taken[there].tolist()) == list(range(s.w.shape[1]))


@pytest.mark.parametrize(("low", "high"), [(46, 127), (100, 129), (129, 179)])
@pytest.mark.parametrize("depth", [64, 160, 192])
@pytest.mark.parametrize(("gated", "step"), [(False, 1), (True, 1), (True, 2)])
def test_mxfp4_round_trip(low: int, high: int, depth: int, gated: bool, step: int) -> None:
    _come_back("mxfp4_w4a16", depth, gated, step, low=low, high=high)


@pytest.mark.parametrize("quant", SCHEMES[2:])
@pytest.mark.parametrize("scales", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("depth", [64, 160, 192])
@pytest.mark.parametrize(("gated", "step"), [(False, 1), (True, 2)])
def test_round_trip_of_other_schemes(
    quant: str, scales: torch.dtype, depth: int, gated: bool, step: int
) -> None:
    _come_back(quant, depth, gated, step, scales=scales)


def test_packed_formats() -> None:
    parse = QuantScheme.parse
    assert choose_packed_format(parse("mxfp4_w4a16"), 64) == choose_packed_format(
        parse("mxfp4_w4a16:repacked=true"), 64
    )
    assert choose_packed_format(parse("nvfp4_w4a16"), 64).lines == 16
    int4 = parse("int4_w4a16_group:group=96")
    assert choose_packed_format(int4, 96, torch.bfloat16) == PackedFormat(
        "integer", 1, "bfloat16"
    )  # one group is all
    assert choose_packed_format(int4, 192) == PackedFormat("integer", 2, "float32")
    assert choose_packed_format(parse("int4_w4a16_group:zero_points=true"), 512) == PackedFormat(
        "integer", 1, zero=True
    )


def test_nan_scales_stay_nan() -> None:
    rows = list_tile_rows(64, 1, 0, gated=False)
    for quant, each in (("mxfp4_w4a16", 32), ("nvfp4_w4a16", 16), (INTEGERS[1], 32)):
        s = random_weights(quant, 1, 64, 64)
        first = {"mxfp4_w4a16": 255, "nvfp4_w4a16": 127}.get(quant)
        if first is None:
            s.scale[0, 3, 1] = torch.nan
        else:
            s.scale.view(torch.uint8)[0, 3, 1] = first
        got = untile_weights(s.tiled(rows), s.packed_format)
        assert not got[0, 3, each : 2 * each].isfinite().any()
        assert got[0, 3, :each].isfinite().all()
        assert got[0, :3].isfinite().all()


def test_unsupported_tensors_are_refused() -> None:
    s = random_weights("mxfp4_w4a16", 1, 64, 64)
    rows = list_tile_rows(64, 1, 0, gated=False)
    with pytest.raises(DtypeError):
        tile_weights(s.w.int(), s.scale, rows, MXFP4)
    with pytest.raises(DtypeError):
        tile_weights(s.w, s.scale.float(), rows, MXFP4)
    with pytest.raises(ShapeError):
        tile_weights(s.w, s.scale[:, :, :1], rows, MXFP4)
