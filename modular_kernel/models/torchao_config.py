"""Reads the scheme and the storage format of a module from torchao's options.

In a quantization_config, transformers stores the options of `torchao.quantization.quantize_` as an
object with the name of their class and its fields:

    "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {...}}}

If modules have different options, the class is `FqnToConfig`, whose field maps names of modules and
parameters to options. `expand_options_by_name` makes them entries of the quantization_config.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modular_kernel.models.quantization_keys import Mismatch, is_empty

METHOD = "torchao"
OPTIONS_BY_NAME = "fqn_to_config"  # key that `expand_options_by_name` adds
_FQN_CLASSES = ("FqnToConfig", "ModuleFqnToConfig")
_INT4_GROUPS = (32, 64, 128, 256)
_MAX_GROUP = 1 << 20
_E4M3, _E2M1 = "float8_e4m3fn", "float4_e2m1fn_x2"
BLOCKED_SCALE_CLASSES = ("NVFP4Tensor", "MXTensor")  # with scales in tiles of 128 x 4
_NVFP4, _DYNAMIC_NVFP4 = "NVFP4WeightOnlyConfig", "NVFP4DynamicActivationNVFP4WeightConfig"
_MX = "MXDynamicActivationMXWeightConfig"
_VERSIONS = {_NVFP4: 1, _DYNAMIC_NVFP4: 1, _MX: 1}  # supported versions; 2 for other classes
_MISSING = object()


@dataclass(frozen=True)
class TorchaoFormat:
    """The storage format of a module's weights.

    tensor_class: class of the weight tensors, such as "Int8Tensor".
    scheme: the scheme of the weights; "none" if no scheme can represent the codes.
    group: columns per scale; 0 if a scale covers a row or a matrix.
    matrix_scale: a matrix has a scale in addition to the scales of its groups.
    """

    tensor_class: str
    scheme: str
    group: int = 0
    matrix_scale: bool = False


# Options that do not change the values of weights or the rounding of activations. `layout`, and the
# options for zero points and HQQ, apply to version 1 only.
_HARMLESS = ("set_inductor_config", "mm_config", "kernel_preference", "alg_id")
_HARMLESS_INT4 = (
    *("int4_choose_qparams_algorithm", "int4_tile_packed_ntile", "layout"),
    *("use_hqq", "zero_point_domain", "preserve_zero"),
)
# Allowed values of optional entries by class, in the form that `_normalize_value` returns.
_ALLOWED: dict[str, dict[str, tuple[object, ...]]] = {
    "Int4WeightOnlyConfig": {"int4_packing_format": ("PLAIN",)},
    "Int8WeightOnlyConfig": {"group_size": (None,)},
    "Int8DynamicActivationInt8WeightConfig": {
        "act_mapping_type": ("SYMMETRIC",),
        "weight_only_decode": (False,),
        "reduce_range": (False, None),
    },
    "Float8WeightOnlyConfig": {"weight_dtype": (_E4M3,)},
    "Float8DynamicActivationFloat8WeightConfig": {
        "weight_dtype": (_E4M3,),
        "activation_dtype": (_E4M3,),
        "packing_format": ("PLAIN", None),
        "activation_value_lb": (None,),
        "activation_value_ub": (None,),
    },
    _NVFP4: {"use_dynamic_per_tensor_scale": (True, False)},
    _DYNAMIC_NVFP4: {
        "use_dynamic_per_tensor_scale": (True, False),
        "step": (None, "CONVERT"),
    },
    _MX: {
        "block_size": (32,),
        "weight_dtype": (_E4M3, _E2M1.upper()),
        "activation_dtype": (_E4M3, _E2M1.upper()),
    },
}
_READ = ("granularity", "group_size")
_HARMLESS_BY_CLASS = {
    "Int4WeightOnlyConfig": _HARMLESS_INT4,
    "Int8DynamicActivationInt8WeightConfig": ("layout",),
    # These options select the rounding of weights, and the kernel.
    _DYNAMIC_NVFP4: ("use_triton_kernel",),
    _MX: ("scaling_mode",),
}
# Classes that are not supported: (contents of their files, the closest supported alternative).
_REFUSED = {
    "Float8DynamicActivationInt4WeightConfig": (
        "int4 codes with scales for float8 activations, which no kernel here supports",
        "Int4WeightOnlyConfig",
    ),
    "Int8DynamicActivationIntxWeightConfig": (
        "codes of 1 to 8 bits for int8 activations, with zero points",
        "Int8DynamicActivationInt8WeightConfig",
    ),
    "IntxWeightOnlyConfig": (
        "codes of 1 to 8 bits, each in a byte, with zero points",
        "Int8WeightOnlyConfig or Int4WeightOnlyConfig",
    ),
}
_ALTERNATIVE = f"{', '.join(_ALLOWED)}, or unquantized files with quantize="


def expand_options_by_name(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a quantization_config with options by module name, if it has an FqnToConfig.

    The key OPTIONS_BY_NAME replaces quant_type. Its value maps names to {"quant_type": ...}, or to
    None for unquantized modules. The last name is "_default", which stands for all other modules.
    A config without an FqnToConfig is returned unchanged.

    Raises ValueError(got, need) unless `quant_type` has the form that transformers 4.53 and newer
    write.
    """
    options = _get_default_options(config)
    if options.get("_type") not in _FQN_CLASSES:
        return dict(config)
    data = options.get("_data")
    data = data if isinstance(data, Mapping) else {}
    keys = (OPTIONS_BY_NAME, "module_fqn_to_config")
    tables = [data[key] for key in keys if not is_empty(data.get(key))]
    if not tables or not all(isinstance(table, Mapping) for table in tables):
        need = f"{OPTIONS_BY_NAME}: an object of options by name"
        raise ValueError(f"quant_type: {options['_type']} with {sorted(map(str, data))}", need)
    if tables[0] != tables[-1]:
        got = f"quant_type: {OPTIONS_BY_NAME} and module_fqn_to_config that differ"
        raise ValueError(got, "one of them, or equal objects")
    entry_by_name = {str(name): entry for name, entry in tables[0].items()}
    for name, entry in entry_by_name.items():
        if not isinstance(entry, Mapping | None):
            need = "an object with _type and _data, or null"
            raise ValueError(f"quant_type: {name[:80]} = {entry!r}"[:200], need)
    # As in torchao, exact names take precedence over regexes.
    exact = {name: entry for name, entry in entry_by_name.items() if not name.startswith("re:")}
    default = exact.pop("_default", None)
    regexes = {name: entry for name, entry in entry_by_name.items() if name.startswith("re:")}
    ordered = exact | regexes | {"_default": default}
    other_entries = {key: value for key, value in config.items() if key != "quant_type"}
    return other_entries | {
        OPTIONS_BY_NAME: {
            name: None if entry is None else {"quant_type": {"default": dict(entry)}}
            for name, entry in ordered.items()
        }
    }


def _get_default_options(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object with _type, _version and _data in the quant_type of a config."""
    quant_type = config.get("quant_type")
    if isinstance(quant_type, str):
        need = (
            "an object with _type, _version and _data, as transformers writes with safetensors: "
            "a name belongs to files of pickled tensors, which are not read"
        )
        raise ValueError(f"quant_type = {quant_type!r}"[:200], need)
    options = None
    if isinstance(quant_type, Mapping) and len(quant_type) == 1:
        options = quant_type.get("default")
    if not isinstance(options, Mapping):
        need = "an object with the key default, which has _type, _version and _data"
        raise ValueError(f"quant_type = {quant_type!r}"[:200], need)
    return options


def torchao_format(config: Mapping[str, Any]) -> TorchaoFormat:
    """Return the storage format of a module.

    config: the quantization_config of the module, without an FqnToConfig.

    Raises ValueError(got, need) for unsupported options.
    """
    options = _get_default_options(config)
    name, data = options.get("_type"), options.get("_data")
    if name in _REFUSED:
        meaning, nearest = _REFUSED[str(name)]
        raise ValueError(f"quant_type {name}, {meaning}", nearest)
    if name not in _ALLOWED:
        raise ValueError(f"quant_type {name!r}"[:200], f"one of {_ALTERNATIVE}")
    if not isinstance(data, Mapping):
        raise ValueError(f"quant_type {name}: _data = {data!r}"[:200], "an object of options")
    version = _VERSIONS.get(str(name), 2)
    if options.get("_version", 1) != version:
        need = f"version {version}"
        if version == 2:
            need += ": tensors of version 1 are pickled, and pickles are not read"
        raise ValueError(f"quant_type {name} of version {options.get('_version', 1)}"[:200], need)
    for got, need in _find_unknown_options(str(name), data):
        raise ValueError(f"quant_type {name}: {got}"[:200], need)
    return _FORMATS[str(name)](str(name), data)


def _find_unknown_options(name: str, data: Mapping[str, Any]) -> Iterator[Mismatch]:
    """Yield (got, need) for unsupported options that could change values."""
    harmless = (*_HARMLESS, *_HARMLESS_BY_CLASS.get(name, ()))
    for key, value in data.items():
        if key in _ALLOWED[name]:
            allowed = _ALLOWED[name][key]
            normalized = _normalize_value(value)
            if not any(normalized == item and type(normalized) is type(item) for item in allowed):
                yield f"{key} = {normalized!r}", " or ".join(map(str, allowed))
        elif key not in (*_READ, *harmless) and not is_empty(value):
            yield (
                f"{key} = {value!r}",
                "no such option: it may change values, and it is not implemented",
            )


def _normalize_value(value: object) -> object:
    """Return the name of an enum member or dtype that is stored as an object, or another value.

    Names are in capital letters, except for float8_e4m3fn.
    """
    if isinstance(value, Mapping) and isinstance(value.get("_data"), str):
        value = value["_data"]
        return value if value == _E4M3 else str(value).upper()
    return value.upper() if isinstance(value, str) and value != _E4M3 else value


def _read_granularities(name: str, data: Mapping[str, Any], default: str) -> list[tuple[str, int]]:
    """Return [(class, group size or 0)] of the granularity, or of the granularities of operands."""
    granularity = data.get("granularity")
    if granularity is None:
        return [(default, 0)]
    items: Sequence[object] = granularity if isinstance(granularity, list) else [granularity]
    granularities = []
    for item in items:
        kind = item.get("_type") if isinstance(item, Mapping) else None
        fields = item.get("_data", {}) if isinstance(item, Mapping) else None
        fields = fields if isinstance(fields, Mapping) else {"_": _MISSING}
        group = fields.get("group_size", 0)
        row_axis = fields.get("dim", -1)
        is_known = set(fields) <= {"group_size", "dim"} and row_axis == -1 and type(group) is int
        if not isinstance(kind, str) or not is_known or (kind == "PerGroup") != (group != 0):
            need = "PerRow along the last dimension, PerTensor or PerGroup"
            raise ValueError(f"quant_type {name}: granularity {granularity!r}"[:200], need)
        granularities.append((kind, group))
    return granularities


def _make_int4_format(name: str, data: Mapping[str, Any]) -> TorchaoFormat:
    group = data.get("group_size", 128)
    if type(group) is not int or group not in _INT4_GROUPS:
        need = f"one of {', '.join(map(str, _INT4_GROUPS))}"
        raise ValueError(f"quant_type {name}: group_size = {group!r}"[:200], need)
    return TorchaoFormat("Int4Tensor", "none", group)


def _make_int8_format(name: str, data: Mapping[str, Any]) -> TorchaoFormat:
    kind, group = _read_single_granularity(name, data, "PerRow")
    if kind == "PerRow":
        return TorchaoFormat("Int8Tensor", "int8_w8a16_channel")
    if kind == "PerGroup" and 2 <= group <= _MAX_GROUP and group % 2 == 0:
        return TorchaoFormat("Int8Tensor", f"int8_w8a16_group:group={group}", group)
    raise _make_granularity_error(name, kind, "PerRow, or PerGroup of an even number of columns")


def _make_int8_dynamic_format(name: str, data: Mapping[str, Any]) -> TorchaoFormat:
    kinds = {kind for kind, _ in _read_granularities(name, data, "PerRow")}
    if kinds != {"PerRow"}:
        raise _make_granularity_error(name, " and ".join(sorted(kinds)), "PerRow")
    return TorchaoFormat("Int8Tensor", "int8_w8a8_channel")


def _make_float8_format(name: str, data: Mapping[str, Any]) -> TorchaoFormat:
    kind, _ = _read_single_granularity(name, data, "PerRow")
    schemes = {"PerRow": "fp8_w8a16_channel", "PerTensor": "fp8_w8a16_tensor"}
    if kind not in schemes:
        raise _make_granularity_error(name, kind, "PerRow or PerTensor")
    return TorchaoFormat("Float8Tensor", schemes[kind])


def _make_float8_dynamic_format(name: str, data: Mapping[str, Any]) -> TorchaoFormat:
    kinds = {kind for kind, _ in _read_granularities(name, data, "PerTensor")}
    schemes = {"PerRow": "fp8_w8a8_channel", "PerTensor": "fp8_w8a8_tensor"}
    if len(kinds) != 1 or not kinds <= set(schemes):
        raise _make_granularity_error(name, " and ".join(sorted(kinds)), "PerRow or PerTensor")
    return TorchaoFormat("Float8Tensor", schemes[kinds.pop()])


def _make_nvfp4_format(name: str, data: Mapping[str, Any]) -> TorchaoFormat:
    """Return the format of nvfp4 weights. Activations are not quantized.

    Calibrated weights (`step`) always have a matrix scale.
    """
    has_scale = data.get("use_dynamic_per_tensor_scale", True) or not is_empty(data.get("step"))
    return TorchaoFormat("NVFP4Tensor", "nvfp4_w4a16", 16, matrix_scale=bool(has_scale))


def _make_mx_format(name: str, data: Mapping[str, Any]) -> TorchaoFormat:
    """Return the format of mxfp8 or mxfp4 weights. Activations are not quantized."""
    is_fp8 = _normalize_value(data.get("weight_dtype", _E4M3)) == _E4M3
    return TorchaoFormat("MXTensor", "fp8_w8a16_block:block=1x32" if is_fp8 else "mxfp4_w4a16", 32)


def _read_single_granularity(name: str, data: Mapping[str, Any], default: str) -> tuple[str, int]:
    granularities = _read_granularities(name, data, default)
    if len(granularities) != 1:
        got = " and ".join(kind for kind, _ in granularities)
        raise _make_granularity_error(name, got, "one granularity")
    return granularities[0]


def _make_granularity_error(name: str, got: str, need: str) -> ValueError:
    return ValueError(f"quant_type {name}: granularity {got}"[:200], need)


_FORMATS: dict[str, Callable[[str, Mapping[str, Any]], TorchaoFormat]] = {
    "Int4WeightOnlyConfig": _make_int4_format,
    "Int8WeightOnlyConfig": _make_int8_format,
    "Int8DynamicActivationInt8WeightConfig": _make_int8_dynamic_format,
    "Float8WeightOnlyConfig": _make_float8_format,
    "Float8DynamicActivationFloat8WeightConfig": _make_float8_dynamic_format,
    _NVFP4: _make_nvfp4_format,
    _DYNAMIC_NVFP4: _make_nvfp4_format,
    _MX: _make_mx_format,
}
