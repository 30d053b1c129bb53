"""Mistral's checkpoint format: tensor names in consolidated files, and layers described by
params.json.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from run_mk import run_mk
from safetensors.torch import load_file, save_file
from test_checkpoint_values import compute_output_error, dequantize_w1_w2

import modular_kernel as mk
from modular_kernel.checkpoints.inspection import inspect
from modular_kernel.errors import ConfigurationError, ShapeError, WeightsError
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.testing.checkpoints.published_formats import CHECKPOINT_FORMATS
from modular_kernel.testing.checkpoints.samples import Sample, write

MOE_ENTRIES = {
    "expert_parallel": 1,
    "expert_model_parallel": 1,
    "route_every_n": 1,
    "first_k_dense_replace": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_expert_groups": 1,
    "num_expert_groups_per_tok": 1,
    "routed_scale": 2.5,
    "expert_hidden_dim": 256,
    "num_shared_experts": 1,
}
FP8 = {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}
# The quantization entry of params.json for each format.
QUANTIZATION_BY_FORMAT: dict[str, Any] = {
    "bf16": None,
    "fp8 tensor, static": FP8,
    "fp8 tensor, dynamic": FP8 | {"qscheme_act": "NO_SCALES"},
    "compressed fp8 block": CHECKPOINT_FORMATS["compressed fp8 block"].config,
    "compressed nvfp4": CHECKPOINT_FORMATS["compressed nvfp4"].config,
}
MISTRAL_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def write_consolidated(folder: Path, kind: str, **entries: Any) -> Sample:
    """Write a checkpoint with Mistral's tensor names, and `entries` merged into params.json.

    The tensors are those of a sample of DeepSeek-V3, which has the same layers.
    """
    sample = write(folder, "deepseek_v3", kind, layers=(1,))
    renamed = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        name = name.removeprefix("model.").replace("mlp.experts.", "experts.")
        name = re.sub(r"(gate|up|down)_proj", lambda match: MISTRAL_NAMES[match[0]], name)
        if kind.startswith("fp8"):
            name = name.replace("weight_scale", "qscale_weight").replace(
                "input_scale", "qscale_act"
            )
        renamed[name] = tensor
    renamed["layers.0.feed_forward.w1.weight"] = torch.ones(8, 8)
    save_file(renamed, folder / "consolidated-00001-of-00001.safetensors")
    weight_map = dict.fromkeys(renamed, "consolidated-00001-of-00001.safetensors")
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "consolidated.safetensors.index.json").write_text(index)
    (folder / "model.safetensors").unlink()
    (folder / "config.json").unlink()
    params = {"dim": 128, "n_layers": 2, "hidden_dim": 512, "moe": MOE_ENTRIES, "vocab_size": 8}
    if QUANTIZATION_BY_FORMAT[kind] is not None:
        params["quantization"] = QUANTIZATION_BY_FORMAT[kind]
    (folder / "params.json").write_text(json.dumps(params | entries))
    return sample


@pytest.mark.parametrize("kind", QUANTIZATION_BY_FORMAT)
def test_loaded_values_equal_the_files(kind: str, tmp_path: Path) -> None:
    sample = write_consolidated(tmp_path, kind)
    loaded = mk.load_experts(tmp_path, 1, dtype="bfloat16")
    assert str(loaded.problem_fields["quant"]) == CHECKPOINT_FORMATS[kind].scheme
    w1, w2 = dequantize_w1_w2(loaded)
    rtol = 2.0**-4 if "tensor" in kind else 1e-6  # gate and up get one merged scale, which rounds
    torch.testing.assert_close(w1, sample.w1, rtol=rtol, atol=1e-3 if rtol > 1e-3 else 1e-12)
    torch.testing.assert_close(w2, sample.w2, rtol=1e-6, atol=1e-12)
    assert compute_output_error(sample, loaded) <= CHECKPOINT_FORMATS[kind].bound
    assert inspect(tmp_path).layers == (1,)


def test_router_is_a_renormalized_softmax(tmp_path: Path) -> None:
    write_consolidated(tmp_path, "bf16")
    loaded = mk.load_experts(tmp_path, 1)
    router = loaded.router
    assert router is not None
    assert (router.top_k, router.score, router.groups) == (2, "softmax", 1)
    assert router.renormalize
    assert not router.selection_bias
    assert loaded.problem_fields["routed_scaling_factor"] == 2.5
    assert loaded.problem_fields["dtype"] is torch.bfloat16


def test_layer_and_check_accept_params_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_consolidated(tmp_path, "bf16", activation="silu")
    layer = FusedMoE.from_config(tmp_path, 1, experts="TorchExperts")
    layer.load(tmp_path)
    pair = ("--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "TorchExperts")
    for model in (tmp_path, tmp_path / "params.json"):
        result = run_mk(capsys, "check", *pair, "--model", str(model))
        assert result.code == 0, result
    loaded = mk.load_experts(
        tmp_path / "consolidated.safetensors.index.json", 1, config=tmp_path / "params.json"
    )
    assert loaded.problem_fields["experts"] == 4


def test_config_json_takes_precedence(tmp_path: Path) -> None:
    write(tmp_path, "qwen3_moe", "bf16", hidden=64)
    (tmp_path / "params.json").write_text("{")
    assert mk.load_experts(tmp_path, 0).problem_fields["hidden"] == 64


INVALID_PARAMS: dict[str, tuple[dict[str, Any], str]] = {
    "dense": ({"moe": None}, "no moe: a dense model"),
    "no object": ({"moe": 1}, "moe = 1"),
    "no size": (
        {"moe": {k: v for k, v in MOE_ENTRIES.items() if k != "expert_hidden_dim"}},
        "no moe.expert_hidden_dim",
    ),
    "no width": ({"dim": None}, "no dim"),
    "every other layer": (
        {"moe": MOE_ENTRIES | {"route_every_n": 2}},
        "moe.route_every_n = 2, need 1",
    ),
    "groups": (
        {"moe": MOE_ENTRIES | {"num_expert_groups": 8}},
        "moe.num_expert_groups = 8, need 1",
    ),
    "bias": (
        {"moe": MOE_ENTRIES | {"use_load_balancing_bias": True}},
        "use_load_balancing_bias = True",
    ),
    "renormalization": (
        {"moe": MOE_ENTRIES | {"renorm_strategy": "LOGITS"}},
        "renorm_strategy = LOGITS",
    ),
    "unknown": (
        {"moe": MOE_ENTRIES | {"expert_offset": 3}},
        "moe.expert_offset = 3, need no such entry",
    ),
    "experts": (
        {"moe": MOE_ENTRIES | {"num_experts": "4"}},
        "n_routed_experts = 4, need an integer",
    ),
    "format": ({"quantization": {"qformat_weight": "int8"}}, "qformat_weight = int8"),
    "scheme": ({"quantization": FP8 | {"qscheme_act": "ROW"}}, "quantization.qscheme_act = ROW"),
    "no format": ({"quantization": {"bits": 4}}, "quantization with bits"),
    "option": ({"quantization": FP8 | {"rotation": "h"}}, "quantization.rotation = h"),
    "two": ({"quantization": FP8, "quantization_config": {"quant_method": "fp8"}}, "that differ"),
    "method": ({"quantization": {"quant_method": "hqq"}}, "quant_method = 'hqq'"),
}


@pytest.mark.parametrize("case", INVALID_PARAMS)
def test_unsupported_params_are_refused(case: str, tmp_path: Path) -> None:
    entries, message = INVALID_PARAMS[case]
    write_consolidated(tmp_path, "bf16", **entries)
    with pytest.raises(ConfigurationError, match=message) as caught:
        mk.load_experts(tmp_path, 1)
    assert "params.json" in str(caught.value)


def test_invalid_files_are_refused(tmp_path: Path) -> None:
    write_consolidated(tmp_path, "fp8 tensor, static")
    path = tmp_path / "consolidated-00001-of-00001.safetensors"
    tensors = load_file(path)
    name = "layers.1.experts.2.w2.qscale_weight"
    save_file(tensors | {name: torch.ones(3)}, path)
    with pytest.raises(ShapeError, match=rf"{name}: got \(3,\)"):
        mk.load_experts(tmp_path, 1)
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, path)
    with pytest.raises(WeightsError, match=r"layers\.1\.experts\.2\.w2"):
        mk.load_experts(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(WeightsError, match="need a complete safetensors file"):
        mk.load_experts(tmp_path, 1)
