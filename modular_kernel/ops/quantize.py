"""quantize_rows: quantize activations to float8_e4m3fn or int8, per row, group or tensor.

    scale = max(amax / L, 2^-33)    q = x * (1 / scale), clamped to [-L, L], rounded to nearest even

amax is the largest absolute value among the values that share a scale: a row, a group of adjacent
columns of a row, or the tensor. L is 448 for float8_e4m3fn and 127 for int8. Both divisions round
to nearest, so that the kernel and the torch reference are bitwise equal for finite values. The
dequantized value is q * scale.

A dynamic scale is computed from the values, as above. A static scale is given by the checkpoint.
"""

from dataclasses import dataclass

import torch

from modular_kernel.compatibility.support import Rejection
from modular_kernel.errors import ConfigurationError, DtypeError, ShapeError
from modular_kernel.ops.activation import (
    activation_constants,
    gated_activation_ref,
    get_gate_up_layout,
)
from modular_kernel.ops.count import next_power_of_2
from modular_kernel.ops.quantize_tiles import tile_groups, tile_rows
from modular_kernel.ops.valid_rows import (
    BatchedRows,
    ValidRows,
    get_segments,
    make_source_arguments,
    make_valid_row_mask,
)
from modular_kernel.quant.quantized_weights import MIN_SCALE, QMAX, STORAGE
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.pdl import pdl_arguments
from modular_kernel.replay.launch.runtime import use_triton
from modular_kernel.spec.problem import ActivationSpec, Machine, Problem, dtype_name
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.workspace import BufferSpec, Workspace

_ACTIVATIONS = ("float8_e4m3fn", "int8")
_COLUMNS_PER_PROGRAM = 1024  # columns per program with a per-tensor scale
# Maximum number of programs that compute a per-tensor amax, unless there are more experts.
_MAX_PARTIALS = 1024
# Maximum number of programs for batched rows, unless there are more experts. Most batched rows do
# not hold a token.
_MAX_BATCHED_PROGRAMS = 8192


@dataclass(frozen=True)
class QuantizedRows:
    """Quantized rows. All tensors are contiguous.

    q_RK: output, (R, K) float8_e4m3fn or int8.
    scale: float32, (R, 1) per token, (R, G) per group of g columns with G = ceil(K / g), or (1,)
        per tensor. It is an input if the scheme is static, and an output otherwise.
    partials: float32 scratch buffer for a dynamic per-tensor scale, with the amax of each program
        of the first launch; None for other schemes.
    along_rows: whether scales are stored as (e, G, R / e) for e segments of rows, so that the
        scales of adjacent rows are adjacent in memory. A segment is the rows of one expert in the
        batched layout, or all rows otherwise.
    """

    q_RK: torch.Tensor
    scale: torch.Tensor
    partials: torch.Tensor | None = None
    along_rows: bool = False

    @property
    def scale_of_rows(self) -> torch.Tensor:
        """A view of the scales as (R, G), as (e, C, G) for several segments, or as (1,)."""
        if not self.along_rows:
            return self.scale
        return self.scale[0].T if len(self.scale) == 1 else self.scale.mT


def quantize_rejections(part: str, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
    """Return the reasons why the part named `part` cannot use `quantize_rows` on the machine."""
    is_fp8 = problem.scheme.activation == "float8_e4m3fn"
    if not is_fp8 or machine.arch is None or machine.arch >= (8, 9):
        return ()
    got = f"{machine.arch[0]}.{machine.arch[1]} for {problem.scheme.name}"
    return (Rejection("arch", (part, "machine"), got, ">= 8.9 to convert to float8"),)


def quantize_specs(
    prefix: str, scheme: QuantScheme, rows: int, columns: int, *, segments: int = 1
) -> dict[str, BufferSpec]:
    """Return the specs of the buffers of `take_quantized`. Sizes grow with rows and segments.

    prefix: prefix of the names of the buffers.
    segments: number of experts for batched rows, and 1 otherwise.
    """
    if scheme.activation not in _ACTIVATIONS:
        raise _make_scheme_error(scheme)
    specs = {f"{prefix}_q": BufferSpec((rows, columns), STORAGE[scheme.activation])}
    if not scheme.static:
        shape = scale_shape(scheme, rows, columns)
        specs[f"{prefix}_scale"] = BufferSpec(shape, torch.float32)
    if _needs_partials(scheme):
        num_partials = max(_MAX_PARTIALS, segments)
        specs[f"{prefix}_partials"] = BufferSpec((num_partials,), torch.float32)
    return specs


def scale_shape(scheme: QuantScheme, rows: int, columns: int) -> tuple[int, ...]:
    """Return the shape of the scales of (rows, columns) activations."""
    if scheme.activation_granularity == "tensor":
        return (1,)
    return (rows, -(-columns // _get_columns_per_scale(scheme, columns)))


def take_quantized(
    workspace: Workspace,
    prefix: str,
    scheme: QuantScheme,
    shape: tuple[int, int],
    *,
    segments: int = 1,
    static_scale: torch.Tensor | None = None,
    along_rows: bool = False,
) -> QuantizedRows:
    """Return views of the workspace buffers that `quantize_specs` declares.

    shape: (rows, columns).
    static_scale: (1,) float32 for a static scheme; otherwise None.
    along_rows: layout of the scales, as in `QuantizedRows`. It has no effect on a per-tensor scale.
    """
    assert (static_scale is not None) == scheme.static
    specs = quantize_specs(prefix, scheme, *shape, segments=segments)
    buffers = {name: workspace.take(name, spec.shape) for name, spec in specs.items()}
    scale = buffers[f"{prefix}_scale"] if static_scale is None else static_scale
    along_rows = along_rows and scale.dim() == 2
    if along_rows:
        scale = scale.view(segments, -1, shape[0] // segments)
    return QuantizedRows(
        buffers[f"{prefix}_q"], scale, buffers.get(f"{prefix}_partials"), along_rows
    )


def quantize_rows(
    x_RK: torch.Tensor,
    scheme: QuantScheme,
    *,
    out: QuantizedRows,
    valid_rows: ValidRows = None,
    row_weights_R: torch.Tensor | None = None,
) -> None:
    """Quantize the rows of x_RK, and write the result to `out`.

    This takes one launch on a GPU, or two for a dynamic per-tensor scale.

    x_RK: (R, K), with contiguous rows.
    valid_rows: the rows that hold a token; None means all rows. Other rows are neither read nor
        written.
    row_weights_R: (R,) float32, factors of x that are applied in float32 before quantization; or
        None.
    """
    check_quantized(x_RK.shape[0], x_RK.shape[1], scheme, out)
    if x_RK.numel() == 0:
        return
    if not use_triton(x_RK):
        quantize_rows_ref(x_RK, scheme, out=out, valid_rows=valid_rows, row_weights_R=row_weights_R)
        return
    no_activation = {
        "ACTIVATION": "identity",
        "ACTIVATION_ALPHA": 0.0,
        "ACTIVATION_LIMIT": 0.0,
        "GATE_STRIDE": 1,
        "up_offset": 0,
    }
    source = make_source_arguments(x_RK, valid_rows, row_weights_R)
    num_partials = 0
    if _needs_partials(scheme):
        num_partials = _launch_amax(x_RK, out, valid_rows, source)
    _launch_quantize(x_RK, scheme, out, valid_rows, num_partials, source | no_activation)


def activation_and_quantize(
    x_RN: torch.Tensor,
    spec: ActivationSpec,
    scheme: QuantScheme,
    *,
    out: QuantizedRows,
    valid_rows: ValidRows = None,
) -> None:
    """Run `gated_activation` and `quantize_rows` in one launch.

    The result is bitwise equal to the result of the two separate operations, with the activation
    rounded to the dtype of x. Raises ConfigurationError for a dynamic per-tensor scale, because it
    depends on all values.

    x_RN: (R, N), with contiguous rows. N is twice the number of columns of `out` if the activation
        is gated.
    """
    rows, intermediate = out.q_RK.shape
    if _needs_partials(scheme):
        need = "a static scale, or a scale per token or group"
        raise ConfigurationError("activation_and_quantize", got=str(scheme), need=need)
    input_columns = intermediate * (2 if spec.gated else 1)
    if tuple(x_RN.shape) != (rows, input_columns):
        raise ShapeError("activation input", got=tuple(x_RN.shape), need=(rows, input_columns))
    check_quantized(rows, intermediate, scheme, out)
    if out.q_RK.numel() == 0:
        return
    if not use_triton(x_RN):
        activation_and_quantize_ref(x_RN, spec, scheme, out=out, valid_rows=valid_rows)
        return
    gate_stride, up_offset = get_gate_up_layout(spec, intermediate)
    layout = {"GATE_STRIDE": gate_stride, "up_offset": up_offset}
    source = make_source_arguments(x_RN, valid_rows, None)
    arguments = source | activation_constants(spec) | layout
    _launch_quantize(x_RN, scheme, out, valid_rows, 0, arguments)


def _make_scheme_error(scheme: QuantScheme) -> ConfigurationError:
    need = f"a scheme with {' or '.join(_ACTIVATIONS)} activations"
    return ConfigurationError("activation quantization", got=str(scheme), need=need)


def check_quantized(rows: int, columns: int, scheme: QuantScheme, out: QuantizedRows) -> None:
    """Raise an InputError if `out` has other shapes or dtypes than (rows, columns) values need."""
    if scheme.activation not in _ACTIVATIONS:
        raise _make_scheme_error(scheme)
    if tuple(out.q_RK.shape) != (rows, columns):
        raise ShapeError("quantized rows", got=tuple(out.q_RK.shape), need=(rows, columns))
    need = scale_shape(scheme, rows, columns)
    if out.along_rows:
        segments = len(out.scale)
        need = (segments, need[-1], rows // max(1, segments))
    if tuple(out.scale.shape) != need:
        raise ShapeError("scales of quantized rows", got=tuple(out.scale.shape), need=need)
    if out.q_RK.dtype is not STORAGE[scheme.activation]:
        got = dtype_name(out.q_RK.dtype)
        raise DtypeError("quantized rows", got=got, need=scheme.activation)


def _needs_partials(scheme: QuantScheme) -> bool:
    return scheme.activation_granularity == "tensor" and not scheme.static


def _get_columns_per_scale(scheme: QuantScheme, columns: int) -> int:
    """Return the number of columns that share a scale."""
    return scheme.group[-1] if scheme.activation_granularity == "group" else columns


def _launch_amax(
    x_RK: torch.Tensor, out: QuantizedRows, valid_rows: ValidRows, source: dict[str, object]
) -> int:
    """Write the amax of each program to out.partials; return the number of programs."""
    from modular_kernel.ops.kernels.quantize import amax_kernel

    rows, columns = x_RK.shape
    assert out.partials is not None
    tiles = tile_rows(
        *get_segments(rows, valid_rows), min(columns, _COLUMNS_PER_PROGRAM), _MAX_PARTIALS
    )
    programs = tiles.segments * tiles.programs_per_segment
    assert programs <= out.partials.numel()
    arguments = {"partial_amax_ptr": out.partials, "num_columns": columns, "up_offset": 0}
    launch(amax_kernel, (programs,), **arguments, **tiles.make_row_kernel_arguments(), **source)
    return programs


def _launch_quantize(
    x: torch.Tensor,
    scheme: QuantScheme,
    out: QuantizedRows,
    valid_rows: ValidRows,
    num_partials: int,
    arguments: dict[str, object],
) -> None:
    from modular_kernel.ops.kernels.quantize import quantize_rows_kernel

    # cp.async copies only rows that are contiguous, 16-byte aligned and have 16-bit values. Without
    # cp.async, fewer than 8 programs fit on an SM.
    allow_streaming = (
        arguments["GATE_STRIDE"] == 1 and x.element_size() == 2 and x.stride(0) % 8 == 0
    )
    tiles, programs = make_tile_arguments(scheme, out, valid_rows, allow_streaming=allow_streaming)
    launch(
        quantize_rows_kernel,
        (programs,),
        partial_amax_ptr=out.scale if out.partials is None else out.partials,
        num_partial_amax=num_partials,
        BLOCK_PARTIALS=next_power_of_2(num_partials),
        **tiles,
        **arguments,
        **pdl_arguments(),
    )


def make_tile_arguments(
    scheme: QuantScheme, out: QuantizedRows, valid_rows: ValidRows, *, allow_streaming: bool = False
) -> tuple[dict[str, object], int]:
    """Return (kernel arguments for outputs and tiles, number of programs).

    allow_streaming: whether to allow software-pipelined loads of large inputs (`tile_groups`).
    """
    rows, columns = out.q_RK.shape
    is_dynamic = scheme.activation_granularity != "tensor"
    group = (
        _get_columns_per_scale(scheme, columns)
        if is_dynamic
        else min(columns, _COLUMNS_PER_PROGRAM)
    )
    group = min(group, columns)
    groups = -(-columns // group)
    max_programs = _MAX_BATCHED_PROGRAMS if isinstance(valid_rows, BatchedRows) else rows
    segments, capacity = get_segments(rows, valid_rows)
    tiles = tile_rows(segments, capacity, group, max_programs)
    if allow_streaming:
        tiles = tile_groups(tiles, columns, group)
    if out.along_rows and len(out.scale) != segments:
        raise ShapeError("segments of scales", got=len(out.scale), need=segments)
    return {
        "q_ptr": out.q_RK,
        "scale_ptr": out.scale,
        "num_columns": columns,
        "group_size": group,
        "num_groups": groups,
        "SCALE_SOURCE": "dynamic" if is_dynamic else ("static" if scheme.static else "partials"),
        "QMAX": QMAX[scheme.activation],
        "ROUND_TO_INT": scheme.activation == "int8",
        "MIN_SCALE": MIN_SCALE,
        "GROUP_FITS_BLOCK": group <= tiles.block_c,
        "SCALES_GROUP_MAJOR": out.along_rows,
        "STAGES": tiles.stages,
        "BLOCK_GROUPS": tiles.block_g,
        "num_warps": tiles.num_warps,
        **tiles.make_row_kernel_arguments(),
    }, segments * tiles.programs_per_segment * -(-groups // tiles.block_g)


# ------------------------------------------------------------------------------ torch references


def dequantize_rows(q_RK: torch.Tensor, scale: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    """Return q * scale, float32 (R, K). `scale` is as in `QuantizedRows`."""
    if scheme.activation_granularity == "group":
        columns = q_RK.shape[1]
        scale = scale.repeat_interleave(min(_get_columns_per_scale(scheme, columns), columns), 1)[
            :, :columns
        ]
    return q_RK.float() * scale


def quantize_values(
    values_RK: torch.Tensor, scheme: QuantScheme, static_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize all rows of float32 values; return (q, scale), as in `QuantizedRows`."""
    if scheme.activation not in _ACTIVATIONS:
        raise _make_scheme_error(scheme)
    rows, columns = values_RK.shape
    qmax = QMAX[scheme.activation]
    if static_scale is not None:
        scale = static_scale
    else:
        magnitude = values_RK.abs()
        if scheme.activation_granularity == "tensor":
            amax = magnitude.amax().reshape(1) if rows else magnitude.new_zeros(1)
        else:
            group = min(_get_columns_per_scale(scheme, columns), columns)
            padded = torch.nn.functional.pad(magnitude, (0, -columns % group))
            # -1 does not work as a size if there are no rows.
            amax = padded.view(rows, padded.shape[1] // group, group).amax(2)
        # Divide by a tensor, because torch replaces division by a number with multiplication on a
        # GPU.
        scale = (amax / amax.new_tensor(qmax)).clamp(min=MIN_SCALE)
    inverse = 1 / scale
    if scheme.activation_granularity == "group":
        inverse = inverse.repeat_interleave(group, 1)[:, :columns]
    values = (values_RK * inverse).clamp(-qmax, qmax)
    if scheme.activation == "int8":
        values = values.round()
    return values.to(STORAGE[scheme.activation]), scale


def quantize_rows_ref(
    x_RK: torch.Tensor,
    scheme: QuantScheme,
    *,
    out: QuantizedRows,
    valid_rows: ValidRows = None,
    row_weights_R: torch.Tensor | None = None,
) -> None:
    """Torch reference of `quantize_rows`."""
    keep = make_valid_row_mask(x_RK, valid_rows)
    values = x_RK[keep].float()
    if row_weights_R is not None:
        values = values * row_weights_R[keep, None]
    _write_quantized(values, keep, scheme, out)


def activation_and_quantize_ref(
    x_RN: torch.Tensor,
    spec: ActivationSpec,
    scheme: QuantScheme,
    *,
    out: QuantizedRows,
    valid_rows: ValidRows = None,
) -> None:
    """Torch reference of `activation_and_quantize`."""
    keep = make_valid_row_mask(x_RN, valid_rows)
    values = gated_activation_ref(x_RN[keep], spec).to(x_RN.dtype).float()
    _write_quantized(values, keep, scheme, out)


def _write_quantized(
    values: torch.Tensor, keep: torch.Tensor, scheme: QuantScheme, out: QuantizedRows
) -> None:
    q, scale = quantize_values(values, scheme, out.scale if scheme.static else None)
    # Assign bytes, because torch cannot assign a single float8 value through a mask.
    out.q_RK.view(torch.uint8)[keep] = q.view(torch.uint8)
    if scheme.activation_granularity == "tensor" and not scheme.static:
        out.scale.copy_(scale)
    elif out.along_rows:
        out.scale.mT[keep.view(len(out.scale), -1)] = scale
    elif not scheme.static:
        out.scale[keep] = scale
