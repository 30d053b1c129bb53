"""Model families with remote code (trust_remote_code), LongCat, and Step-3.5.

The router of LongCat can select zero experts, which return their input.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import modular_kernel as mk
from modular_kernel.catalog import this_machine
from modular_kernel.checkpoints.inspection import inspect
from modular_kernel.errors import ConfigurationError
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.quant.quantized_weights import dequantize_weights
from modular_kernel.testing.checkpoints.published_formats import CHECKPOINT_FORMATS
from modular_kernel.testing.checkpoints.samples import (
    FAMILIES,
    ModelFamily,
    Sample,
    per_expert_modules,
    step_modules,
    write,
)

PAIR = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
SIZE_KEYS = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "hidden_size")
REMOTE_CODE_FAMILIES: dict[str, ModelFamily] = {
    "deepseek": ModelFamily(per_expert_modules("mlp.experts"), SIZE_KEYS),
    "bailing_moe": ModelFamily(per_expert_modules("mlp.experts"), ("num_experts", *SIZE_KEYS[1:])),
    "bailing_moe_v2": ModelFamily(
        per_expert_modules("mlp.experts"), ("num_experts", *SIZE_KEYS[1:])
    ),
    "step3_text": ModelFamily(
        step_modules, ("moe_num_experts", "moe_top_k", "moe_intermediate_size", "hidden_size")
    ),
    "longcat_flash": ModelFamily(
        per_expert_modules("mlp.experts"),
        ("n_routed_experts", "moe_topk", "expert_ffn_hidden_size", "hidden_size"),
        extra_config={"routed_scaling_factor": 6.0, "zero_expert_num": 3},
    ),
}


def write_checkpoint(folder: Path, family: str, kind: str) -> Sample:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, family, REMOTE_CODE_FAMILIES[family])
        return write(folder, family, kind)


@pytest.mark.parametrize("kind", ["bf16", "compressed fp8 channel", "compressed int4"])
@pytest.mark.parametrize("family", REMOTE_CODE_FAMILIES)
def test_loaded_values_equal_the_files(family: str, kind: str, tmp_path: Path) -> None:
    """The values are those of all experts, or of the share of an EP and TP rank."""
    sample = write_checkpoint(tmp_path, family, kind)
    assert inspect(tmp_path).layers == (0,)
    for ep, tp in (((0, 1), (0, 1)), ((1, 2), (1, 2))):
        loaded = mk.load_experts(tmp_path, 0, ep=ep, tp=tp)
        scaling = 1.0 if family != "longcat_flash" else 6.0
        assert loaded.problem_fields.get("routed_scaling_factor", 1.0) == scaling
        experts = slice(4 * ep[0] // ep[1], 4)
        gate, up = sample.w1[experts].chunk(2, 1)
        rows = slice(256 * tp[0] // tp[1], 256)
        exact = {
            "w1": torch.cat([gate[:, rows], up[:, rows]], 1),
            "w2": sample.w2[experts][:, :, rows],
        }
        problem, _ = loaded.partial(1)
        for name, values in exact.items():
            stored = getattr(loaded.weights, name)
            if kind != "bf16":
                stored = dequantize_weights(loaded.weights, name, problem)
            torch.testing.assert_close(stored.double(), values, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("family", ["deepseek", "longcat_flash"])
def test_layer_output_equals_float64(family: str, tmp_path: Path) -> None:
    sample = write_checkpoint(tmp_path, family, "fp32")
    layer = FusedMoE.from_config(tmp_path, 0, params_dtype="float32", experts="TorchExperts")
    layer.load(tmp_path)
    num_zero_experts = 3 if family == "longcat_flash" else 0
    x, logits = sample.inputs(24)[0], torch.randn(24, 4 + num_zero_experts)
    scores = logits.double().softmax(-1)
    bias = torch.zeros(4 + num_zero_experts)
    if num_zero_experts:
        bias = torch.linspace(0, 0.2, 4 + num_zero_experts)
        layer.selection_bias.copy_(bias)
    ids = (scores + bias.double()).topk(2).indices
    weights = scores.gather(1, ids)
    expert_weights = weights.masked_fill(ids >= 4, 0)  # without those of zero experts
    expected_output = sample.expected_output(x, expert_weights, ids.clamp(max=3))
    # A zero expert returns its input, and the routed scaling factor applies to it, too.
    expected_output += (weights - expert_weights).sum(1, keepdim=True) * sample.scaling * x
    if num_zero_experts:
        assert bool((ids >= 4).any())
    y = layer(x.float(), logits)
    torch.testing.assert_close(y.double(), expected_output, rtol=1e-4, atol=1e-4)
    assert CHECKPOINT_FORMATS["fp32"].config is None


def test_longcat_output_equals_transformers(tmp_path: Path) -> None:
    """The reference is the layer of transformers, with its router and zero experts, with the same
    weights.
    """
    modeling = pytest.importorskip("transformers.models.longcat_flash.modeling_longcat_flash")
    sample = write_checkpoint(tmp_path, "longcat_flash", "fp32")
    config = SimpleNamespace(
        hidden_size=128, expert_ffn_hidden_size=256, n_routed_experts=4, num_local_experts=4,
        zero_expert_num=3, num_experts_per_tok=2, routed_scaling_factor=6.0, hidden_act="silu",
        router_bias=False, _experts_implementation="eager",
    )  # fmt: skip
    module = modeling.LongcatFlashMoE(config).float()
    torch.nn.init.normal_(module.router.classifier.weight)
    module.router.e_score_correction_bias.copy_(torch.linspace(0, 0.2, 7))
    with torch.no_grad():
        module.experts.gate_up_proj[:4] = sample.w1.float()
        module.experts.down_proj.copy_(sample.w2)
    layer = FusedMoE.from_config(tmp_path, 0, params_dtype="float32", experts="TorchExperts")
    layer.load(tmp_path)
    layer.selection_bias.copy_(module.router.e_score_correction_bias)
    x = sample.inputs(24)[0].float()
    with torch.no_grad():
        want = module(x[None])[0]
        got = layer(x, module.router.classifier(x))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_unsupported_zero_experts_are_refused(tmp_path: Path) -> None:
    sample = write_checkpoint(tmp_path, "longcat_flash", "fp32")
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("{", '{"zero_expert_type": "constant", ', 1))
    with pytest.raises(ConfigurationError, match="zero_expert_type = constant, need identity"):
        mk.load_experts(sample.folder, 0)


def compute_clamped_output(
    sample: Sample, limit: float | None, x: torch.Tensor, *routing: Any
) -> Any:
    """Return the float64 output of a layer with a limit of its activation.

    The activation of an expert is min(silu(gate), limit) * clamp(up, -limit, limit).
    """
    weights, ids = routing
    y = torch.zeros_like(x)
    for token, slot in ((token, slot) for token in range(len(x)) for slot in range(ids.shape[1])):
        gate, up = (sample.w1[ids[token, slot]] @ x[token]).chunk(2)
        gate = torch.nn.functional.silu(gate)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        y[token] += weights[token, slot].double() * (sample.w2[ids[token, slot]] @ (gate * up))
    return y * sample.scaling


def test_step3p5_layers_have_their_own_activation_limits(tmp_path: Path) -> None:
    """`load_experts`, `FusedMoE` and `inspect` read the limits. As in the published config,
    hidden_act is missing.
    """
    samples = {}
    for layer in (0, 1, 2):
        layer_folder = tmp_path / f"layer{layer}"
        samples[layer] = write(layer_folder, "step3p5", "fp32", layers=(layer,), seed=layer)
    tensors = {
        name: tensor
        for layer in samples
        for name, tensor in load_file(tmp_path / f"layer{layer}/model.safetensors").items()
    }
    config = samples[0].config | {"num_hidden_layers": 3, "swiglu_limits": [0.0, 0.7]}
    del config["hidden_act"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    limits = {0: None, 1: 0.7, 2: None}
    expected_outputs = {}
    for layer, sample in samples.items():
        x, weights, ids = sample.inputs(8)
        expected_outputs[layer] = compute_clamped_output(sample, limits[layer], x, weights, ids)
        loaded = mk.load_experts(tmp_path, layer)
        problem = loaded.problem(8)
        kernel = mk.make_kernel(*PAIR, problem, machine=this_machine(device="cpu"))
        got = kernel(x.float(), loaded.weights, mk.Routing(weights, ids)).double()
        torch.testing.assert_close(got, expected_outputs[layer], rtol=1e-4, atol=1e-4)
        module = FusedMoE.from_config(
            tmp_path, layer, top_k=2, params_dtype="float32", experts="TorchExperts"
        )
        module.load(tmp_path)
        got = module(x.float(), (weights, ids)).double()
        torch.testing.assert_close(got, expected_outputs[layer], rtol=1e-4, atol=1e-4)
    x, weights, ids = samples[1].inputs(8)
    unlimited = compute_clamped_output(samples[1], None, x, weights, ids)
    assert float((unlimited - expected_outputs[1]).norm() / expected_outputs[1].norm()) > 0.01
    report = inspect(tmp_path)
    activations = {group.layers: str(group.problem_fields["activation"]) for group in report.groups}
    assert activations == {(0, 2): "silu", (1,): "swiglu_clamp_after:limit=0.7"}
    with pytest.raises(ConfigurationError, match=r"swiglu_limits.*need one limit for every layer"):
        FusedMoE.from_config(tmp_path / "config.json", top_k=2)
    layer_1 = FusedMoE.from_config(tmp_path / "config.json", 1, top_k=2)
    assert str(layer_1.problem.act) == "swiglu_clamp_after:limit=0.7"
