"""Checkpoint layouts: the names, shapes and order of the expert weights of each model family."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import modular_kernel as mk
from modular_kernel.catalog import this_machine
from modular_kernel.models.expert_layouts import LAYOUTS
from modular_kernel.models.families import FAMILIES
from modular_kernel.testing.checkpoints.published_formats import CHECKPOINT_FORMATS
from modular_kernel.testing.checkpoints.samples import FAMILIES as SAMPLES
from modular_kernel.testing.checkpoints.samples import write

# These families cover every kind of experts class in transformers. Other families are left out,
# because `save_pretrained` of transformers renames their tensors.
SAVED_FAMILIES = (
    "aria_text",
    "deepseek_v3",
    "gpt_oss",
    "granitemoe",
    "granitemoe_swa",
    "jetmoe",
    "llama4_text",
    "minimax_m2",
    "mistral4",
    "mixtral",
    "olmoe",
    "qwen3_moe",
    "qwen3_vl_moe_text",
)
SMALL_CONFIG = {
    "vocab_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def test_every_supported_family_has_a_layout() -> None:
    assert set(LAYOUTS) == {
        name for name, family in FAMILIES.items() if not family.unsupported_reason
    }
    assert len(SAMPLES) >= 14
    assert set(SAMPLES) <= set(LAYOUTS)
    # Every distinct layout has a sample.
    assert {LAYOUTS[name] for name in SAMPLES} >= set(LAYOUTS.values()) - {
        LAYOUTS["mistral_large4_text"]
    }


@pytest.mark.parametrize("family", SAMPLES)
def test_experts_are_found_in_every_layout(family: str, tmp_path: Path) -> None:
    sample = write(tmp_path, family, "bf16", layers=(3, 5), hidden=64, intermediate=96)
    loaded = mk.load_experts(tmp_path, 5)
    w1, b1 = loaded.weights.w1, loaded.weights.b1
    if loaded.problem_fields["activation"].interleaved:
        w1 = torch.cat([w1[:, 0::2], w1[:, 1::2]], 1)
        b1 = None if b1 is None else torch.cat([b1[:, 0::2], b1[:, 1::2]], 1)
    assert torch.equal(w1.double(), sample.w1)
    assert torch.equal(loaded.weights.w2.double(), sample.w2)
    assert (b1 is None) == (sample.b1 is None)
    if b1 is not None:
        assert torch.equal(b1.double(), sample.b1)
        assert torch.equal(loaded.weights.b2.double(), sample.b2)
    problem = loaded.problem(24)
    x, weights, ids = sample.inputs(24)
    kernel = mk.make_kernel(
        "MoEPrepareAndFinalizeNoEP", "TorchExperts", problem, machine=this_machine(device="cpu")
    )
    y = kernel(x.bfloat16(), loaded.weights, mk.Routing(weights, ids)).double()
    expected = sample.expected_output(x.bfloat16().double(), weights, ids)
    assert float((y - expected).norm() / expected.norm()) < 1e-2


STACKED_FORMATS = ("deepseek fp8", "fp8 tensor, dynamic", "fp8 tensor, static", "compressed int8")


@pytest.mark.parametrize("kind", STACKED_FORMATS)
def test_stacked_modules_load_like_separate_modules(kind: str, tmp_path: Path) -> None:
    write(tmp_path / "stacked", "step3p5", kind)
    write(tmp_path / "separate", "mixtral", kind)
    stacked, separate = (mk.load_experts(tmp_path / name, 0) for name in ("stacked", "separate"))
    assert stacked.bytes_read == separate.bytes_read
    for name, tensor in vars(separate.weights).items():
        stacked_tensor = getattr(stacked.weights, name)
        assert (stacked_tensor is None) == (tensor is None)
        assert tensor is None or torch.equal(stacked_tensor.float(), tensor.float())


@pytest.mark.parametrize(
    ("family", "block"),
    [("llama4_text", ""), ("gpt_oss", "mlp.experts"), ("gpt_oss", "mlp.experts.experts")],
)
def test_fused_families_may_be_stored_per_expert(family: str, block: str, tmp_path: Path) -> None:
    """Quantizers split fused experts into one module per projection and expert."""
    sample = write(tmp_path, "mixtral", "compressed int4")
    prefix = f"model.layers.0.{block}"
    if family == "llama4_text":
        prefix = "language_model.model.layers.0.feed_forward.experts"
    names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    tensors = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if ".experts." in name:
            _, expert, projection, kind = name.rsplit(".", 3)
            tensors[f"{prefix}.{expert}.{names[projection]}.{kind}"] = tensor
    if family == "gpt_oss":
        for index in range(4):
            tensors[f"{prefix}.{index}.gate_proj.bias"] = torch.full((256,), 1.0)
            tensors[f"{prefix}.{index}.up_proj.bias"] = torch.full((256,), 2.0)
            tensors[f"{prefix}.{index}.down_proj.bias"] = torch.zeros(128)
    config = SAMPLES[family].config(family, (4, 2, 256, 128))
    config["quantization_config"] = CHECKPOINT_FORMATS["compressed int4"].config
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = mk.load_experts(tmp_path, 0)
    assert not loaded.problem_fields["activation"].interleaved
    packed = torch.cat([concat_packed_gate_up(tensors, prefix, index) for index in range(4)])
    assert torch.equal(loaded.weights.w1.flatten(0, 1), packed)
    if family == "gpt_oss":
        assert loaded.weights.b1[0].tolist() == [1.0] * 256 + [2.0] * 256
    assert sample.w1.shape == (4, 512, 128)


def concat_packed_gate_up(
    tensors: dict[str, torch.Tensor], prefix: str, expert: int
) -> torch.Tensor:
    """Return the packed rows of gate, then of up, of one expert as bytes."""
    names = ("gate_proj", "up_proj")
    return torch.cat([tensors[f"{prefix}.{expert}.{n}.weight_packed"] for n in names]).view(
        torch.uint8
    )


def make_small_model(transformers: Any, name: str) -> Any:
    """Return a tiny model of the family in which every layer has experts."""
    family, config = FAMILIES[name], transformers.CONFIG_MAPPING[name]()
    sizes = {family.experts: 4, family.top_k: 2, family.intermediate: 48, family.hidden: 64}
    # A family can have several keys for a size, separated by spaces.
    sizes_by_key = {key: size for keys, size in sizes.items() for key in keys.split()}
    for key, value in {**SMALL_CONFIG, "intermediate_size": 48, **sizes_by_key}.items():
        if hasattr(config, key):
            setattr(config, key, value)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    auto_model = transformers.AutoModelForCausalLM
    is_causal_lm = type(config) in auto_model._model_mapping
    return (auto_model if is_causal_lm else transformers.AutoModel).from_config(config)


@pytest.mark.parametrize("family", SAVED_FAMILIES)
def test_models_saved_by_transformers_load_with_equal_weights(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = make_small_model(transformers, family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(tmp_path)
    loaded = mk.load_experts(tmp_path, 1, dtype="float32")
    modules = dict(model.named_modules())
    (name,) = (
        (n for n in modules if n.endswith(".experts") and "layers.1." in n and "attention" not in n)
        if family != "jetmoe"
        else ("model.layers.1.mlp",)
    )
    experts = modules[name]
    if family == "jetmoe":
        gate_up, down = experts.input_linear.weight, experts.output_linear.weight
    else:
        gate_up, down = experts.gate_up_proj, experts.down_proj
    w1, w2 = loaded.weights.w1, loaded.weights.w2
    if w1.shape != gate_up.shape:
        gate_up, down = gate_up.mT, down.mT
    assert torch.equal(w1, gate_up.detach())
    assert torch.equal(w2, down.detach())
    if hasattr(experts, "gate_up_proj_bias"):
        assert torch.equal(loaded.weights.b1, experts.gate_up_proj_bias.detach())
