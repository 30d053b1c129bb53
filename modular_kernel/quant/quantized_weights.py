"""Quantized expert weights: required tensors, quantization and dequantization, static scales.

With stored value q, scale s and zero point z, a weight is

    float8_e4m3fn, int8    q s
    uint8, uint4           (q - z) s              z is 128 or 8 if the scheme has no zero points
    table8, table4         values[q] s            values: the table of an external scheme
    float4_e2m1            e2m1(q) 2^(s - 127)    mxfp4: s is a byte, E8M0
                           (e2m1(q) s) g          nvfp4: s is e4m3, g float32 per matrix

Two 4-bit values share a byte. The low nibble holds the value with the even index: k for weights, n
for zero points. Repacked e2m1 weights have another order (`modular_kernel.quant.repacking`). Scales
cover tiles of a matrix. The last tile of a row or column may be partial.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise

import torch

from modular_kernel.errors import (
    ConfigurationError,
    DeviceError,
    DtypeError,
    LayoutError,
    ShapeError,
    WeightsError,
)
from modular_kernel.quant import nvfp4, repacking
from modular_kernel.quant.scale_tiles import (
    ceil_div,
    compute_tile_bounds,
    e8m0_to_float,
    expand_scales,
    pack_pairs,
    unpack_pairs,
)
from modular_kernel.spec.problem import Problem, dtype_name
from modular_kernel.spec.quantization import QUANT_SCHEMES, QuantScheme
from modular_kernel.tensors import ExpertWeights, check_weight_tensors
from modular_kernel.utils.argument_checks import expect

SCHEMES = frozenset(QUANT_SCHEMES)  # names of the built-in schemes
# Names of the schemes whose activations are quantized before dispatch.
ACTIVATION_SCHEMES = frozenset(n for n in SCHEMES if QUANT_SCHEMES[n].dispatched_quantized)

# Format of weights -> dtype of the tensor that stores them.
STORAGE = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "uint4": torch.uint8,
    "float4_e2m1": torch.uint8,
    "table4": torch.uint8,
    "table8": torch.uint8,
}
# Largest magnitude of q, or of q - z, if the scheme has no zero points.
QMAX = {"float8_e4m3fn": 448.0, "int8": 127.0, "uint8": 127.0, "uint4": 7.0}
IMPLICIT_ZERO_POINT = {"uint8": 128, "uint4": 8}  # z of schemes without zero points
_MAX_CODE = {"uint8": 255, "uint4": 15}
# Lower bound of computed scales, so that weights of zero stay zero and 1 / scale stays finite.
MIN_SCALE = 2.0**-33

_QuantizeFunction = Callable[[torch.Tensor], Sequence[torch.Tensor | None]]
_MAX_WEIGHTS = 1 << 25  # weights per step, to limit the float32 temporaries

# Fields of ExpertWeights other than w1, w2, biases, expert_map, adapters and prepared tensors.
SCALE_FIELDS = (
    "w1_scale",
    "w2_scale",
    "w1_zero_point",
    "w2_zero_point",
    "a1_scale",
    "a2_scale",
    "w1_global_scale",
    "w2_global_scale",
    "w1_order",
)


@dataclass(frozen=True)
class TensorSpec:
    """Required shape and dtypes of one tensor.

    legend: the shape in letters, such as "(e, 2I, H)", for error messages.
    """

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    legend: str

    def __str__(self) -> str:
        return f"{self.legend} = {self.shape} {' or '.join(map(dtype_name, self.dtypes))}"


def values_per_word(scheme: QuantScheme) -> int:
    """Return how many values of a row are packed together, in a byte or in a repacked word.

    The length of a row must be a multiple of this number.
    """
    if scheme.repacked:
        return repacking.VALUES_PER_WORD
    return 2 if scheme.packed else 1


def list_indivisible_sizes(problem: Problem) -> tuple[str, ...]:
    """Return which of "hidden" and "intermediate" are not multiples of `values_per_word`."""
    step = values_per_word(problem.scheme)
    if step == 1:
        return ()
    return tuple(name for name in ("hidden", "intermediate") if getattr(problem, name) % step)


def weight_specs(problem: Problem) -> Mapping[str, TensorSpec]:
    """Return the specs of the ExpertWeights fields that the scheme uses. Other fields must be None.

    Biases and expert_map are not included. Raise ConfigurationError if a size is not a multiple of
    `values_per_word`.
    """
    expect("problem", problem, Problem)
    return _make_weight_specs(problem)


@cache
def _make_weight_specs(problem: Problem) -> Mapping[str, TensorSpec]:
    scheme = problem.scheme
    for name in list_indivisible_sizes(problem):
        step = values_per_word(scheme)
        need = f"a multiple of {step}: {scheme} packs that many values of a row together"
        raise ConfigurationError(name, got=getattr(problem, name), need=need)
    rows = "2I" if problem.act.gated else "I"
    specs = _make_matrix_specs("w1", problem, (problem.w1_rows, problem.hidden), (rows, "H"))
    specs |= _make_matrix_specs("w2", problem, (problem.hidden, problem.intermediate), ("H", "I"))
    if scheme.act_order:
        shape = (problem.e, problem.hidden)
        specs["w1_order"] = TensorSpec(shape, (torch.int32,), "(e, H)")
    if scheme.static:
        scale_spec = TensorSpec((1,), (torch.float32,), "(1,)")
        if scheme.scales_by_expert:
            scale_spec = TensorSpec((problem.e,), (torch.float32,), "(e,)")
        specs |= {"a1_scale": scale_spec, "a2_scale": scale_spec}
    return specs


def _make_matrix_specs(
    name: str, problem: Problem, sizes: tuple[int, int], letters: tuple[str, str]
) -> dict[str, TensorSpec]:
    scheme, e, (rows, depth), (n, k) = problem.scheme, problem.e, sizes, letters
    if not scheme.quantized:
        return {name: TensorSpec((e, rows, depth), (problem.dtype,), f"(e, {n}, {k})")}
    storage_dtypes = (STORAGE[scheme.weight],)
    if scheme.packed:
        specs = {name: TensorSpec((e, rows, depth // 2), storage_dtypes, f"(e, {n}, {k} / 2)")}
    else:
        specs = {name: TensorSpec((e, rows, depth), storage_dtypes, f"(e, {n}, {k})")}
    shape: tuple[int, ...]
    if scheme.granularity == "tensor":
        shape, legend = (e,), "(e,)"
    elif scheme.granularity == "channel":
        shape, legend = (e, rows), f"(e, {n})"
    elif scheme.granularity == "block":
        block_n, block_k = scheme.group
        shape = (e, ceil_div(rows, block_n), ceil_div(depth, block_k))
        legend = f"(e, ceil({n} / {block_n}), ceil({k} / {block_k}))"
    else:
        (group_size,) = scheme.group
        groups = f"ceil({k} / {group_size})"
        shape, legend = (e, rows, ceil_div(depth, group_size)), f"(e, {n}, {groups})"
        if scheme.zero_points and scheme.packed:
            zero_spec = TensorSpec(
                (e, rows // 2, ceil_div(depth, group_size)),
                (torch.uint8,),
                f"(e, {n} / 2, {groups})",
            )
            specs[f"{name}_zero_point"] = zero_spec
        elif scheme.zero_points:
            specs[f"{name}_zero_point"] = TensorSpec(shape, (torch.uint8,), legend)
    specs[f"{name}_scale"] = TensorSpec(shape, _get_scale_dtypes(problem), legend)
    if scheme.matrix_scales:
        count = count_matrices(name, problem)
        legend = f"(e, {count})"
        specs[f"{name}_global_scale"] = TensorSpec((e, count), (torch.float32,), legend)
    return specs


def count_matrices(name: str, problem: Problem) -> int:
    """Return the number of matrices stored in w1 or w2: 2 for w1 with gate and up, else 1."""
    return 2 if name == "w1" and problem.act.gated else 1


def _get_scale_dtypes(problem: Problem) -> tuple[torch.dtype, ...]:
    scheme = problem.scheme
    if scheme.weight == "float4_e2m1":
        return (torch.float8_e4m3fn if scheme.matrix_scales else torch.uint8,)
    if scheme.quantizes_activations or problem.dtype is torch.float32:
        return (torch.float32,)
    if scheme.weight in IMPLICIT_ZERO_POINT:
        # Checkpoints use either 16-bit dtype, independently of the dtype of the layer.
        return (torch.float32, torch.float16, torch.bfloat16)
    return (torch.float32, problem.dtype)


def get_default_scale_dtype(problem: Problem) -> torch.dtype:
    """Return the dtype of the weight scales that `quantize_weights` computes by default."""
    dtypes = _get_scale_dtypes(problem)
    # 4-bit integers in bf16 layers have bf16 scales, as in published checkpoints, because kernels
    # then need fewer instructions per weight. A scale that is rounded to bf16 can be too small for
    # the largest value of its group. The clamped value is wrong by at most 0.03 steps with 4 bits,
    # but by half a step with 8 bits. Therefore, 8-bit integers have float32 scales.
    is_4_bit_integer = problem.scheme.weight == "uint4" and problem.dtype is torch.bfloat16
    return torch.bfloat16 if is_4_bit_integer and torch.bfloat16 in dtypes else dtypes[0]


def check_weights_quantized(weights: ExpertWeights, problem: Problem, device: torch.device) -> None:
    """Check w1, w2, their scales, zero points and static scales against the scheme.

    w1 and w2 may have any strides. The other tensors must be contiguous. Raise the InputError of
    the first tensor that does not match.

    device: the device of x.
    """
    specs = weight_specs(problem)
    for name in ("w1", "w2", *SCALE_FIELDS):
        tensor, spec = getattr(weights, name), specs.get(name)
        if spec is None and tensor is not None:
            raise WeightsError(name, got="a tensor", need=f"None for quant={problem.quant}")
        if spec is not None and tensor is None:
            raise WeightsError(name, got="None", need=f"{spec} for quant={problem.quant}")
        if spec is not None and tensor is not None:
            _check_spec(name, tensor, spec, device)


def _check_spec(name: str, tensor: torch.Tensor, spec: TensorSpec, device: torch.device) -> None:
    if tuple(tensor.shape) != spec.shape:
        raise ShapeError(name, got=tuple(tensor.shape), need=f"{spec.legend} = {spec.shape}")
    if tensor.dtype not in spec.dtypes:
        need = " or ".join(map(dtype_name, spec.dtypes))
        raise DtypeError(name, got=dtype_name(tensor.dtype), need=need)
    if tensor.device != device:
        raise DeviceError(name, got=tensor.device, need=f"{device}, where x is")
    if name in SCALE_FIELDS and not tensor.is_contiguous():
        raise LayoutError(name, got=f"strides {tensor.stride()}", need="contiguous")


# ------------------------------------------------------------------------------ dequantization


def dequantize_weights(
    weights: ExpertWeights, name: str, problem: Problem, experts: slice = slice(None)
) -> torch.Tensor:
    """Return w1 or w2 of some experts in float32 (e, N, K).

    Columns of w1 are in the order of x, even if they are stored in another order (act-order).
    Columns of w2 are in the order in which they are stored.

    name: "w1" or "w2".
    experts: the local experts to return.
    """

    def get_field(suffix: str) -> torch.Tensor | None:
        tensor: torch.Tensor | None = getattr(weights, f"{name}{suffix}")
        return None if tensor is None else tensor[experts]

    w_eNK, scale = get_field(""), get_field("_scale")
    assert w_eNK is not None
    assert scale is not None
    values = dequantize(w_eNK, scale, get_field("_zero_point"), problem.scheme)
    if name == "w1" and weights.w1_order is not None:
        order, columns = weights.w1_order[experts].long(), values.shape[2]
        # Columns with an index out of range are moved to an extra column, which is dropped.
        order = torch.where((order < 0) | (order >= columns), columns, order)[:, None]
        padded = values.new_zeros(*values.shape[:2], columns + 1)
        values = padded.scatter_(2, order.expand_as(values), values)[..., :columns].contiguous()
    global_scale = get_field("_global_scale")
    if global_scale is None:
        return values
    matrix_of_row = nvfp4.compute_matrix_indices(
        values.shape[1], global_scale.shape[1], interleaved=problem.act.interleaved
    )
    return values * global_scale[:, matrix_of_row.to(global_scale.device), None]


def dequantize(
    w_eNK: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    scheme: QuantScheme,
) -> torch.Tensor:
    """Return the float32 values (e, N, K) of stored weights, without the global scale of nvfp4.

    The tensors have the shapes and dtypes that `weight_specs` declares.
    """
    if scheme.repacked:
        w_eNK = repacking.unrepack(w_eNK)
    if scheme.packed:
        w_eNK = unpack_pairs(w_eNK, 2)
    depth = w_eNK.shape[2]
    if scheme.weight == "float4_e2m1":
        values = nvfp4.decode_e2m1(w_eNK)
        if not scheme.matrix_scales:
            scale = e8m0_to_float(scale)
    elif scheme.external:
        values = w_eNK.new_tensor(scheme.values, dtype=torch.float32)[w_eNK.long()]
    else:
        values = w_eNK.float()
    rows = values.shape[1]
    if scheme.weight in IMPLICIT_ZERO_POINT:
        if zero_point is None:
            values = values - IMPLICIT_ZERO_POINT[scheme.weight]
        else:
            zero = unpack_pairs(zero_point, 1) if scheme.packed else zero_point
            values = values - expand_scales(zero.float(), scheme, rows, depth)
    return values * expand_scales(scale.float(), scheme, rows, depth)


# -------------------------------------------------------------------------------- quantization


def quantize_weights(
    weights: ExpertWeights, problem: Problem, *, scale_dtype: torch.dtype | None = None
) -> ExpertWeights:
    """Quantize weights in the scheme of `problem`, rounding to the nearest value.

    Results are bitwise reproducible. Temporary tensors are float32 copies of a few experts. A NaN
    or an infinity makes all weights that share its scale NaN or infinite.

    weights: w1 (e, N, H) and w2 (e, H, I) in any floating dtype of at least 16 bits, with any
        strides. Biases, expert_map and, for a static scheme, a1_scale and a2_scale are passed
        through.
    scale_dtype: dtype of the scales, which the scheme must allow. None uses
        `get_default_scale_dtype`. Ignored for fp4 schemes, which allow only one dtype.

    Raises an InputError if a tensor cannot be read (see `modular_kernel.utils.tensor_checks`) or
    does not match the problem, and ConfigurationError if a scale is infinite in float16.
    """
    specs, scheme = weight_specs(problem), problem.scheme
    expect("weights", weights, ExpertWeights)
    check_weight_tensors(weights)
    scale_dtype = get_default_scale_dtype(problem) if scale_dtype is None else scale_dtype
    expect("scale_dtype", scale_dtype, torch.dtype)
    sizes = {
        "w1": (problem.e, problem.w1_rows, problem.hidden),
        "w2": (problem.e, problem.hidden, problem.intermediate),
    }
    if not scheme.quantized:
        raise ConfigurationError("quant", got=problem.quant, need="a quantized scheme")
    if scheme.weight == "float4_e2m1":
        (scale_dtype,) = specs["w1_scale"].dtypes
    fields: dict[str, torch.Tensor | None] = {}
    for name, shape in sizes.items():
        w_eNK = getattr(weights, name)
        if tuple(w_eNK.shape) != shape:
            raise ShapeError(name, got=tuple(w_eNK.shape), need=f"(e, N, K) = {shape}")
        if not w_eNK.dtype.is_floating_point or w_eNK.element_size() < 2:
            raise DtypeError(name, got=dtype_name(w_eNK.dtype), need="unquantized weights")
        allowed = specs[f"{name}_scale"].dtypes
        if scale_dtype not in allowed:
            need = " or ".join(map(dtype_name, allowed))
            raise ConfigurationError("scale_dtype", got=dtype_name(scale_dtype), need=need)
        if scheme.act_order and name == "w1":
            order = compute_act_order(w_eNK.abs().amax(1))
            w_eNK = w_eNK.gather(2, order[:, None].expand_as(w_eNK))
            fields["w1_order"] = order.int()
        field_names = (name, f"{name}_scale", f"{name}_zero_point")
        if scheme.matrix_scales:
            field_names = (name, f"{name}_scale", f"{name}_global_scale")
            quantize: _QuantizeFunction = partial(
                nvfp4.quantize_matrices,
                matrices=count_matrices(name, problem),
                interleaved=problem.act.interleaved,
            )
        else:
            quantize = partial(quantize_rows, scheme=scheme, scale_dtype=scale_dtype)
        fields |= zip(field_names, _quantize_in_chunks(w_eNK, quantize), strict=True)
        if scale_dtype is torch.float16 and bool(fields[f"{name}_scale"].isinf().any()):  # type: ignore[union-attr]
            need = f"another dtype: scales of {name} exceed 65504"
            raise ConfigurationError("scale_dtype", got="float16", need=need)
    quantized = replace(weights, **fields)  # type: ignore[arg-type]
    check_weights_quantized(quantized, problem, weights.w1.device)
    return quantized


def compute_act_order(column_amax_eK: torch.Tensor) -> torch.Tensor:
    """Return the column order of w1 in act-order schemes, (e, K) int64: largest magnitudes first.

    column_amax_eK: the largest magnitude of each column.
    """
    return column_amax_eK.argsort(dim=1, descending=True, stable=True)


def _quantize_in_chunks(
    w_eNK: torch.Tensor, quantize: _QuantizeFunction
) -> list[torch.Tensor | None]:
    """Convert a few experts at a time to float32 and quantize them."""
    step = max(1, _MAX_WEIGHTS // w_eNK[0].numel())
    results: list[torch.Tensor | None] = []
    for start in range(0, len(w_eNK), step):
        chunk = slice(start, start + step)
        quantized = quantize(w_eNK[chunk].float())
        if not results:
            results = [p if p is None else p.new_empty(len(w_eNK), *p.shape[1:]) for p in quantized]
        for tensor, piece in zip(results, quantized, strict=True):
            if tensor is not None and piece is not None:
                tensor[chunk] = piece
    return results


def quantize_rows(
    w_eNK: torch.Tensor,
    scheme: QuantScheme,
    scale_dtype: torch.dtype,
    *,
    bounds: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Quantize float32 weights in any scheme except nvfp4. Return (codes, scales, zero points).

    Zero points are None if the scheme has none.

    w_eNK: the rows of the matrices, or some of their rows that consist of whole tiles.
    bounds: the result of `compute_tile_bounds`; None computes it.
    """
    if scheme.weight == "float4_e2m1":
        return _quantize_mxfp4(w_eNK, scheme)
    rows, depth = w_eNK.shape[1:]
    maximum, minimum = compute_tile_bounds(w_eNK, scheme) if bounds is None else bounds
    # Divisors are tensors because torch on a GPU replaces a division by a Python number with a
    # multiplication by its reciprocal, which rounds differently.
    if scheme.zero_points:
        value_range = maximum.clamp(min=0) - minimum.clamp(max=0)
        scale = value_range / value_range.new_tensor(_MAX_CODE[scheme.weight])
    else:
        qmax = max(map(abs, scheme.values)) if scheme.external else QMAX[scheme.weight]
        scale = torch.maximum(maximum, -minimum) / maximum.new_tensor(qmax)
    min_scale = max(MIN_SCALE, torch.finfo(scale_dtype).smallest_normal)
    scale = scale.clamp(min=min_scale).to(scale_dtype)
    q_eNK = w_eNK / expand_scales(scale.float(), scheme, rows, depth)
    if scheme.external:
        codes = _find_nearest_codes(q_eNK, scheme.values)
        return pack_pairs(codes, 2) if scheme.packed else codes, scale, None
    if scheme.weight in ("float8_e4m3fn", "int8"):
        qmax = QMAX[scheme.weight]
        if scheme.weight == "int8":
            q_eNK = q_eNK.round()
        return q_eNK.clamp(-qmax, qmax).to(STORAGE[scheme.weight]), scale, None
    max_code = _MAX_CODE[scheme.weight]
    zero = None
    zero_point: torch.Tensor | int = IMPLICIT_ZERO_POINT[scheme.weight]
    if scheme.zero_points:
        zero = (-minimum.clamp(max=0) / scale.float()).round().clamp(0, max_code)
        zero_point = expand_scales(zero, scheme, rows, depth)
        zero = pack_pairs(zero.to(torch.uint8), 1) if scheme.packed else zero.to(torch.uint8)
    codes = (q_eNK.round() + zero_point).clamp(0, max_code).to(torch.uint8)
    return pack_pairs(codes, 2) if scheme.packed else codes, scale, zero


def _find_nearest_codes(q_eNK: torch.Tensor, values: tuple[float, ...]) -> torch.Tensor:
    """Return the uint8 codes of the nearest table values. Ties go to the smaller value.

    If the table contains a value twice, the smaller code is used. A NaN gets the code of the
    largest value. Its dequantized value is still NaN, because its scale is NaN.
    """
    code_by_value = {value: code for code, value in reversed(list(enumerate(values)))}
    sorted_values = sorted(code_by_value)
    midpoints = [(low + high) / 2 for low, high in pairwise(sorted_values)]
    bounds = q_eNK.new_tensor(midpoints, dtype=torch.float64)
    index = torch.bucketize(q_eNK.double(), bounds)
    codes = torch.tensor(
        [code_by_value[v] for v in sorted_values], dtype=torch.uint8, device=q_eNK.device
    )
    return codes[index]


def _quantize_mxfp4(
    w_eNK: torch.Tensor, scheme: QuantScheme
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Quantize to mxfp4. A scale is the smallest power of two s with amax <= 7 s.

    Magnitudes between 6 s and 7 s become 6 s. Ties go to the even code. A group with a NaN or an
    infinity gets the scale NaN (255), because e2m1 has no NaN.
    """
    maximum, minimum = compute_tile_bounds(w_eNK, scheme)
    ratio = (torch.maximum(maximum, -minimum) / maximum.new_tensor(7.0)).clamp(min=MIN_SCALE)
    mantissa, exponent = torch.frexp(ratio)  # ratio = mantissa 2^exponent, mantissa in [0.5, 1)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    scale = (exponent + 127).clamp(1, 254).masked_fill(~ratio.isfinite(), 255).to(torch.uint8)
    scaled = w_eNK / expand_scales(e8m0_to_float(scale), scheme, *w_eNK.shape[1:])
    packed = pack_pairs(nvfp4.encode_e2m1(scaled), 2)
    return repacking.repack(packed) if scheme.repacked else packed, scale, None


# -------------------------------------------------------------------- static activation scales


def get_max_static_magnitude(scheme: QuantScheme) -> float:
    """Return the largest activation magnitude that is representable with a static scale of 1."""
    return nvfp4.MAX_VALUE * nvfp4.MAX_SCALE if scheme.scales_by_expert else 448.0


def static_scale(
    problem: Problem, max_magnitude: float, device: torch.device | str | None = None
) -> torch.Tensor:
    """Return the smallest float32 scale for activations up to `max_magnitude`, (1,).

    If the scheme has one scale per expert, the result is (e,). The scales then increase from the
    smallest scale to twice the smallest scale, so that tests detect if the scale of another expert
    is used.
    """
    unit = max_magnitude / get_max_static_magnitude(problem.scheme)
    if not problem.scheme.scales_by_expert:
        return torch.full((1,), unit, dtype=torch.float32, device=device)
    return torch.linspace(unit, 2 * unit, problem.e, dtype=torch.float32, device=device)
