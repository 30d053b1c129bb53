"""4-bit weights round-trip through the tiled layout of the `grouped_w4` kernel bit for bit."""

import pytest
import torch
from w4_samples import INTEGERS, SCHEMES, random_weights

from experts.triton.grouped_w4.bitwise_reference import tile_weights, untile_weights
from experts.triton.grouped_w4.layout import PackedFormat, choose_packed_format, list_tile_rows
from modular_kernel.errors import DtypeError, ShapeError
from modular_kernel.spec.quantization import QuantScheme

COLUMNS = 200
MXFP4 = PackedFormat("e2m1")


def _assert_round_trip(quant: str, depth: int, gated: bool, step: int, **kinds: object) -> None:
    up_row = 1 if step == 2 else COLUMNS
    sample = random_weights(quant, 2, 2 * COLUMNS if gated else COLUMNS, depth, **kinds)  # type: ignore[arg-type]
    rows = list_tile_rows(COLUMNS, step, up_row, gated=gated)
    untiled = untile_weights(sample.tiled(rows), sample.packed_format)
    source_rows = rows.flatten()
    is_used = source_rows >= 0
    differs = untiled[:, is_used, :depth] != sample.values[:, source_rows[is_used]]
    # A float32 scale that is stored with a zero point is rounded to 20 bits.
    is_rounded = sample.packed_format.zero and sample.packed_format.scale == "float32"
    assert differs.float().mean() < (5e-4 if is_rounded else 1e-9)
    assert not untiled[:, ~is_used].any()
    assert sample.packed_format.kind == "integer" or not untiled[..., depth:].any()
    assert sorted(source_rows[is_used].tolist()) == list(range(sample.w.shape[1]))


@pytest.mark.parametrize(("low", "high"), [(46, 127), (100, 129), (129, 179)])
@pytest.mark.parametrize("depth", [64, 160, 192])
@pytest.mark.parametrize(("gated", "step"), [(False, 1), (True, 1), (True, 2)])
def test_mxfp4_round_trip(low: int, high: int, depth: int, gated: bool, step: int) -> None:
    _assert_round_trip("mxfp4_w4a16", depth, gated, step, low=low, high=high)


@pytest.mark.parametrize("quant", SCHEMES[2:])
@pytest.mark.parametrize("scales", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("depth", [64, 160, 192])
@pytest.mark.parametrize(("gated", "step"), [(False, 1), (True, 2)])
def test_round_trip_of_other_schemes(
    quant: str, scales: torch.dtype, depth: int, gated: bool, step: int
) -> None:
    _assert_round_trip(quant, depth, gated, step, scales=scales)


def test_packed_formats_of_schemes() -> None:
    parse = QuantScheme.parse
    assert choose_packed_format(parse("mxfp4_w4a16"), 64) == choose_packed_format(
        parse("mxfp4_w4a16:repacked=true"), 64
    )
    assert choose_packed_format(parse("nvfp4_w4a16"), 64).lines == 16
    int4 = parse("int4_w4a16_group:group=96")
    # A depth of 96 has one group.
    assert choose_packed_format(int4, 96, torch.bfloat16) == PackedFormat("integer", 1, "bfloat16")
    assert choose_packed_format(int4, 192) == PackedFormat("integer", 2, "float32")
    assert choose_packed_format(parse("int4_w4a16_group:zero_points=true"), 512) == PackedFormat(
        "integer", 1, zero=True
    )


def test_nan_scales_stay_nan() -> None:
    rows = list_tile_rows(64, 1, 0, gated=False)
    for quant, group in (("mxfp4_w4a16", 32), ("nvfp4_w4a16", 16), (INTEGERS[1], 32)):
        sample = random_weights(quant, 1, 64, 64)
        nan_code = {"mxfp4_w4a16": 255, "nvfp4_w4a16": 127}.get(quant)
        if nan_code is None:
            sample.scale[0, 3, 1] = torch.nan
        else:
            sample.scale.view(torch.uint8)[0, 3, 1] = nan_code
        untiled = untile_weights(sample.tiled(rows), sample.packed_format)
        assert not untiled[0, 3, group : 2 * group].isfinite().any()
        assert untiled[0, 3, :group].isfinite().all()
        assert untiled[0, :3].isfinite().all()


def test_unsupported_tensors_are_refused() -> None:
    sample = random_weights("mxfp4_w4a16", 1, 64, 64)
    rows = list_tile_rows(64, 1, 0, gated=False)
    with pytest.raises(DtypeError):
        tile_weights(sample.w.int(), sample.scale, rows, MXFP4)
    with pytest.raises(DtypeError):
        tile_weights(sample.w, sample.scale.float(), rows, MXFP4)
    with pytest.raises(ShapeError):
        tile_weights(sample.w, sample.scale[:, :, :1], rows, MXFP4)
