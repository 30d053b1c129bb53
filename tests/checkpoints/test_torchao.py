"""torchao checkpoints: quantized tensor subclasses are loaded with their values, and invalid files
are refused.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_checkpoint_values import compute_output_error, dequantize_w1_w2

import modular_kernel as mk
from modular_kernel.checkpoints import format_of, loading, merge
from modular_kernel.checkpoints.inspection import inspect
from modular_kernel.checkpoints.matrix_layout import BlockedScale, Dim
from modular_kernel.checkpoints.quantization_map import QuantizationMap
from modular_kernel.checkpoints.torchao import dequantize_int4
from modular_kernel.errors import (
    ConfigurationError,
    DtypeError,
    InputError,
    ShapeError,
    WeightsError,
)
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.layers.rank_share import Share
from modular_kernel.layers.weight_loading import ExpertLoader
from modular_kernel.testing.checkpoints.samples import Sample, Tensors, write
from modular_kernel.testing.checkpoints.torchao import (
    INT4_OPTIONS,
    INT8_OPTIONS,
    TORCHAO_FORMATS,
    make_config,
    make_fqn_options,
    make_options,
    metadata_of,
    rename_to_torchao_0_14,
    stack_experts,
    tile_scales,
)

EXPERTS_PREFIX = "model.layers.0.mlp.experts"


def stack_with_old_names(tensors: Tensors) -> None:
    stack_experts(tensors)
    rename_to_torchao_0_14(tensors)


LAYOUTS = {
    "modules": None,
    "parameters": stack_experts,
    "modules, 0.14": rename_to_torchao_0_14,
    "parameters, 0.14": stack_with_old_names,
}


def change_metadata(folder: Path, **entries: str | None) -> None:
    """Replace entries of the file's metadata, or remove those whose value is None.

    Keys are written with "__" instead of ".".
    """
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
    metadata |= {key.replace("__", "."): value for key, value in entries.items()}
    remaining = {key: value for key, value in metadata.items() if value is not None}
    save_file(load_file(path), path, remaining)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", TORCHAO_FORMATS)
def test_loaded_values_equal_the_files(kind: str, layout: str, tmp_path: Path) -> None:
    sample = write(tmp_path, "qwen3_moe", kind, change=LAYOUTS[layout])
    loaded = mk.load_experts(tmp_path, 0, dtype="float32")
    assert str(loaded.problem_fields["quant"]) == TORCHAO_FORMATS[kind].scheme
    w1, w2 = dequantize_w1_w2(loaded)
    # The tolerances allow for the float32 rounding of products and, for int4, of sums with a zero
    # point.
    tolerances = {"rtol": 2.0**-22, "atol": 2.0**-26 if "int4" in kind else 0}
    torch.testing.assert_close(w1, sample.w1, **tolerances)
    torch.testing.assert_close(w2, sample.w2, **tolerances)
    assert compute_output_error(sample, mk.load_experts(tmp_path, 0)) <= TORCHAO_FORMATS[kind].bound


@pytest.mark.parametrize("layout", ["modules", "parameters"])
@pytest.mark.parametrize(
    "kind",
    [
        *("torchao int4", "torchao int8, groups", "torchao fp8, tensor"),
        *("torchao nvfp4", "torchao mxfp8", "torchao mxfp4"),
    ],
)
def test_rank_shares_equal_slices_of_all_weights(
    kind: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a lower limit of values per read, few rows are read at a time. Shares cut groups of 64
    columns.
    """
    write(tmp_path, "qwen3_moe", kind, intermediate=192, change=LAYOUTS[layout])
    all_weights = dequantize_w1_w2(mk.load_experts(tmp_path, 0, dtype="float32"))
    monkeypatch.setattr(loading, "_VALUES_PER_STEP", 1 << 10)
    for ep_rank in range(2):
        for tp_rank in range(2):
            share = mk.load_experts(tmp_path, 0, ep=(ep_rank, 2), tp=(tp_rank, 2), dtype="float32")
            (first, last), width = share.columns, share.problem_fields["intermediate"]
            w1, w2 = dequantize_w1_w2(share)
            experts = slice(2 * ep_rank, 2 * ep_rank + 2)
            rows = w1.unflatten(1, (2, width))[:, :, : last - first]
            assert torch.equal(
                rows, all_weights[0][experts].unflatten(1, (2, 192))[:, :, first:last]
            )
            assert torch.equal(w2[..., : last - first], all_weights[1][experts, :, first:last])


@pytest.mark.parametrize("columns", [(0, 128), (64, 192), (32, 96), (32, 160), (0, 30), (70, 90)])
def test_dequantize_int4_accepts_partial_groups(columns: tuple[int, int]) -> None:
    first, last = columns
    generator = torch.Generator().manual_seed(0)
    stored = TORCHAO_FORMATS["torchao int4"].make(8, 192, generator, 1.0)
    groups = slice(first // 64, -(-last // 64))
    tensors = {
        "_weight_qdata": stored.tensors["_weight_qdata"][:, first // 2 : last // 2],
        "_weight_scale": stored.tensors["_weight_scale"][groups],
        "_weight_zero_point": stored.tensors["_weight_zero_point"][groups],
    }
    values = dequantize_int4(tensors, 64, columns).double()
    torch.testing.assert_close(values, stored.values[:, first:last], rtol=2.0**-22, atol=2.0**-26)


def test_int4_is_rounded_once(tmp_path: Path) -> None:
    write(tmp_path, "qwen3_moe", "torchao int4")
    exact, rounded = mk.load_experts(tmp_path, 0, dtype="float32"), mk.load_experts(tmp_path, 0)
    assert torch.equal(rounded.weights.w1, exact.weights.w1.bfloat16())
    assert "int4 (torchao; dequantized)" in str(inspect(tmp_path))
    quantized_to_int8 = mk.load_experts(tmp_path, 0, quantize="int8_w8a16_group:group=32")
    assert "int4 (torchao; dequantized), quantized to int8" in repr(quantized_to_int8)


@pytest.mark.parametrize("kind", TORCHAO_FORMATS)
def test_merge_accepts_a_single_matrix(kind: str, tmp_path: Path) -> None:
    write(tmp_path, "qwen3_moe", kind)
    loaded, tensors = mk.load_experts(tmp_path, 0), load_file(tmp_path / "model.safetensors")
    format = format_of(TORCHAO_FORMATS[kind].config)
    base = f"{EXPERTS_PREFIX}.2.down_proj."
    matrix = {n.removeprefix(base): t for n, t in tensors.items() if n.startswith(base)}
    merged = merge(format, [matrix], torch.bfloat16, scheme=loaded.problem(1).scheme)
    assert torch.equal(merged.w, loaded.weights.w2[2])
    with pytest.raises(WeightsError, match="no _weight_scale"):
        merge(format, [{n: t for n, t in matrix.items() if n != "_weight_scale"}], torch.bfloat16)
    with pytest.raises(ConfigurationError, match=r"quant_config: got .*torchao"):
        ExpertLoader(Share(4, 128, 256), format)


def test_layer_output_is_within_the_bound(tmp_path: Path) -> None:
    sample = write(tmp_path, "qwen3_moe", "torchao int8, inputs", change=stack_experts)
    layer = FusedMoE.from_config(tmp_path, 0, top_k=2, experts="TorchExperts")
    layer.load(tmp_path)
    x, weights, ids = sample.inputs(24)
    y = layer(x.bfloat16(), (weights, ids)).double()
    expected = sample.expected_output(x.bfloat16().double(), weights, ids)
    assert (y - expected).norm() / expected.norm() <= 8e-2


def test_sharded_files_have_metadata(tmp_path: Path) -> None:
    sample = write(tmp_path, "qwen3_moe", "torchao int8", shards=3)
    torch.testing.assert_close(
        dequantize_w1_w2(mk.load_experts(tmp_path, 0))[0], sample.w1, rtol=2.0**-22, atol=0
    )


@pytest.mark.parametrize("kind", ["torchao int4", "torchao int8", "torchao fp8"])
def test_experts_without_scales_are_unquantized(kind: str, tmp_path: Path) -> None:
    """transformers 5 quantizes parameters only if the config names them, and writes no metadata for
    other parameters.
    """
    sample = write(tmp_path, "qwen3_moe", "bf16")
    quantization = {"quantization_config": TORCHAO_FORMATS[kind].config}
    (tmp_path / "config.json").write_text(json.dumps(sample.config | quantization))
    loaded = mk.load_experts(tmp_path, 0)
    assert repr(loaded).startswith("LoadedExperts(4 of 4 experts in none,")
    assert torch.equal(loaded.weights.w1.double(), sample.w1)


EXPERTS = r"re:.*\.experts\.(gate_up|down)_proj"


def test_module_names_select_the_options() -> None:
    """Exact names take precedence over regular expressions, which take precedence over the default.
    The order of the entries does not matter.
    """
    fp8 = make_options("Float8WeightOnlyConfig")
    names = {
        "_default": INT8_OPTIONS,
        r"re:.*\.mlp\.experts\..*": fp8,
        "re:.*": None,
        "model.layers.1.mlp.experts.gate_up_proj": INT4_OPTIONS,
        "model.layers.2.self_attn.q_proj": INT4_OPTIONS,
        "model.layers.2.self_attn.k_proj.weight": INT4_OPTIONS,
    }
    formats = QuantizationMap(make_config(make_fqn_options(names)))

    def format_name(module: str) -> str:
        return str(formats.format_of(f"model.layers.{module}"))

    assert format_name("0.mlp.experts.gate_up_proj") == "fp8_w8a16_channel (torchao)"
    assert format_name("1.mlp.experts.gate_up_proj") == "int4 (torchao; dequantized)"
    assert format_name("2.self_attn.q_proj") == format_name("2.self_attn.k_proj")
    assert format_name("2.self_attn.q_proj") == "int4 (torchao; dequantized)"
    assert format_name("2.self_attn.v_proj") == "None"
    del names["re:.*"]
    formats = QuantizationMap(make_config(make_fqn_options(names)))
    assert format_name("2.self_attn.v_proj") == "int8_w8a16_channel (torchao)"
    del names["_default"]
    formats = QuantizationMap(make_config(make_fqn_options(names)))
    assert format_name("2.self_attn.v_proj") == "None"
    skipped = make_config(INT8_OPTIONS) | {"modules_to_not_convert": ["model.layers.2.self_attn"]}
    formats = QuantizationMap(skipped)
    assert format_name("2.self_attn.v_proj") == "None"


def test_parameters_are_quantized_by_name(tmp_path: Path) -> None:
    sample = write(tmp_path, "qwen3_moe", "torchao int8", change=stack_experts)
    quantization = make_config(make_fqn_options({EXPERTS: INT8_OPTIONS}))
    config_json = json.dumps(sample.config | {"quantization_config": quantization})
    (tmp_path / "config.json").write_text(config_json)
    loaded = mk.load_experts(tmp_path, 0)
    assert str(loaded.problem_fields["quant"]) == "int8_w8a16_channel"
    config_folder = tmp_path / "config_only"
    config_folder.mkdir()
    (config_folder / "config.json").write_text(config_json)
    layer = FusedMoE.from_config(config_folder, 0, top_k=2, experts="TorchExperts")
    assert str(layer.problem.scheme) == "int8_w8a16_channel"


WEIGHT_KEY, LAYER_KEY = "experts__0__down_proj__weight", "model__layers__0__mlp__"
INVALID_METADATA: dict[str, tuple[str, str | None, str]] = {
    "none": ("torchao int8", None, "metadata of .*down_proj.weight: got no entry, need the JSON"),
    "no JSON": ("torchao int8", "{", "got no JSON"),
    "deep": ("torchao int8", "[" * 60000, "got no JSON"),
    "long": ("torchao int8", " " * 70000, "got 70000 characters"),
    "no object": ("torchao int8", "1", "got 1, need the JSON object of a Int8Tensor"),
    "class": (
        "torchao int8",
        '{"_type": "Float8Tensor", "_data": {"block_size": [1, 256]}}',
        "Float8Tensor.*need the JSON object of a Int8Tensor",
    ),
    "plain": ("torchao fp8", '{"_type": "Tensor"}', "need the JSON object of a Float8Tensor"),
    "block": (
        "torchao int8",
        '{"_type": "Int8Tensor", "_data": {"block_size": [1, 64]}}',
        r"got block_size \[1, 64\], need \[1, 256\] of int8_w8a16_channel",
    ),
    "int4 block": (
        "torchao int4",
        '{"_type": "Int4Tensor", "_data": {"block_size": [1, 32]}}',
        r"got block_size \[1, 32\], need \[1, 64\]",
    ),
    "int4 inputs": (
        "torchao int4",
        (
            '{"_type": "Int4Tensor", "_data": {"block_size": [1, 64], "activation_dtype": '
            '{"_type": "torch.dtype", "_data": "float8_e4m3fn"}}}'
        ),
        "float8_e4m3fn.*need bfloat16 activations",
    ),
    "inputs of weights only": (
        "torchao int8",
        (
            '{"_type": "Int8Tensor", "_data": {"block_size": [1, 256], "act_quant_kwargs": '
            '{"_data": {"granularity": {"_type": "PerRow"}}}}}'
        ),
        "got act_quant_kwargs of PerRow, need no act_quant_kwargs",
    ),
    "no inputs": (
        "torchao int8, inputs",
        '{"_type": "Int8Tensor", "_data": {"block_size": [1, 256], "act_quant_kwargs": null}}',
        "got no act_quant_kwargs, need act_quant_kwargs of PerRow",
    ),
    "bounds of inputs": (
        "torchao fp8, inputs",
        (
            '{"_type": "Float8Tensor", "_data": {"block_size": [1, 256], "act_quant_kwargs": '
            '{"_data": {"granularity": {"_type": "PerRow"}, "hp_value_ub": 3.0}}}}'
        ),
        "got act_quant_kwargs of PerRow with bounds, need act_quant_kwargs of PerRow",
    ),
    "rows of scales": (
        "torchao nvfp4",
        '{"_type": "NVFP4Tensor", "_data": {"block_size": 16, "is_swizzled_scales": false}}',
        "got is_swizzled_scales = False, need true",
    ),
    "nvfp4 block": (
        "torchao nvfp4",
        '{"_type": "NVFP4Tensor", "_data": {"block_size": 32, "is_swizzled_scales": true}}',
        "got block_size 32, need 16",
    ),
    "codes of mx": (
        "torchao mxfp8",
        (
            '{"_type": "MXTensor", "_data": {"block_size": 32, "is_swizzled_scales": true, '
            '"elem_dtype": {"_type": "torch.dtype", "_data": "float8_e5m2"}}}'
        ),
        "elem_dtype .*float8_e5m2.*need float8_e4m3fn",
    ),
}


@pytest.mark.parametrize("case", INVALID_METADATA)
def test_metadata_that_contradicts_the_config_is_refused(case: str, tmp_path: Path) -> None:
    kind, value, message = INVALID_METADATA[case]
    write(tmp_path, "qwen3_moe", kind)
    change_metadata(tmp_path, **{LAYER_KEY + WEIGHT_KEY: value})
    with pytest.raises(WeightsError, match=message) as caught:
        mk.load_experts(tmp_path, 0)
    assert "model.safetensors" in str(caught.value)


def set_weight_tensor(name: str, tensor: torch.Tensor) -> Any:
    """Return a function that sets a tensor of expert 1's down projection."""

    def change(tensors: Tensors) -> None:
        tensors[f"{EXPERTS_PREFIX}.1.down_proj._weight_{name}"] = tensor

    return change


def set_stacked_tensor(name: str, tensor: torch.Tensor) -> Any:
    """Return a function that stacks the experts and sets a tensor of their down projections."""

    def change(tensors: Tensors) -> None:
        stack_experts(tensors)
        tensors[f"{EXPERTS_PREFIX}._down_proj_{name}"] = tensor

    return change


INVALID_TENSORS: dict[str, tuple[str, Any, type[InputError], str]] = {
    "no scale": (
        "torchao int8",
        lambda tensors: tensors.pop(f"{EXPERTS_PREFIX}.1.down_proj._weight_scale"),
        WeightsError,
        "no .*1.down_proj._weight_scale",
    ),
    "scale shape": (
        "torchao int8",
        set_weight_tensor("scale", torch.ones(64, 1)),
        ShapeError,
        r"\(64, 1\)",
    ),
    "scale dtype": (
        "torchao fp8",
        set_weight_tensor("scale", torch.ones(128, 1).half()),
        DtypeError,
        "float16",
    ),
    "scale NaN": (
        "torchao fp8",
        set_weight_tensor("scale", torch.full((128, 1), float("nan"))),
        WeightsError,
        "got nan",
    ),
    "int4 scale NaN": (
        "torchao int4",
        set_weight_tensor("scale", torch.full((4, 128), float("nan"))),
        WeightsError,
        "got nan",
    ),
    "int4 zero inf": (
        "torchao int4",
        set_weight_tensor("zero_point", torch.full((4, 128), float("inf"))),
        WeightsError,
        "_weight_zero_point: got inf",
    ),
    "int4 codes": (
        "torchao int4",
        set_weight_tensor("qdata", torch.ones(128, 256, dtype=torch.int8)),
        ShapeError,
        r"got \(128, 256\), need \(128, 128\)",
    ),
    "codes dtype": (
        "torchao int8",
        set_weight_tensor("qdata", torch.ones(128, 256, dtype=torch.uint8)),
        DtypeError,
        "got uint8, need int8",
    ),
    "zero point": (
        "torchao int8",
        set_weight_tensor("zero_point", torch.ones(128, 1, dtype=torch.int8)),
        WeightsError,
        "_weight_zero_point: got a zero point of 1, need 0",
    ),
    "factor of inputs": (
        "torchao int8",
        set_weight_tensor("act_pre_scale", torch.ones(1)),
        WeightsError,
        "_weight_act_pre_scale, need 4 experts",
    ),
    "factor of inputs, stacked": (
        "torchao int8",
        set_stacked_tensor("act_pre_scale", torch.ones(1)),
        WeightsError,
        "_down_proj_act_pre_scale, need 4 experts",
    ),
    "rows of scales": (
        "torchao nvfp4",
        set_weight_tensor("scale", torch.ones(128, 16).to(torch.float8_e4m3fn)),
        ShapeError,
        r"got \(128, 16\), need \(32, 64\)",
    ),
    "mx scale NaN": (
        "torchao mxfp4",
        set_weight_tensor(
            "scale", torch.full((32, 32), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        ),
        WeightsError,
        "got 255",
    ),
    "no scale of the matrix": (
        "torchao nvfp4",
        lambda tensors: tensors.pop(f"{EXPERTS_PREFIX}.1.down_proj._weight_per_tensor_scale"),
        WeightsError,
        "no .*1.down_proj._weight_per_tensor_scale",
    ),
    "a scale of the matrix": (
        "torchao nvfp4, blocks",
        set_weight_tensor("per_tensor_scale", torch.ones(())),
        WeightsError,
        "_weight_per_tensor_scale, need 4 experts",
    ),
    "few experts, stacked": (
        "torchao int8",
        set_stacked_tensor("scale", torch.ones(3, 128, 1)),
        ShapeError,
        r"\(3, 128, 1\)",
    ),
}


@pytest.mark.parametrize("case", INVALID_TENSORS)
def test_invalid_tensors_are_refused(case: str, tmp_path: Path) -> None:
    """The error names the tensor, its value and what is needed instead."""
    kind, change, error_type, message = INVALID_TENSORS[case]
    write(tmp_path, "qwen3_moe", kind, change=change)
    with pytest.raises(error_type, match=message) as caught:
        mk.load_experts(tmp_path, 0)
    assert "down_proj" in str(caught.value)


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "qwen3_moe", "torchao int8")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightsError, match="need a complete safetensors file"):
        mk.load_experts(tmp_path, 0)


def test_pickled_tensors_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "qwen3_moe", "torchao int8")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigurationError, match=r"no safetensors, and pytorch_model\.bin.*pickle"):
        mk.load_experts(tmp_path, 0)


def make_torchao_config(name: str, *, version: int = 2, **data: Any) -> dict[str, Any]:
    return make_config(make_options(name, **data) | {"_version": version})


_FP8_W8A8 = "Float8DynamicActivationFloat8WeightConfig"
_PER_ROW, _PER_TENSOR = ({"_type": name, "_data": {}} for name in ("PerRow", "PerTensor"))
REFUSED_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "name": (make_config(INT8_OPTIONS) | {"quant_type": "int8_weight_only"}, "pickled tensors"),
    "no default": (
        make_config(INT8_OPTIONS) | {"quant_type": {"other": INT8_OPTIONS}},
        "the key default",
    ),
    "no class": (make_config({"_data": {}, "_version": 2}), "quant_type None"),
    "class": (
        make_torchao_config("UIntXWeightOnlyConfig"),
        "'UIntXWeightOnlyConfig', need one of Int4WeightOnly",
    ),
    "int4 and float8": (
        make_torchao_config("Float8DynamicActivationInt4WeightConfig"),
        "float8 activations, which no kernel here supports, need Int4WeightOnlyConfig",
    ),
    "intx": (make_torchao_config("IntxWeightOnlyConfig"), "codes of 1 to 8 bits"),
    "version": (
        make_torchao_config("Int8WeightOnlyConfig", version=1),
        "version 1, need version 2: .* pickled",
    ),
    "packing": (
        make_torchao_config(
            "Int4WeightOnlyConfig", int4_packing_format={"_data": "TILE_PACKED_TO_4D"}
        ),
        "int4_packing_format = 'TILE_PACKED_TO_4D', need PLAIN",
    ),
    "group": (
        make_torchao_config("Int4WeightOnlyConfig", group_size=48),
        "group_size = 48, need one of 32",
    ),
    "group type": (
        make_torchao_config("Int4WeightOnlyConfig", group_size="64"),
        "group_size = '64'",
    ),
    "int8 tensor": (
        make_torchao_config("Int8WeightOnlyConfig", granularity=_PER_TENSOR),
        "granularity PerTensor",
    ),
    "int8 group": (
        make_torchao_config(
            "Int8WeightOnlyConfig", granularity={"_type": "PerGroup", "_data": {"group_size": 3}}
        ),
        "granularity PerGroup",
    ),
    "axis": (
        make_torchao_config(
            "Int8WeightOnlyConfig", granularity={"_type": "PerRow", "_data": {"dim": 0}}
        ),
        "PerRow along the last dimension",
    ),
    "asymmetric": (
        make_torchao_config(
            "Int8DynamicActivationInt8WeightConfig", act_mapping_type={"_data": "ASYMMETRIC"}
        ),
        "act_mapping_type = 'ASYMMETRIC', need SYMMETRIC",
    ),
    "reduced range": (
        make_torchao_config("Int8DynamicActivationInt8WeightConfig", reduce_range=True),
        "reduce_range = True",
    ),
    "mixed": (
        make_torchao_config(_FP8_W8A8, granularity=[_PER_ROW, _PER_TENSOR]),
        "PerRow and PerTensor",
    ),
    "bound": (make_torchao_config(_FP8_W8A8, activation_value_ub=1.0), "activation_value_ub = 1.0"),
    "dtype": (
        make_torchao_config(
            "Float8WeightOnlyConfig", weight_dtype={"_type": "torch.dtype", "_data": "float8_e5m2"}
        ),
        "weight_dtype = 'FLOAT8_E5M2'",
    ),
    "mx dtype": (
        make_torchao_config(
            "MXDynamicActivationMXWeightConfig",
            version=1,
            weight_dtype={"_type": "torch.dtype", "_data": "float8_e5m2"},
        ),
        "weight_dtype = 'FLOAT8_E5M2', need float8_e4m3fn or FLOAT4_E2M1FN_X2",
    ),
    "mx block": (
        make_torchao_config("MXDynamicActivationMXWeightConfig", version=1, block_size=16),
        "block_size = 16",
    ),
    "nvfp4 version": (make_torchao_config("NVFP4WeightOnlyConfig"), "of version 2, need version 1"),
    "nvfp4 step": (
        make_torchao_config(
            "NVFP4DynamicActivationNVFP4WeightConfig", version=1, step={"_data": "prepare"}
        ),
        "step = 'PREPARE', need None or CONVERT",
    ),
    "unknown": (
        make_torchao_config("Float8WeightOnlyConfig", rotation="hadamard"),
        "rotation = 'hadamard'",
    ),
    "key": (make_config(INT8_OPTIONS) | {"rotation": "hadamard"}, "rotation = 'hadamard'"),
    "data": (make_config({"_type": "Int8WeightOnlyConfig", "_version": 2}), "_data = None"),
    "by name": (make_config(make_fqn_options({})), "need fqn_to_config"),
    "names that differ": (
        make_config(
            {
                "_type": "FqnToConfig",
                "_data": {
                    "fqn_to_config": {"a": INT8_OPTIONS},
                    "module_fqn_to_config": {"a": INT4_OPTIONS},
                },
            }
        ),
        "that differ, need one of them",
    ),
    "options of a name": (make_config(make_fqn_options({"a": 1})), "a = 1, need an object"),
}


@pytest.mark.parametrize("case", REFUSED_OPTIONS)
def test_unsupported_options_are_refused(case: str, tmp_path: Path) -> None:
    quantization, message = REFUSED_OPTIONS[case]
    with pytest.raises(ConfigurationError, match=message):
        format_of(quantization)
    sample: Sample = write(tmp_path, "qwen3_moe", "torchao int8")
    config_json = json.dumps(sample.config | {"quantization_config": quantization})
    (tmp_path / "config.json").write_text(config_json)
    with pytest.raises(ConfigurationError, match=message) as caught:
        mk.load_experts(tmp_path, 0)
    assert "config.json: quantization_config" in str(caught.value)


@pytest.mark.parametrize("rows", [5, 128, 200, 384])
@pytest.mark.parametrize("columns", [2, 8, 11])
def test_blocked_scales_are_unblocked(rows: int, columns: int) -> None:
    scale = torch.randint(0, 255, (rows, columns), dtype=torch.uint8)
    spec = BlockedScale("s", "scale", (Dim("N"), Dim("K", 16)), (torch.uint8,))
    stored, depth = tile_scales(scale), 16 * columns
    assert tuple(stored.shape) == spec.shape(rows, depth)
    assert torch.equal(spec.unblock(stored, (0, rows), (0, depth)), scale)
    stacked_scales = torch.stack([stored, stored])
    assert torch.equal(spec.unblock(stacked_scales, (0, rows), (0, depth))[1], scale)
    for first, last in ((0, 1), (rows // 2, rows), (rows - 1, rows), (rows // 3, rows // 2 + 1)):
        stored_rows = stored[spec.stored_slices((first, last), depth)]
        assert torch.equal(
            spec.unblock(stored_rows, (first, last), (16, 32)), scale[first:last, 1:2]
        )


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("llama4_text", r"got nvfp4_w4a16 \(torchao\) in a layout of whole matrices"),
        ("gpt_oss", r"_gate_up_proj_qdata: got \(4, 128, 256\), need \(4, 512, 64\)"),
    ],
)
def test_blocks_along_the_rows_are_refused(family: str, message: str, tmp_path: Path) -> None:
    """The parameters of these families have the shape (K, N), and torchao's blocks are along the
    last dimension.
    """

    def replace_by_nvfp4(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("_proj")]:
            codes = tensors.pop(name).to(torch.uint8)[..., ::2].contiguous()
            module, _, parameter = name.rpartition(".")
            tensors[f"{module}._{parameter}_qdata"] = codes
            scale = torch.ones(codes.shape[0], 32, 16).to(torch.float8_e4m3fn)
            tensors[f"{module}._{parameter}_scale"] = scale

    sample = write(tmp_path, family, "bf16", change=replace_by_nvfp4)
    quantization = TORCHAO_FORMATS["torchao nvfp4"].config
    config_json = json.dumps(sample.config | {"quantization_config": quantization})
    (tmp_path / "config.json").write_text(config_json)
    with pytest.raises((ConfigurationError, ShapeError), match=message):
        mk.load_experts(tmp_path, 0)


def test_unsupported_name_patterns_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="fqn_to_config has 're:"):
        QuantizationMap(make_config(make_fqn_options({r"re:(?=a).*": INT8_OPTIONS})))


def test_metadata_of_samples_equals_torchao() -> None:
    """The expected metadata is what torchao 0.18 writes for a parameter, without keys that loading
    does not read.
    """
    tensors = {"model.layers.0.mlp.experts._down_proj_qdata": torch.ones(4, 64, 96)}
    metadata = metadata_of(make_config(make_fqn_options({EXPERTS: INT8_OPTIONS})), tensors)
    assert json.loads(metadata["model.layers.0.mlp.experts.down_proj"]) == {
        "_type": "Int8Tensor",
        "_data": {"act_quant_kwargs": None, "block_size": [1, 1, 96]},
    }
