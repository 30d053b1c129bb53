"""The kernels and torch references of quantize_rows and activation_and_quantize, compared bit for
bit with a loop over values.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from ops_fixtures import DEVICE, make_path_fixture, random_normal

from modular_kernel.errors import ConfigurationError, DtypeError, ShapeError
from modular_kernel.ops import activation, permute, quantize, quantize_tiles
from modular_kernel.ops.quantize import (
    QuantizedRows,
    activation_and_quantize,
    quantize_rows,
    quantize_specs,
    take_quantized,
)
from modular_kernel.ops.valid_rows import BatchedRows, PairRows
from modular_kernel.spec.problem import ActivationSpec, IdSpace
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import DispatchedRouting
from modular_kernel.workspace import Workspace

NAN = float("nan")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
STATIC_SCALE = 0.0123
SCHEMES = (
    "fp8_w8a8_tensor",
    "fp8_w8a8_tensor:static=true",
    "fp8_w8a8_channel",
    "fp8_w8a8_block:block=8x24",
    "int8_w8a8_channel",
    "int8_w8a8_block:block=8x24",
)
with_every_scheme = pytest.mark.parametrize("scheme_name", SCHEMES)
UNTOUCHED = {"q": 0x55, "scale": -3.0}  # the content of buffers before a call


path = make_path_fixture(quantize, activation, permute)


# ------------------------------------------------------------------------------------- the loop


def _e4m3_magnitudes() -> Iterator[float]:
    for code in range(127):
        exponent, mantissa = code >> 3, code & 7
        yield mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


E4M3_MAGNITUDES = list(_e4m3_magnitudes())


def round_to_e4m3(value: float) -> int:
    """Return the nearest e4m3 code of a value within +-448; ties round to the even code."""
    magnitude = abs(value)
    above = min(bisect_left(E4M3_MAGNITUDES, magnitude), 126)
    below = above if E4M3_MAGNITUDES[above] <= magnitude else above - 1
    to_below, to_above = magnitude - E4M3_MAGNITUDES[below], E4M3_MAGNITUDES[above] - magnitude
    is_below = to_below < to_above or (to_below == to_above and below % 2 == 0)
    code = below if is_below else above
    return code | (0x80 if np.signbit(value) else 0)


def quantize_to_byte(value: float, scheme: QuantScheme) -> int:
    """Return the byte of a scaled value."""
    if scheme.activation == "int8":
        return round(min(max(value, -127.0), 127.0)) & 0xFF
    return round_to_e4m3(min(max(value, -448.0), 448.0))


def compute_scale(values: list[np.float32], scheme: QuantScheme) -> np.float32:
    largest = np.float32(127 if scheme.activation == "int8" else 448)
    amax = max((abs(v) for v in values), default=np.float32(0))
    return max(np.float32(amax / largest), np.float32(2.0**-33))


@dataclass
class Expected:
    """The bytes of q and the scales, by row."""

    q: dict[int, list[int]]
    scale: dict[int, list[float]]


def quantize_by_loop(rows: dict[int, list[np.float32]], scheme: QuantScheme) -> Expected:
    """Quantize rows in float32, one value at a time."""
    q: dict[int, list[int]] = {}
    scales: dict[int, list[float]] = {}
    all_values = [v for row in rows.values() for v in row]
    for index, row in rows.items():
        group = scheme.group[1] if scheme.activation_granularity == "group" else len(row)
        q[index], scales[index] = [], []
        for start in range(0, len(row), group):
            group_values = row[start : start + group]
            if scheme.static:
                scale = np.float32(STATIC_SCALE)
            elif scheme.activation_granularity == "tensor":
                scale = compute_scale(all_values, scheme)
            else:
                scale = compute_scale(group_values, scheme)
            inverse = np.float32(1) / scale
            scales[index].append(float(scale))
            with np.errstate(over="ignore"):
                q[index] += [
                    quantize_to_byte(float(np.float32(v * inverse)), scheme) for v in group_values
                ]
    return Expected(q, scales)


def make_buffers(scheme: QuantScheme, rows: int, columns: int, segments: int = 1) -> QuantizedRows:
    """Return outputs in a workspace with red zones, filled with UNTOUCHED."""
    static = torch.tensor([STATIC_SCALE], device=DEVICE) if scheme.static else None
    specs = quantize_specs("a", scheme, rows, columns, segments=segments)
    workspace = Workspace(specs, torch.device(DEVICE), poison=True)
    out = take_quantized(
        workspace, "a", scheme, (rows, columns), segments=segments, static_scale=static
    )
    out.q_RK.view(torch.uint8).fill_(UNTOUCHED["q"])
    if not scheme.static:
        out.scale.fill_(UNTOUCHED["scale"])
    WORKSPACES[id(out.q_RK)] = workspace
    return out


WORKSPACES: dict[int, Workspace] = {}


def to_rows(values: torch.Tensor, valid: list[int] | None = None) -> dict[int, list[np.float32]]:
    table = values.float().cpu().numpy()
    return {r: list(table[r]) for r in (range(len(table)) if valid is None else valid)}


def assert_equals(out: QuantizedRows, expected: Expected, scheme: QuantScheme) -> None:
    """Check that valid rows equal those of the loop, and that other rows are unchanged."""
    WORKSPACES.pop(id(out.q_RK)).check_red_zones()
    q = out.q_RK.view(torch.uint8).cpu()
    for index in range(q.shape[0]):
        untouched = [UNTOUCHED["q"]] * q.shape[1]
        assert q[index].tolist() == expected.q.get(index, untouched), f"row {index}"
    if scheme.static:
        assert out.scale.tolist() == pytest.approx([STATIC_SCALE], abs=0, rel=1e-7)
    elif scheme.activation_granularity == "tensor":
        assert out.scale.tolist() == next(iter(expected.scale.values()))
    else:
        groups = out.scale.shape[1]
        for index, row in enumerate(out.scale.tolist()):
            assert row == expected.scale.get(index, [UNTOUCHED["scale"]] * groups), f"row {index}"


def assert_equals_loop(x: torch.Tensor, scheme: QuantScheme) -> None:
    out = make_buffers(scheme, *x.shape)
    quantize_rows(x, scheme, out=out)
    assert_equals(out, quantize_by_loop(to_rows(x), scheme), scheme)


# ------------------------------------------------------------------------------------- all rows


@pytest.mark.usefixtures("path")
@with_every_scheme
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 23), (5, 24), (19, 49), (40, 130)])
def test_quantize_rows_equals_the_loop(
    scheme_name: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    scheme, x = QuantScheme.parse(scheme_name), 3 * random_normal(*shape, dtype=dtype)
    assert_equals_loop(x, scheme)


@pytest.mark.usefixtures("path")
@with_every_scheme
def test_long_rows_are_read_in_several_parts(
    scheme_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scale covers more columns than a program reads at once."""
    monkeypatch.setattr(quantize_tiles, "_MAX_BLOCK_C", 16)
    monkeypatch.setattr(quantize, "_COLUMNS_PER_PROGRAM", 16)
    scheme, x = QuantScheme.parse(scheme_name), random_normal(7, 91)
    assert_equals_loop(x, scheme)


@pytest.mark.usefixtures("path")
@with_every_scheme
def test_programs_quantize_several_blocks_of_rows(
    scheme_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each program computes the maximum over several blocks of rows."""
    monkeypatch.setattr(quantize, "_MAX_PARTIALS", 3)
    monkeypatch.setattr(quantize_tiles, "_VALUES_PER_TILE", 64)
    scheme, x = QuantScheme.parse(scheme_name), random_normal(29, 30)
    x[27, 29] = 9.0  # The maximum is in the last block.
    assert_equals_loop(x, scheme)


@pytest.mark.usefixtures("path")
@with_every_scheme
def test_ties_zeros_and_extreme_values_equal_the_loop(scheme_name: str) -> None:
    row = [k / 16 for k in range(-40, 40)] + [448.0, 127.0, -447.9, 126.5, 0.5, 1.5, 2.5, -0.0]
    rows = [row, [v * 1e-12 for v in row], [v * 7.5e35 for v in row], [0.0] * len(row)]
    x = torch.tensor(rows, device=DEVICE)
    scheme = QuantScheme.parse(scheme_name)
    assert_equals_loop(x, scheme)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("scheme_name", ["fp8_w8a8_tensor:static=true"])
def test_static_scales_saturate(scheme_name: str) -> None:
    scheme, x = (
        QuantScheme.parse(scheme_name),
        torch.tensor([[5.6, -5.6, 1e30, -1e30]], device=DEVICE),
    )
    out = make_buffers(scheme, 1, 4)
    quantize_rows(x, scheme, out=out)
    assert out.q_RK.float().tolist() == [[448.0, -448.0, 448.0, -448.0]]


@pytest.mark.usefixtures("path")
@with_every_scheme
def test_strided_rows_equal_the_loop(scheme_name: str) -> None:
    scheme, wide = QuantScheme.parse(scheme_name), torch.full((6, 50), NAN, device=DEVICE)
    x = wide[:, :33]
    x.copy_(random_normal(6, 33))
    out = make_buffers(scheme, 6, 33)
    quantize_rows(x, scheme, out=out)
    assert_equals(out, quantize_by_loop(to_rows(x), scheme), scheme)


@pytest.mark.usefixtures("path")
@with_every_scheme
def test_quantizing_no_rows_does_not_fail(scheme_name: str) -> None:
    scheme = QuantScheme.parse(scheme_name)
    out = make_buffers(scheme, 0, 8)
    quantize_rows(random_normal(0, 8), scheme, out=out)
    counts = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    quantize_rows(random_normal(0, 8), scheme, out=out, valid_rows=BatchedRows(counts))


# ---------------------------------------------------------------------------- rows without a token


def make_routing(
    ids: list[list[int]], experts: int, mapping: list[int] | None = None
) -> DispatchedRouting:
    table = None if mapping is None else torch.tensor(mapping, dtype=torch.int32, device=DEVICE)
    counter = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    ids_TK = torch.tensor(ids, device=DEVICE)
    return DispatchedRouting(None, ids_TK, IdSpace.GLOBAL, experts, table, counter)


def make_rows_with_poison(
    rows: int, columns: int, valid: list[int], dtype: torch.dtype
) -> torch.Tensor:
    """Return rows of which only the valid ones are random. NaN and large values in the others would
    change the scales if they were read.
    """
    x = torch.full((rows, columns), NAN, dtype=dtype, device=DEVICE)
    x[1::3] = 6e4
    x[valid] = random_normal(len(valid), columns, dtype=dtype)
    return x


@pytest.mark.usefixtures("path")
@with_every_scheme
@pytest.mark.parametrize("tile", [2048, 64])
def test_skipped_pairs_are_neither_read_nor_written(
    scheme_name: str, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize_tiles, "_VALUES_PER_TILE", tile)
    scheme = QuantScheme.parse(scheme_name)
    routing = make_routing(
        [[0, -1, 2], [3, 9, 1], [-1, -1, -1], [1, 1, -7], [0, 3, 2]], 4, [1, -1, 0, 5]
    )
    # Experts 0 and 2 map to the local ids 1 and 0. Expert 3 maps to 5, which is out of range.
    valid = [0, 2, 12, 14]
    x = make_rows_with_poison(15, 50, valid, torch.bfloat16)
    out = make_buffers(scheme, 15, 50)
    quantize_rows(x, scheme, out=out, valid_rows=PairRows(routing, 2))
    assert_equals(out, quantize_by_loop(to_rows(x, valid), scheme), scheme)
    assert int(routing.invalid_ids) == 0, "quantize_rows must not count invalid ids"


@pytest.mark.usefixtures("path")
@with_every_scheme
@pytest.mark.parametrize("programs", [8192, 3])
def test_rows_after_a_count_are_neither_read_nor_written(
    scheme_name: str, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize, "_MAX_BATCHED_PROGRAMS", programs)
    monkeypatch.setattr(quantize, "_MAX_PARTIALS", programs)
    monkeypatch.setattr(quantize_tiles, "_VALUES_PER_TILE", 128)
    scheme = QuantScheme.parse(scheme_name)
    counts, capacity = [3, 0, 11, 1, 10], 11
    valid = [i * capacity + c for i, count in enumerate(counts) for c in range(count)]
    x = make_rows_with_poison(5 * capacity, 40, valid, torch.float16)
    out = make_buffers(scheme, 5 * capacity, 40, segments=5)
    counts_e = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    quantize_rows(x, scheme, out=out, valid_rows=BatchedRows(counts_e))
    assert_equals(out, quantize_by_loop(to_rows(x, valid), scheme), scheme)


@pytest.mark.usefixtures("path")
@with_every_scheme
def test_row_weights_are_applied_before_quantization(scheme_name: str) -> None:
    scheme, x = QuantScheme.parse(scheme_name), random_normal(5, 30, dtype=torch.bfloat16)
    weights = torch.tensor([0.3, NAN, 2.7, 1e9, 0.01], device=DEVICE)
    out = make_buffers(scheme, 5, 30)
    valid = PairRows(make_routing([[0], [-1], [1], [-1], [0]], 2), 2)
    quantize_rows(x, scheme, out=out, valid_rows=valid, row_weights_R=weights)
    assert_equals(
        out, quantize_by_loop(to_rows(x.float() * weights[:, None], [0, 2, 4]), scheme), scheme
    )


# ------------------------------------------------------------------------- with an activation

ACTIVATIONS = ("silu", "gelu", "swiglu_oai", "relu2", "silu:interleaved=true")


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("scheme_name", SCHEMES[1:])
@pytest.mark.parametrize("activation_name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activation_and_quantize_equals_both_operations(
    scheme_name: str, activation_name: str, dtype: torch.dtype
) -> None:
    scheme, spec = QuantScheme.parse(scheme_name), ActivationSpec.parse(activation_name)
    columns, valid = 45, PairRows(make_routing([[0, 1], [-1, 0], [1, -1]], 2), 2)
    x = random_normal(6, columns * (2 if spec.gated else 1), dtype=dtype)
    h = torch.empty(6, columns, dtype=dtype, device=DEVICE)
    activation.gated_activation(x, spec, h)
    x[[2, 5]] = NAN
    separate, fused = make_buffers(scheme, 6, columns), make_buffers(scheme, 6, columns)
    quantize_rows(h, scheme, out=separate, valid_rows=valid)
    activation_and_quantize(x, spec, scheme, out=fused, valid_rows=valid)
    assert torch.equal(fused.q_RK.view(torch.uint8), separate.q_RK.view(torch.uint8))
    assert torch.equal(fused.scale, separate.scale)
    assert_equals(separate, quantize_by_loop(to_rows(h, [0, 1, 3, 4]), scheme), scheme)


def test_activation_and_quantize_refuses_wrong_arguments() -> None:
    spec, scheme = ActivationSpec("silu"), QuantScheme.parse("fp8_w8a8_tensor")
    with pytest.raises(
        ConfigurationError, match="need a static scale, or a scale per token or group"
    ):
        activation_and_quantize(random_normal(2, 8), spec, scheme, out=make_buffers(scheme, 2, 4))
    scheme = QuantScheme.parse("fp8_w8a8_channel")
    with pytest.raises(ShapeError, match="activation input"):
        activation_and_quantize(random_normal(2, 4), spec, scheme, out=make_buffers(scheme, 2, 4))
    out = make_buffers(scheme, 0, 4)
    activation_and_quantize(random_normal(0, 8), spec, scheme, out=out)


def test_buffers_of_wrong_shape_or_dtype_are_refused() -> None:
    per_token, per_tensor = (QuantScheme.parse(f"fp8_w8a8_{g}") for g in ("channel", "tensor"))
    out, x = make_buffers(per_token, 3, 8), random_normal(3, 8)
    with pytest.raises(ShapeError, match="quantized rows"):
        quantize_rows(random_normal(3, 9), per_token, out=out)
    with pytest.raises(ShapeError, match="scales of quantized rows"):
        quantize_rows(x, per_tensor, out=out)
    with pytest.raises(DtypeError, match="quantized rows: got float8_e4m3fn, need int8"):
        quantize_rows(x, QuantScheme.parse("int8_w8a8_channel"), out=out)
    for scheme_name in ("none", "int8_w8a16_channel", "nvfp4_w4a4"):
        with pytest.raises(ConfigurationError, match="activation quantization"):
            quantize_specs("a", QuantScheme.parse(scheme_name), 3, 8)


@with_every_scheme
def test_buffer_sizes_never_decrease_with_more_rows(scheme_name: str) -> None:
    scheme, previous = QuantScheme.parse(scheme_name), dict[str, int]()
    for rows in (0, 1, 2, 7, 64, 3000):
        specs = {n: s.numel for n, s in quantize_specs("a", scheme, rows, 40).items()}
        assert all(numel >= previous.get(name, 0) for name, numel in specs.items())
        previous = specs
    assert quantize_specs("a", scheme, 1, 40, segments=5000).keys() == previous.keys()
