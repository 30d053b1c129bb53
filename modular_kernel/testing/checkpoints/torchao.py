"""Make tiny matrices in the formats of torchao, and the metadata of their files.

    kind = TORCHAO_FORMATS["torchao int4"]      # config, make, scheme
    metadata_of(kind.config, tensors)           # {"x.weight": '{"_type": "Int4Tensor", ...}'}

`samples.write` uses the formats and the metadata. A matrix consists of the tensors
`_weight_qdata`, `_weight_scale`, for integers `_weight_zero_point`, and for some nvfp4 formats
`_weight_per_tensor_scale`. `stack_experts` stacks these tensors of all experts, and
`rename_to_torchao_0_14` renames them to the names of torchao 0.14. The layouts follow torchao's
documentation and share no code with `modular_kernel.checkpoints`.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import torch

from modular_kernel.testing.checkpoints.formats import (
    F64,
    FP8,
    Make,
    StoredMatrix,
    expand_tiles,
    mxfp4_quark,
    mxfp8,
    nvfp4,
)
from modular_kernel.testing.checkpoints.published_formats import CheckpointFormat

_ROW = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
_TENSOR = {"_type": "PerTensor", "_version": 1, "_data": {}}
_E4M3 = {"_type": "torch.dtype", "_data": "float8_e4m3fn"}


def _per_group(size: int) -> dict[str, Any]:
    return {"_type": "PerGroup", "_version": 1, "_data": {"group_size": size}}


def make_options(name: str, **data: Any) -> dict[str, Any]:
    """Return the options of the torchao class `name` with the fields `data`."""
    return {"_type": name, "_version": 2, "_data": {"set_inductor_config": True, **data}}


def make_config(default: Mapping[str, Any]) -> dict[str, Any]:
    """Return the quantization_config that transformers writes for the options `default`."""
    return {
        "include_input_output_embeddings": False,
        "modules_to_not_convert": None,
        "quant_method": "torchao",
        "quant_type": {"default": dict(default)},
        "untie_embedding_weights": False,
    }


def make_fqn_options(names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an FqnToConfig, which contains options by module name."""
    data = {"fqn_to_config": dict(names), "module_fqn_to_config": dict(names)}
    return {"_type": "FqnToConfig", "_version": 1, "_data": data}


def _make_int4(group: int, dtype: torch.dtype = torch.bfloat16) -> Make:
    """Return a maker of codes from -8 to 7.

    Each group of a row has a scale and a floating-point zero point.
    """

    def make(rows: int, columns: int, g: torch.Generator, gain: float) -> StoredMatrix:
        codes = torch.randint(-8, 8, (rows, columns), generator=g)
        shape = (rows, -(-columns // group))
        scale = ((0.6 + 0.8 * torch.rand(shape, generator=g)) * gain / 4 / columns**0.5).to(dtype)
        zero = (torch.randn(shape, generator=g) * gain / 4 / columns**0.5).to(dtype)
        packed = (codes[:, 0::2] & 15) | (codes[:, 1::2] & 15) << 4
        tensors = {
            "_weight_qdata": torch.where(packed > 127, packed - 256, packed).to(torch.int8),
            "_weight_scale": scale.T.contiguous(),
            "_weight_zero_point": zero.T.contiguous(),
        }
        values = codes * expand_tiles(scale, rows, columns, 1, group)
        return StoredMatrix(tensors, values + expand_tiles(zero, rows, columns, 1, group))

    return make


def _make_int8(group: int | None) -> Make:
    """Return a maker of codes with a scale per row or per group of a row, and zero points of 0."""

    def make(rows: int, columns: int, g: torch.Generator, gain: float) -> StoredMatrix:
        width = group or columns
        codes = torch.randint(-128, 128, (rows, columns), generator=g).to(torch.int8)
        shape = (rows, -(-columns // width))
        scale = (0.6 + 0.8 * torch.rand(shape, generator=g)) * gain / 64 / columns**0.5
        tensors = {"_weight_qdata": codes, "_weight_scale": scale}
        tensors["_weight_zero_point"] = torch.zeros(shape, dtype=torch.int8)
        return StoredMatrix(tensors, codes.to(F64) * expand_tiles(scale, rows, columns, 1, width))

    return make


def _make_fp8(*, shared_scale: bool) -> Make:
    """Return a maker of float8 codes.

    Each row has a scale, or all rows and experts share one.
    """

    def make(rows: int, columns: int, g: torch.Generator, gain: float) -> StoredMatrix:
        codes = (torch.randn(rows, columns, generator=g) * 100).clamp(-448, 448).to(FP8)
        scale = torch.full((1, 1), 0.01 / columns**0.5)
        if not shared_scale:
            scale = (0.6 + 0.8 * torch.rand(rows, 1, generator=g)) * gain / 100 / columns**0.5
        tensors = {"_weight_qdata": codes, "_weight_scale": scale}
        return StoredMatrix(tensors, codes.to(F64) * scale.to(F64))

    return make


def tile_scales(scale: torch.Tensor) -> torch.Tensor:
    """Rearrange scales (N, G) into tiles of 128 rows and 4 columns, padded with zeros.

    The tiles are stored in row-major order, each as 32 rows of 16 scales. The stored row r contains
    the scales of the tile's rows r, r + 32, r + 64 and r + 96.
    """
    rows, columns = -(-scale.shape[0] // 128), -(-scale.shape[1] // 4)
    padded = torch.zeros(128 * rows, 4 * columns, dtype=torch.uint8)
    padded[: scale.shape[0], : scale.shape[1]] = scale.view(torch.uint8)
    tile_rows = [
        padded[128 * i + 32 * q + r, 4 * j : 4 * j + 4]
        for i in range(rows)
        for j in range(columns)
        for r in range(32)
        for q in range(4)
    ]
    return torch.cat(tile_rows).view(scale.dtype).view(32 * rows, 16 * columns)


def untile_scales(tiles: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return the scales (rows, columns) from the tiles that `tile_scales` returned."""
    width = -(-columns // 4)
    positions = torch.arange(tiles.numel()).view(-1, width, 32, 4, 4)
    scale = torch.empty(rows, columns, dtype=torch.uint8)
    stored = tiles.view(torch.uint8).flatten()
    for row in range(rows):
        for column in range(columns):
            tile = positions[row // 128, column // 4]
            scale[row, column] = stored[tile[row % 32, row % 128 // 32, column % 4]]
    return scale.view(tiles.dtype)


def _with_tiled_scales(make_plain: Make, *, has_matrix_scale: bool = False) -> Make:
    """Return a maker like `make_plain`, but with scales in the tiles that `tile_scales` makes."""

    def make(rows: int, columns: int, g: torch.Generator, gain: float) -> StoredMatrix:
        plain = make_plain(rows, columns, g, gain)
        scale, values = plain.tensors["weight_scale"], plain.values
        if scale.dtype is torch.uint8:
            scale = scale.view(torch.float8_e8m0fnu)
        tensors = {"_weight_qdata": plain.tensors["weight"], "_weight_scale": tile_scales(scale)}
        if has_matrix_scale:
            tensors["_weight_per_tensor_scale"] = plain.tensors["weight_scale_2"].reshape(())
        elif "weight_scale_2" in plain.tensors:
            values = values / plain.tensors["weight_scale_2"].to(F64)
        return StoredMatrix(tensors, values)

    return make


_NVFP4_CODES = nvfp4("weight", "weight_scale_2", "input_scale", divides=False, shared_scale=True)
_INT8_CLASS, _DYNAMIC_INT8_CLASS = "Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"
_FP8_CLASS = "Float8WeightOnlyConfig"
_DYNAMIC_FP8_CLASS = "Float8DynamicActivationFloat8WeightConfig"
INT4_OPTIONS = make_options("Int4WeightOnlyConfig", group_size=64, int4_packing_format={
    "_type": "Int4PackingFormat", "_data": "PLAIN"})  # fmt: skip
INT8_OPTIONS = make_options(_INT8_CLASS, granularity=_ROW, group_size=None)
_DYNAMIC_INT8_FIELDS = {
    "act_mapping_type": {"_type": "MappingType", "_data": "SYMMETRIC"},
    "weight_only_decode": False,
    "reduce_range": False,
}
_DYNAMIC_FP8_FIELDS: dict[str, Any] = {
    "activation_dtype": _E4M3,
    "weight_dtype": _E4M3,
    "packing_format": {"_type": "Float8PackingFormat", "_data": "PLAIN"},
    "activation_value_lb": None,
    "activation_value_ub": None,
    "kernel_preference": {"_type": "KernelPreference", "_data": "AUTO"},
    "mm_config": {"_type": "Float8MMConfig", "_version": 1, "_data": {"use_fast_accum": True}},
}
_E2M1_DTYPE = {"_type": "torch.dtype", "_data": "float4_e2m1fn_x2"}


def _make_prototype_options(name: str, **data: Any) -> dict[str, Any]:
    return {"_type": name, "_version": 1, "_data": data}


def _make_mx_options(dtype: Mapping[str, str]) -> dict[str, Any]:
    dtypes = {"activation_dtype": dict(dtype), "weight_dtype": dict(dtype)}
    modes = {"scaling_mode": {"_type": "ScaleCalculationMode", "_data": "RCEIL"}}
    return _make_prototype_options(
        "MXDynamicActivationMXWeightConfig", block_size=32, **dtypes, **modes
    )


_W8A8_MAX_ERROR = 8e-2
TORCHAO_FORMATS: dict[str, CheckpointFormat] = {
    "torchao int4": CheckpointFormat(make_config(INT4_OPTIONS), _make_int4(64), "none"),
    "torchao int4, float32": CheckpointFormat(
        make_config(INT4_OPTIONS), _make_int4(64, torch.float32), "none"
    ),
    "torchao int8": CheckpointFormat(
        make_config(INT8_OPTIONS), _make_int8(None), "int8_w8a16_channel"
    ),
    "torchao int8, groups": CheckpointFormat(
        make_config(make_options(_INT8_CLASS, granularity=_per_group(64), group_size=None)),
        _make_int8(64),
        "int8_w8a16_group:group=64",
    ),
    "torchao int8, inputs": CheckpointFormat(
        make_config(make_options(_DYNAMIC_INT8_CLASS, granularity=_ROW, **_DYNAMIC_INT8_FIELDS)),
        _make_int8(None),
        "int8_w8a8_channel",
        _W8A8_MAX_ERROR,
    ),
    "torchao fp8": CheckpointFormat(
        make_config(make_options(_FP8_CLASS, weight_dtype=_E4M3)),
        _make_fp8(shared_scale=False),
        "fp8_w8a16_channel",
    ),
    "torchao fp8, tensor": CheckpointFormat(
        make_config(make_options(_FP8_CLASS, weight_dtype=_E4M3, granularity=_TENSOR)),
        _make_fp8(shared_scale=True),
        "fp8_w8a16_channel",
    ),
    "torchao fp8, inputs": CheckpointFormat(
        make_config(
            make_options(_DYNAMIC_FP8_CLASS, granularity=[_ROW, _ROW], **_DYNAMIC_FP8_FIELDS)
        ),
        _make_fp8(shared_scale=False),
        "fp8_w8a8_channel",
        _W8A8_MAX_ERROR,
    ),
    "torchao fp8, inputs, tensor": CheckpointFormat(
        make_config(
            make_options(_DYNAMIC_FP8_CLASS, granularity=[_TENSOR, _TENSOR], **_DYNAMIC_FP8_FIELDS)
        ),
        _make_fp8(shared_scale=True),
        "fp8_w8a8_tensor",
        _W8A8_MAX_ERROR,
    ),
    "torchao nvfp4": CheckpointFormat(
        make_config(
            _make_prototype_options("NVFP4WeightOnlyConfig", use_dynamic_per_tensor_scale=True)
        ),
        _with_tiled_scales(_NVFP4_CODES, has_matrix_scale=True),
        "nvfp4_w4a16",
    ),
    "torchao nvfp4, inputs": CheckpointFormat(
        make_config(
            _make_prototype_options(
                "NVFP4DynamicActivationNVFP4WeightConfig",
                use_triton_kernel=True,
                use_dynamic_per_tensor_scale=True,
                step=None,
            )
        ),
        _with_tiled_scales(_NVFP4_CODES, has_matrix_scale=True),
        "nvfp4_w4a16",
    ),
    "torchao nvfp4, blocks": CheckpointFormat(
        make_config(
            _make_prototype_options("NVFP4WeightOnlyConfig", use_dynamic_per_tensor_scale=False)
        ),
        _with_tiled_scales(_NVFP4_CODES),
        "nvfp4_w4a16",
    ),
    "torchao mxfp8": CheckpointFormat(
        make_config(_make_mx_options(_E4M3)),
        _with_tiled_scales(mxfp8("weight_scale", torch.float8_e8m0fnu)),
        "fp8_w8a16_block:block=1x32",
    ),
    "torchao mxfp4": CheckpointFormat(
        make_config(_make_mx_options(_E2M1_DTYPE)), _with_tiled_scales(mxfp4_quark), "mxfp4_w4a16"
    ),
}


def metadata_of(
    quantization: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> dict[str, str]:
    """Return the metadata of a file: the class and attributes of each weight, as JSON text.

    quantization: a quantization_config. If the config has options by module name, the first options
        are used for all weights.
    """
    weight_options = quantization["quant_type"]["default"]
    if weight_options["_type"] == "FqnToConfig":
        weight_options = next(iter(filter(None, weight_options["_data"]["fqn_to_config"].values())))
    metadata = dict[str, str]()
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*)\._(\w+)_qdata|(.*):qdata", name)
        if match is None:
            metadata.setdefault(name, '{"_type": "Tensor"}')
        else:
            attributes = _attributes(weight_options, tuple(tensor.shape))
            metadata[match[3] or f"{match[1]}.{match[2]}"] = json.dumps(attributes)
    return metadata | {"tensor_names": json.dumps(sorted(metadata)), "format": "pt"}


def _attributes(weight_options: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    name, fields = weight_options["_type"], weight_options["_data"]
    granularity: Any = fields.get("granularity") or _ROW
    granularity = granularity[-1] if isinstance(granularity, list) else granularity
    group = fields.get("group_size") or granularity["_data"].get("group_size") or shape[-1]
    block = [*(1 for _ in shape[1:]), group]
    if granularity["_type"] == "PerTensor":
        block = list(shape)
    if name == "Int4WeightOnlyConfig":
        logical_shape = [*shape[:-1], 2 * shape[-1]]
        return {"_type": "Int4Tensor", "_data": {"block_size": block, "shape": logical_shape}}
    if "NVFP4" in name or name.startswith("MX"):
        data: dict[str, Any] = {"is_swizzled_scales": True, "block_size": 16}
        if name.startswith("MX"):
            data |= {"block_size": 32, "elem_dtype": fields["weight_dtype"]}
        return {"_type": "MXTensor" if name.startswith("MX") else "NVFP4Tensor", "_data": data}
    kind = "Int8" if name in (_INT8_CLASS, _DYNAMIC_INT8_CLASS) else "Float8"
    act_quant_kwargs = None
    if "Dynamic" in name:
        act_quant_kwargs = {
            "_type": f"QuantizeTensorTo{kind}Kwargs",
            "_data": {"granularity": granularity},
        }
    return {
        "_type": f"{kind}Tensor",
        "_data": {"block_size": block, "act_quant_kwargs": act_quant_kwargs},
    }


def stack_experts(tensors: dict[str, torch.Tensor]) -> None:
    """Replace the tensors of each expert, named as in Qwen3-MoE, by stacked tensors, in place."""
    pattern = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\._weight_(\w+)")
    experts_by_key: dict[tuple[str, str, str], dict[int, torch.Tensor]] = {}
    for name in list(tensors):
        match = pattern.fullmatch(name)
        if match is not None:
            key = match[1], match[3], match[4]
            experts_by_key.setdefault(key, {})[int(match[2])] = tensors.pop(name)
    stacked = {
        key: torch.stack([by_expert[e] for e in range(len(by_expert))])
        for key, by_expert in experts_by_key.items()
    }
    for (block, projection, kind), tensor in stacked.items():
        if projection == "up":
            continue
        name = "down_proj"
        if projection == "gate":
            name, up = "gate_up_proj", stacked[block, "up", kind]
            if kind == "scale" and tensor.dtype in (FP8, torch.float8_e8m0fnu):
                qdata = stacked[block, "gate", "qdata"]
                columns = qdata.shape[2] * (2 if qdata.dtype is torch.uint8 else 1)
                sizes = qdata.shape[1], columns // (16 if tensor.dtype is FP8 else 32)
                pairs = zip(tensor, up, strict=True)
                tensor = torch.stack(
                    [
                        tile_scales(torch.cat([untile_scales(scale, *sizes) for scale in pair]))
                        for pair in pairs
                    ]
                )
            elif kind != "per_tensor_scale":  # gate and up have the same per-tensor scale
                # The scales and zero points of int4 weights have their rows in the last dimension.
                has_scale_dtype = tensor.dtype in (torch.bfloat16, torch.float32)
                has_rows_last = has_scale_dtype and _is_int4(experts_by_key)
                tensor = torch.cat([tensor, up], -1 if has_rows_last else 1)
        if kind == "per_tensor_scale":
            tensor = tensor[:, None, None]
        elif tensor.shape[1:] in ((1, 1), (2, 1)) and bool((tensor == tensor.flatten()[0]).all()):
            tensor = tensor[:1, :1]  # one scale for all experts
        tensors[f"{block}._{name}_{kind}"] = tensor.contiguous()


def _is_int4(experts_by_key: Mapping[tuple[str, str, str], Mapping[int, torch.Tensor]]) -> bool:
    return all(
        tensor.is_floating_point()
        for (_, _, kind), by_expert in experts_by_key.items()
        if kind == "zero_point"
        for tensor in by_expert.values()
    ) and any(kind == "zero_point" for _, _, kind in experts_by_key)


def rename_to_torchao_0_14(tensors: dict[str, torch.Tensor]) -> None:
    """Rename tensors to the names of torchao 0.14, in place."""
    for name in list(tensors):
        match = re.fullmatch(r"(.*)\._(\w+?)_(qdata|per_tensor_scale|scale|zero_point)", name)
        if match is not None:
            tensors[f"{match[1]}.{match[2]}:{match[3]}"] = tensors.pop(name)
