"""permute_and_quantize equals quantize_rows followed by permute_tokens, bit for bit."""

import pytest
import torch
from ops_fixtures import DEVICE, make_path_fixture, random_normal

from modular_kernel.errors import ConfigurationError, DtypeError, ShapeError
from modular_kernel.ops import permute, permute_quantize, quantize
from modular_kernel.ops.permute import permute_tokens
from modular_kernel.ops.permute_quantize import permute_and_quantize
from modular_kernel.ops.quantize import QuantizedRows, quantize_rows, scale_shape
from modular_kernel.quant.quantized_weights import STORAGE
from modular_kernel.spec.quantization import QuantScheme

NAN, STATIC, ROWS = float("nan"), 0.0123, 12
SCHEMES = (
    "fp8_w8a8_tensor:static=true",
    "fp8_w8a8_channel",
    "fp8_w8a8_block:block=8x24",
    "fp8_w8a8_block:block=8x32",
    "int8_w8a8_channel",
    "int8_w8a8_block:block=8x24",
)
with_every_scheme = pytest.mark.parametrize("scheme_name", SCHEMES)
# The rows of the pairs of five tokens with top-k 3. Two pairs of token 1 share row 7.
ROW_OF_PAIR = torch.tensor([[3, -1, 0], [7, 7, 11], [-1, -1, -1], [1, 2, 4], [-1, 10, 5]])
ROWS_WITHOUT_PAIRS = [6, 8, 9]


path = make_path_fixture(permute_quantize, permute, quantize)


def make_buffers(scheme: QuantScheme, rows: int, columns: int) -> QuantizedRows:
    """Return outputs filled with a value that must remain in rows without a pair."""
    q = torch.full((rows, columns), 0x55, dtype=torch.uint8, device=DEVICE)
    shape = scale_shape(scheme, rows, columns)
    scale = torch.full(shape, STATIC if scheme.static else -3.0, device=DEVICE)
    return QuantizedRows(q.view(STORAGE[scheme.activation]), scale)


def quantize_then_permute(
    x_TH: torch.Tensor, row_of_pair_TK: torch.Tensor, scheme: QuantScheme, rows: int
) -> QuantizedRows:
    quantized, out = make_buffers(scheme, *x_TH.shape), make_buffers(scheme, rows, x_TH.shape[1])
    quantize_rows(x_TH, scheme, out=quantized)
    scales = {} if scheme.static else {"scale_TG": quantized.scale, "scale_rows_RG": out.scale}
    rows_RH = out.q_RK.view(torch.uint8)
    permute_tokens(
        quantized.q_RK.view(torch.uint8), row_of_pair_TK, None, rows_RH=rows_RH, **scales
    )
    return out


def assert_same(actual: QuantizedRows, expected: QuantizedRows) -> None:
    assert torch.equal(actual.q_RK.view(torch.uint8), expected.q_RK.view(torch.uint8))
    assert torch.equal(actual.scale, expected.scale)


@pytest.mark.usefixtures("path")
@with_every_scheme
@pytest.mark.parametrize("columns", [1, 45, 64, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_permute_and_quantize_equals_both_operations(
    scheme_name: str, columns: int, dtype: torch.dtype
) -> None:
    scheme, row_of_pair = QuantScheme.parse(scheme_name), ROW_OF_PAIR.int().to(DEVICE)
    x_TH = random_normal(5, columns, dtype=dtype)
    x_TH[2] = 1e4  # This token has no pair, so it must not influence a scale.
    out = make_buffers(scheme, ROWS, columns)
    permute_and_quantize(x_TH, row_of_pair, None, scheme, out=out)
    assert_same(out, quantize_then_permute(x_TH, row_of_pair, scheme, ROWS))
    untouched = out.q_RK.view(torch.uint8)[ROWS_WITHOUT_PAIRS]
    assert bool((untouched == 0x55).all())
    if not scheme.static:
        assert bool((out.scale[ROWS_WITHOUT_PAIRS] == -3.0).all())


@pytest.mark.usefixtures("path")
@with_every_scheme
def test_long_groups_are_read_in_several_parts(
    scheme_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme, row_of_pair = QuantScheme.parse(scheme_name), ROW_OF_PAIR.int().to(DEVICE)
    monkeypatch.setattr(permute_quantize, "_MAX_BLOCK_C", 16)
    monkeypatch.setattr(permute_quantize, "_COLUMNS_PER_PROGRAM", 16)
    x_TH = random_normal(5, 77)
    x_TH[:, 70] = 9.0  # The maximum of a row is in its last part.
    out, weights = make_buffers(scheme, ROWS, 77), torch.ones(5, 3, device=DEVICE)
    permute_and_quantize(x_TH, row_of_pair, weights, scheme, out=out)
    assert_same(out, quantize_then_permute(x_TH, row_of_pair, scheme, ROWS))


@pytest.mark.usefixtures("path")
@with_every_scheme
def test_programs_quantize_several_groups(
    scheme_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last program may have fewer groups than the others."""
    scheme, row_of_pair = QuantScheme.parse(scheme_name), ROW_OF_PAIR.int().to(DEVICE)
    monkeypatch.setattr(permute_quantize, "_COLUMNS_PER_PROGRAM", 64)
    x_TH = random_normal(5, 24 * 5)
    out = make_buffers(scheme, ROWS, 24 * 5)
    permute_and_quantize(x_TH, row_of_pair, None, scheme, out=out)
    assert_same(out, quantize_then_permute(x_TH, row_of_pair, scheme, ROWS))


@pytest.mark.usefixtures("path")
@with_every_scheme
def test_router_weights_are_applied_before_quantization(scheme_name: str) -> None:
    scheme = QuantScheme.parse(scheme_name)
    row_of_pair = torch.tensor([[0, 2, -1], [-1, 3, 5]], dtype=torch.int32, device=DEVICE)
    weights = torch.tensor([[0.3, -2.7, NAN], [1e30, 0.01, 1.0]], device=DEVICE)
    x_TH, out = random_normal(2, 45, dtype=torch.bfloat16), make_buffers(scheme, 6, 45)
    permute_and_quantize(x_TH, row_of_pair, weights, scheme, out=out)
    expected = make_buffers(scheme, 6, 45)
    for token, slot, row in ((0, 0, 0), (0, 1, 2), (1, 1, 3), (1, 2, 5)):
        weighted = x_TH[token].float()[None] * weights[token, slot]
        first_row = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
        quantized = quantize_then_permute(weighted, first_row, scheme, 1)
        expected.q_RK.view(torch.uint8)[row] = quantized.q_RK.view(torch.uint8)[0]
        if not scheme.static:
            expected.scale[row] = quantized.scale[0]
    assert_same(out, expected)


@pytest.mark.usefixtures("path")
def test_strided_rows_give_the_same_result() -> None:
    scheme, row_of_pair = QuantScheme.parse(SCHEMES[2]), ROW_OF_PAIR.int().to(DEVICE)
    wide = random_normal(5, 90)
    out, expected_rows = make_buffers(scheme, ROWS, 45), make_buffers(scheme, ROWS, 45)
    permute_and_quantize(wide[:, :45], row_of_pair, None, scheme, out=out)
    permute_and_quantize(wide[:, :45].contiguous(), row_of_pair, None, scheme, out=expected_rows)
    assert_same(out, expected_rows)


@pytest.mark.usefixtures("path")
def test_invalid_input_is_refused() -> None:
    scheme, x_TH = QuantScheme.parse("fp8_w8a8_channel"), random_normal(5, 45)
    row_of_pair = ROW_OF_PAIR.int().to(DEVICE)
    for scheme_name in ("fp8_w8a8_tensor", "none", "int8_w8a16_channel"):
        unsupported, out = QuantScheme.parse(scheme_name), make_buffers(scheme, ROWS, 45)
        with pytest.raises(
            ConfigurationError, match="need quantized activations with a static scale"
        ):
            permute_and_quantize(x_TH, row_of_pair, None, unsupported, out=out)
    with pytest.raises(ShapeError, match=r"quantized rows: got \(12, 44\), need \(12, 45\)"):
        permute_and_quantize(x_TH, row_of_pair, None, scheme, out=make_buffers(scheme, ROWS, 44))
    block = QuantScheme.parse("fp8_w8a8_block")
    with pytest.raises(ShapeError, match="scales of quantized rows"):
        permute_and_quantize(
            random_normal(5, 200), row_of_pair, None, block, out=make_buffers(scheme, ROWS, 200)
        )
    int8_rows = make_buffers(QuantScheme.parse("int8_w8a8_channel"), ROWS, 45)
    with pytest.raises(DtypeError, match="quantized rows: got int8, need float8_e4m3fn"):
        permute_and_quantize(x_TH, row_of_pair, None, scheme, out=int8_rows)


@pytest.mark.usefixtures("path")
def test_empty_input_leaves_outputs_unchanged() -> None:
    scheme, x_TH = QuantScheme.parse("fp8_w8a8_channel"), random_normal(5, 45)
    row_of_pair = ROW_OF_PAIR.int().to(DEVICE)
    out = make_buffers(scheme, ROWS, 45)
    permute_and_quantize(x_TH[:0], row_of_pair[:0], None, scheme, out=out)
    assert_same(out, make_buffers(scheme, ROWS, 45))


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("columns", [32, 100])
def test_column_major_scales_equal_row_major_scales(columns: int) -> None:
    """permute_and_quantize and permute_tokens write scales in the same layout."""
    scheme, row_of_pair = (
        QuantScheme.parse("fp8_w8a8_block:block=8x32"),
        ROW_OF_PAIR.int().to(DEVICE),
    )
    x_TH = random_normal(5, columns, dtype=torch.bfloat16)
    expected, unwritten = (
        quantize_then_permute(x_TH, row_of_pair, scheme, ROWS),
        make_buffers(scheme, ROWS, columns),
    )
    groups = expected.scale.shape[1]
    out = QuantizedRows(
        unwritten.q_RK, torch.full((1, groups, ROWS), -3.0, device=DEVICE), None, True
    )
    permute_and_quantize(x_TH, row_of_pair, None, scheme, out=out)
    assert out.scale_of_rows.stride() == (1, ROWS)
    assert torch.equal(out.scale_of_rows, expected.scale)
    assert torch.equal(out.q_RK.view(torch.uint8), expected.q_RK.view(torch.uint8))
    quantized = make_buffers(scheme, 5, columns)
    quantize_rows(x_TH, scheme, out=quantized)
    scales = torch.full((groups, ROWS), -3.0, device=DEVICE).T
    rows, bytes_TH = out.q_RK.view(torch.uint8), quantized.q_RK.view(torch.uint8)
    scale_arguments = {"scale_TG": quantized.scale, "scale_rows_RG": scales}
    permute_tokens(bytes_TH, row_of_pair, None, rows_RH=rows, **scale_arguments)
    assert torch.equal(scales, expected.scale)


def test_column_major_scales_over_two_segments_are_refused() -> None:
    scheme, row_of_pair = (
        QuantScheme.parse("fp8_w8a8_block:block=8x32"),
        ROW_OF_PAIR.int().to(DEVICE),
    )
    out = make_buffers(scheme, ROWS, 64)
    out = QuantizedRows(out.q_RK, out.scale.view(2, 2, ROWS // 2), None, True)
    with pytest.raises(ShapeError, match="segments of scales: got 2, need 1"):
        permute_and_quantize(random_normal(5, 64), row_of_pair, None, scheme, out=out)
