"""Reads the weights of torchao's tensor subclasses, as transformers stores them in safetensors.

A weight `x.weight` is stored as the tensors `x._weight_qdata` (codes q), `x._weight_scale` (scales
s) and so on, and a parameter `experts.gate_up_proj` as `experts._gate_up_proj_qdata` and so on.
torchao 0.14 uses the names `x.weight:qdata` and `experts.gate_up_proj:qdata`. The metadata in the
header of the file contain the class and the attributes of each weight, in JSON:

| class        | value     | tensors                                                             |
|--------------|-----------|---------------------------------------------------------------------|
| Float8Tensor | q * s     | s float32, (N, 1) or one number                                     |
| Int8Tensor   | q * s     | s float32, (N, 1) or (N, K / group); zero points, all 0             |
| Int4Tensor   | q * s + z | s and z (K / group, N) in the dtype of the model                    |
| NVFP4Tensor  | q * s * t | s float8, (N, K / 16), BlockedScale; t float32, one number, or none |
| MXTensor     | q * s     | s E8M0, (N, K / 32), BlockedScale; q e4m3 or e2m1                   |

Int4Tensor has codes from -8 to 7 with even k in the low nibble. z is a float that need not be a
multiple of s, so no integer scheme can represent the values. These weights are dequantized in
float32.
"""

import json
from collections.abc import Mapping, Sequence

import torch

from modular_kernel.checkpoints.matrix_layout import (
    FLOATS,
    BlockedScale,
    Dim,
    Role,
    StoredTensor,
)
from modular_kernel.errors import WeightsError
from modular_kernel.models.torchao_config import BLOCKED_SCALE_CLASSES, TorchaoFormat
from modular_kernel.spec.quantization import QuantScheme

INT4_CODES = "int4"  # name of the codes of Int4Tensor, for `Format.dequantized`
_N, _K = Dim("N"), Dim("K")
_MAX_METADATA = 1 << 16  # characters


def list_stored_tensors(format: TorchaoFormat, scheme: QuantScheme) -> tuple[StoredTensor, ...]:
    """Return the tensors that the files have for one matrix in `scheme`."""
    if format.tensor_class == "Int4Tensor":
        groups = (Dim("K", format.group), _N)
        return (
            _make_stored_tensor("qdata", "w", (_N, Dim("K", 2, indivisible=True)), torch.int8),
            _make_stored_tensor("scale", "scale", groups, *FLOATS),
            _make_stored_tensor("zero_point", "zero_point", groups, *FLOATS),
        )
    if format.tensor_class in BLOCKED_SCALE_CLASSES:
        return _make_blocked_tensors(format, scheme)
    dims: dict[str, tuple[Dim, ...]] = {"tensor": (), "channel": (_N,)}
    if scheme.granularity == "group":
        dims["group"] = (_N, Dim("K", scheme.group[0]))
    scale = _make_stored_tensor("scale", "scale", dims[scheme.granularity], torch.float32)
    if format.tensor_class == "Float8Tensor":
        return (_make_stored_tensor("qdata", "w", (_N, _K), torch.float8_e4m3fn), scale)
    zero = _make_stored_tensor("zero_point", "zero_point", scale.dims, torch.int8, optional=True)
    return (_make_stored_tensor("qdata", "w", (_N, _K), torch.int8), scale, zero)


def _make_blocked_tensors(format: TorchaoFormat, scheme: QuantScheme) -> tuple[StoredTensor, ...]:
    """Return the tensors of an NVFP4Tensor or MXTensor, whose scales are stored in tiles."""
    e8m0 = torch.float8_e8m0fnu
    scale_dtypes: tuple[torch.dtype, ...]
    if scheme.weight == "float8_e4m3fn":
        qdata, scale_dtypes = (
            _make_stored_tensor("qdata", "w", (_N, _K), torch.float8_e4m3fn),
            (e8m0,),
        )
    else:
        qdata = _make_stored_tensor("qdata", "w", (_N, Dim("K", 2, indivisible=True)), torch.uint8)
        scale_dtypes = (torch.float8_e4m3fn,) if scheme.matrix_scales else (torch.uint8, e8m0)
    dims = (_N, Dim("K", format.group))
    scale = BlockedScale("_weight_scale", "scale", dims, scale_dtypes, ("weight:scale",))
    if not scheme.matrix_scales:
        return (qdata, scale)
    input_scale = _make_stored_tensor(
        "act_per_tensor_scale", "unused", (), torch.float32, optional=True
    )
    if not format.matrix_scale:
        return (qdata, scale, input_scale)
    matrix_scale = _make_stored_tensor("per_tensor_scale", "global_scale", (), torch.float32)
    return (qdata, scale, matrix_scale, input_scale)


def _make_stored_tensor(
    name: str, role: Role, dims: tuple[Dim, ...], *dtypes: torch.dtype, optional: bool = False
) -> StoredTensor:
    return StoredTensor(f"_weight_{name}", role, dims, dtypes, (f"weight:{name}",), optional)


def get_parameter_name(name: str) -> str:
    """Return the name of a weight, which is its key in the metadata, such as "x.weight".

    name: name of its codes, such as "x._weight_qdata" or "experts._gate_up_proj_qdata".
    """
    if ":" in name:
        return name.partition(":")[0]
    module, _, last = name.rpartition("._")
    return f"{module}.{last.removesuffix('_qdata')}"


def check_metadata(
    what: str,
    metadata: Mapping[str, str],
    name: str,
    shape: Sequence[int],
    format: TorchaoFormat,
) -> None:
    """Raise WeightsError unless the metadata of a file describe a weight as `format`.

    what: name of the file, for messages.
    metadata: the metadata of the file.
    name, shape: name and shape of the codes.
    """
    key = get_parameter_name(name)
    what = f"{what}: metadata of {key}"
    entry = metadata.get(key, "")
    need = f"the JSON object of a {format.tensor_class}"
    if not entry or len(entry) > _MAX_METADATA:
        got = "no entry" if not entry else f"{len(entry)} characters"
        raise WeightsError(what, got=got, need=need)
    try:
        description = json.loads(entry)
    except (ValueError, RecursionError):
        raise WeightsError(what, got="no JSON", need=need) from None
    attributes = description.get("_data") if isinstance(description, dict) else None
    if not isinstance(attributes, dict) or description.get("_type") != format.tensor_class:
        raise WeightsError(what, got=entry[:120], need=need)
    is_blocked = format.tensor_class in BLOCKED_SCALE_CLASSES
    if is_blocked:
        _check_blocked(what, attributes, format)
    block_size = format.group if is_blocked else _compute_block_size(shape, format)
    if attributes.get("block_size") != block_size:
        got = f"block_size {str(attributes.get('block_size'))[:80]}"
        raise WeightsError(what, got=got, need=f"{block_size} of {format.scheme}")
    if not is_blocked:  # with blocked scales, activations stay in 16 bits
        _check_activations(what, attributes, format)


def _check_blocked(what: str, attributes: Mapping[str, object], format: TorchaoFormat) -> None:
    """Raise WeightsError unless scales are stored in tiles and codes have the type of `format`."""
    if attributes.get("is_swizzled_scales") is not True:
        got = f"is_swizzled_scales = {str(attributes.get('is_swizzled_scales'))[:80]}"
        raise WeightsError(what, got=got, need="true, as quantize_ writes them")
    if format.tensor_class == "MXTensor":
        need = "float8_e4m3fn" if format.scheme.startswith("fp8") else "float4_e2m1fn_x2"
        if attributes.get("elem_dtype") != {"_type": "torch.dtype", "_data": need}:
            got = f"elem_dtype {str(attributes.get('elem_dtype'))[:80]}"
            raise WeightsError(what, got=got, need=need)


def _compute_block_size(shape: Sequence[int], format: TorchaoFormat) -> list[int]:
    """Return the number of values per scale in each dimension of a weight of this shape."""
    if format.scheme.endswith("_tensor"):
        return list(shape)
    return [1] * (len(shape) - 1) + [format.group or shape[-1]]


def _check_activations(what: str, attributes: Mapping[str, object], format: TorchaoFormat) -> None:
    """Raise WeightsError unless activations are quantized as in the scheme of `format`."""
    activation = attributes.get("activation_dtype")
    if activation is not None and activation != {"_type": "torch.dtype", "_data": "bfloat16"}:
        got = f"activation_dtype {str(activation)[:80]}"
        raise WeightsError(what, got=got, need="bfloat16 activations")
    options, got = attributes.get("act_quant_kwargs"), "no act_quant_kwargs"
    granularity: object = None
    if options is not None:
        fields = options.get("_data") if isinstance(options, dict) else None
        fields = fields if isinstance(fields, dict) else {}
        granularity = fields.get("granularity")
        granularity = (
            granularity.get("_type") if isinstance(granularity, dict) else str(granularity)
        )
        bounds = [fields.get(key) for key in ("hp_value_lb", "hp_value_ub")]
        granularity = granularity if bounds == [None, None] else f"{granularity} with bounds"
        got = f"act_quant_kwargs of {granularity}"
    granularity_by_scheme = {
        "fp8_w8a8_tensor": "PerTensor",
        "fp8_w8a8_channel": "PerRow",
        "int8_w8a8_channel": "PerRow",
    }
    expected = granularity_by_scheme.get(format.scheme)
    if granularity != expected:
        need = "no act_quant_kwargs" if expected is None else f"act_quant_kwargs of {expected}"
        raise WeightsError(what, got=got[:120], need=f"{need}, as in the quantization_config")


def dequantize_int4(
    tensors: Mapping[str, torch.Tensor], group: int, columns: tuple[int, int]
) -> torch.Tensor:
    """Dequantize columns [a, b) of an Int4Tensor to (..., rows, columns) float32.

    tensors: the tensors by their names in `list_stored_tensors`. The codes cover the given
        columns. Scales and zero points cover all groups that contain any of these columns.

    Raises WeightsError for scales or zero points that are not finite.
    """
    packed = tensors["_weight_qdata"].view(torch.uint8)
    # Nibbles are in two's complement. `xor 8` adds 8, which is subtracted again after conversion.
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).bitwise_xor_(8)
    factors = {}
    for name in ("_weight_scale", "_weight_zero_point"):
        factors[name] = tensors[name].float()
        is_invalid = ~factors[name].isfinite()
        if bool(is_invalid.any()):
            raise WeightsError(name, got=float(factors[name][is_invalid][0]), need="finite numbers")
    scale, zero_point = (factor.mT for factor in factors.values())
    start, stop = columns
    values = codes.float().sub_(8)
    if start % group == 0 and (stop - start) % group == 0:
        grouped = values.view(*values.shape[:-1], -1, group)
        grouped.mul_(scale[..., None]).add_(zero_point[..., None])
        return values
    index = torch.arange(start, stop, device=values.device) // group - start // group
    return values.mul_(scale[..., index]).add_(zero_point[..., index])


def check_zero_points(zero_point: torch.Tensor | None) -> None:
    """Raise WeightsError unless all zero points of an Int8Tensor are 0."""
    if zero_point is not None and bool(zero_point.any()):
        got = f"a zero point of {int(zero_point[zero_point != 0][0])}"
        raise WeightsError("_weight_zero_point", got=got, need="0, as of symmetric weights")
