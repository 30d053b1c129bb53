"""Tiny checkpoints whose layers have different formats, with the exact weights of each layer."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from modular_kernel.testing.checkpoints.published_formats import CHECKPOINT_FORMATS
from modular_kernel.testing.checkpoints.samples import Sample, Tensors, save, write

Config = dict[str, Any]
_AWQ, _GPTQ, _FP8 = (
    CHECKPOINT_FORMATS[format_name].config for format_name in ("awq", "gptq", "deepseek fp8")
)
assert _AWQ is not None
assert _GPTQ is not None
assert _FP8 is not None


def _make_config_group(format_name: str, *targets: str) -> Config:
    config = CHECKPOINT_FORMATS[format_name].config
    assert config is not None
    group: Config = config["config_groups"]["group_0"]
    return group | {"targets": list(targets), "format": config["format"]}


EXPERTS = "model.layers.{}.mlp.experts"
# Name -> (format of each layer, quantization_config). Tensor names are those of Qwen3.
MIXED: dict[str, tuple[dict[int, str], Config]] = {
    "AWQ and bf16": (
        {0: "bf16", 1: "awq", 2: "awq"},
        _AWQ | {"modules_to_not_convert": ["model.layers.0.", "mlp.gate"]},
    ),
    "compressed-tensors, two groups": (
        {0: "compressed int4", 1: "compressed fp8 channel", 2: "compressed int4"},
        {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": {
                "group_0": _make_config_group(
                    "compressed int4", r"re:.*layers\.(0|2)\.mlp\.experts\..*"
                ),
                "group_1": _make_config_group(
                    "compressed fp8 channel", r"re:.*layers\.1\.mlp\.experts\..*"
                ),
            },
            "ignore": ["lm_head", "re:.*mlp.gate$"],
        },
    ),
    "GPTQ, dynamic": (
        {0: "gptq", 1: "gptq int8", 2: "gptq, zero points", 3: "bf16"},
        _GPTQ
        | {
            "dynamic": {
                r"-:.*\.mlp\.gate$": {},
                r"-:model\.layers\.3\..*": {},
                r"+:.*layers\.1\.mlp\.experts.*": {"bits": 8},
                r"+:.*layers\.2\.mlp\.experts.*": {"sym": False},
            }
        },
    ),
    "fp8, excluded layers": (
        {0: "deepseek fp8", 1: "bf16"},
        _FP8 | {"ignored_layers": [EXPERTS.format(1), "lm_head"]},
    ),
    "modelopt, mixed precision": (
        {0: "modelopt fp8", 1: "modelopt nvfp4", 2: "bf16"},
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                EXPERTS.format(0): {"quant_algo": "FP8"},
                EXPERTS.format(1): {"quant_algo": "NVFP4", "group_size": 16},
            },
        },
    ),
    "auto-round": (
        {0: "bf16", 1: "gptq"},
        _GPTQ | {"extra_config": {EXPERTS.format(0): {"bits": 16, "data_type": "float"}}},
    ),
}


def write_mixed(
    folder: Path,
    format_by_layer: dict[int, str],
    quantization: Config | None,
    *,
    num_layers: int | None = None,
    **sizes: Any,
) -> dict[int, Sample]:
    """Write a Qwen3 checkpoint; return the samples of its layers.

    format_by_layer: name of the format of each layer. num_layers: num_hidden_layers in config.json.
    Layers beyond it are additional layers, such as MTP layers. sizes: as for `samples.write`.
    """
    tensors: Tensors = {}
    samples = dict[int, Sample]()
    for layer, format_name in format_by_layer.items():
        layer_folder = folder / f"part{layer}"
        samples[layer] = write(
            layer_folder, "qwen3_moe", format_name, layers=(layer,), seed=layer, **sizes
        )
        tensors |= load_file(layer_folder / "model.safetensors")
    config = next(iter(samples.values())).config | {
        "num_hidden_layers": num_layers or len(format_by_layer)
    }
    config["torch_dtype"] = "bfloat16"
    config.pop("quantization_config", None)
    config |= {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    save(folder, tensors)
    return samples


def fuse_experts(folder: Path, layer: int) -> None:
    """Store the unquantized experts of a layer as gate_up_proj and down_proj, like transformers."""
    path, block = folder / "model.safetensors", EXPERTS.format(layer)
    tensors = load_file(path)
    weights_by_projection: dict[str, list[torch.Tensor]] = {}
    for projection in ("gate", "up", "down"):
        names = [
            name
            for name in tensors
            if re.fullmatch(rf"{block}\.\d+\.{projection}_proj\.weight", name)
        ]
        names.sort(key=lambda name: int(name.split(".")[-3]))
        weights_by_projection[projection] = [tensors.pop(name) for name in names]
    gate, up, down = (
        torch.stack(weights_by_projection[projection]) for projection in ("gate", "up", "down")
    )
    tensors |= {f"{block}.gate_up_proj": torch.cat([gate, up], 1), f"{block}.down_proj": down}
    save_file(tensors, path, {"format": "pt"})
