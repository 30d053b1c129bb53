"""Reads the scheme of a module from AMD Quark's options in a quantization_config.

The weight and the input of a module each have a specification with the dtype, the granularity of
scales (`qscheme`), and whether scales are computed in each call (`is_dynamic`).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from modular_kernel.models.quantization_keys import Mismatch, is_empty

_MX_GROUP = 32
_READ_KEYS = (
    "dtype",
    "qscheme",
    "group_size",
    "block_size",
    "is_dynamic",
    "scale_format",
    "scale_type",
)
# Options of the quantizer's search for scales. The files contain the result.
_HARMLESS_KEYS = (
    *("observer_cls", "round_method", "scale_calculation_mode", "zero_point_type"),
    *("enable_buffer_reuse", "max_input_numel"),
)
_ALLOWED_VALUES: dict[str, tuple[object, ...]] = {
    "symmetric": (True,),
    "is_scale_quant": (False,),
}
# Allowed values of `ch_axis`, the axis along which scales differ, by tensor and granularity. A
# weight is (N, K). Inputs have tokens along axis 0, or along axis 1 if there is a batch dimension.
# The value has no effect for other granularities.
_AXES: dict[tuple[str, object], tuple[int, ...]] = {
    ("weight", "per_channel"): (0,),
    ("weight", "per_group"): (1, -1),
    ("input_tensors", "per_channel"): (0, 1),
    ("input_tensors", "per_group"): (1, -1),
}
_ANY_AXIS = (0, 1, -1)
_SPECIFICATIONS = ("weight", "input_tensors")
_ALGORITHMS = ("gptq",)  # other algorithms may also transform activations


def quark_scheme(options: Mapping[str, Any]) -> str | None:
    """Return the scheme of a module, or None if its options are not supported.

    With mxfp4 and mxfp8, activations are not quantized.

    options: the options of the module, or of all modules (`global_quant_config`).
    """
    if set(unknown_quark_options(options)):
        return None
    weight, inputs = (_unwrap_single(options.get(name)) for name in _SPECIFICATIONS)
    if not isinstance(weight, Mapping) or weight.get("is_dynamic"):
        return None
    dtype, granularity = weight.get("dtype"), weight.get("qscheme")
    is_mx = weight.get("group_size") == _MX_GROUP and weight.get("scale_format") == "e8m0"
    if dtype == "fp4" and granularity == "per_group" and is_mx:
        return "mxfp4_w4a16"
    if dtype != "fp8_e4m3":
        return None
    if granularity == "per_group":
        return f"fp8_w8a16_block:block=1x{_MX_GROUP}" if is_mx else None
    if inputs is None:
        scheme_by_granularity = {
            "per_tensor": "fp8_w8a16_tensor",
            "per_channel": "fp8_w8a16_channel",
        }
        return scheme_by_granularity.get(str(granularity))
    if not isinstance(inputs, Mapping) or inputs.get("dtype") != "fp8_e4m3":
        return None
    granularities = (str(granularity), str(inputs.get("qscheme")), bool(inputs.get("is_dynamic")))
    if granularities == ("per_block", "per_group", True):
        block = weight.get("block_size")
        is_block = block == [128, 128] and inputs.get("group_size") == block[1]
        return "fp8_w8a8_block:block=128x128" if is_block else None
    return {
        ("per_tensor", "per_tensor", False): "fp8_w8a8_tensor:static=true",
        ("per_tensor", "per_tensor", True): "fp8_w8a8_tensor",
        ("per_channel", "per_channel", True): "fp8_w8a8_channel",
    }.get(granularities)


def unknown_quark_options(options: Mapping[str, Any]) -> Iterator[Mismatch]:
    """Yield (got, need) for unsupported options of a module that may change results."""
    for name, value in options.items():
        if name not in _SPECIFICATIONS:
            if not is_empty(value) and name != "target_device":
                yield f"global_quant_config.{name} = {value!r}", "weight and input_tensors only"
            continue
        specification = _unwrap_single(value)
        for key, option in specification.items() if isinstance(specification, Mapping) else ():
            if is_empty(option) or key in (*_READ_KEYS, *_HARMLESS_KEYS):
                continue
            allowed: tuple[object, ...] = _ALLOWED_VALUES.get(key, ())
            if key == "ch_axis":
                allowed = _AXES.get((name, str(specification.get("qscheme"))), _ANY_AXIS)
            if not any(option == item and type(option) is type(item) for item in allowed):
                need = " or ".join(map(repr, allowed)) or "no such key: it may change values"
                yield f"global_quant_config.{name}.{key} = {option!r}", need


def unknown_quark_keys(config: Mapping[str, Any]) -> Iterator[Mismatch]:
    """Yield (got, need) for unsupported top-level entries that may change results."""
    if not is_empty(config.get("layer_type_quant_config")):
        yield "layer_type_quant_config", "options by module name (layer_quant_config)"
    algorithms = config.get("algo_config") or []
    for algorithm in algorithms if isinstance(algorithms, list) else [algorithms]:
        name = algorithm.get("name") if isinstance(algorithm, Mapping) else algorithm
        if name not in _ALGORITHMS:
            yield f"algo_config: {name!r}", f"{' or '.join(_ALGORITHMS)}, or none"
    export = config.get("export")
    packing = export.get("weight_format") if isinstance(export, Mapping) else None
    if packing not in ("real_quantized", None):
        yield f"export.weight_format = {packing!r}", "'real_quantized'"


def _unwrap_single(specification: Any) -> Any:
    """Return the element of a list with a single element. Other values are returned unchanged."""
    is_single = isinstance(specification, list) and len(specification) == 1
    return specification[0] if is_single else specification
