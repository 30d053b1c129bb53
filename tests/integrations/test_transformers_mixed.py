"""Models of transformers whose layers have different formats, and files with layers that the model
does not have.
"""

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("transformers") is None:
    pytest.skip("the extra is not installed", allow_module_level=True)

from mixed_samples import MIXED, fuse_experts
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers_samples import DEVICE, OURS

from modular_kernel.cli.demo_models import build_small_model
from modular_kernel.errors import ConfigurationError, UnsupportedError, WeightsError
from modular_kernel.integrations.transformers import from_pretrained, register
from modular_kernel.integrations.transformers.modules import is_dispatched
from modular_kernel.testing.checkpoints import samples
from modular_kernel.testing.checkpoints.formats import StoredMatrix
from modular_kernel.testing.checkpoints.published_formats import CHECKPOINT_FORMATS

HIDDEN, INTERMEDIATE = 128, 256
EXPERTS = {"qwen3_moe": 12, "deepseek_v3": 16}
AWQ = CHECKPOINT_FORMATS["awq"].config
assert AWQ is not None


@dataclass(frozen=True)
class WrittenCheckpoint:
    """The folder of a checkpoint, and a float64 model with the checkpoint's dequantized values."""

    folder: Path
    exact: Any


def write(
    folder: Path,
    kinds: dict[int, str],
    quantization: dict[str, Any],
    *,
    family: str = "qwen3_moe",
    attention: dict[int, str] | None = None,
    extra: dict[int, str] | None = None,
    **options: Any,
) -> WrittenCheckpoint:
    """Write a small model.

    Args:
        kinds: format of the experts, by layer.
        quantization: quantization_config of the checkpoint.
        attention: format of o_proj, by layer. The others are unquantized.
        extra: format of the experts, by layer, in layers that the model does not have.
    """
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
    sizes["moe_intermediate_size"] = INTERMEDIATE
    layers = max(kinds) + 1
    model = build_small_model(
        family, "bfloat16", "cpu", **sizes, num_hidden_layers=layers, **options
    )
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    stored_tensors = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    exact, generator = dict(stored_tensors), torch.Generator().manual_seed(0)
    published, shape = samples.FAMILIES[family], (EXPERTS[family], HIDDEN, INTERMEDIATE)
    for layer, kind in (kinds | (extra or {})).items():
        stored = samples.matrices(CHECKPOINT_FORMATS[kind], published, shape, generator)
        prefix = f"model.layers.{layer}."
        stored_tensors |= published.names(prefix, stored)
        if layer in kinds:
            matrices = {name: [dequantize(matrix) for matrix in getattr(stored, name)]
                        for name in ("gate", "up", "down")}  # fmt: skip
            exact |= published.names(prefix, samples.LayerMatrices(**matrices))
        else:
            stored_tensors[f"{prefix}enorm.weight"] = torch.ones(HIDDEN)
    for layer, kind in (attention or {}).items():
        name = f"model.layers.{layer}.self_attn.o_proj."
        rows, depth = stored_tensors.pop(f"{name}weight").shape
        matrix = CHECKPOINT_FORMATS[kind].make(rows, depth, generator, 1.0)
        stored_tensors |= {name + part: tensor for part, tensor in matrix.tensors.items()}
        exact[f"{name}weight"] = matrix.values.float()
    config = json.loads((folder / "config.json").read_text())
    exact_folder = folder / "truth"
    for path, content, layer_config in (
        (folder, stored_tensors, config | {"quantization_config": quantization}),
        (exact_folder, exact, config),
    ):
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(layer_config))
        content = {name: tensor.contiguous() for name, tensor in content.items()}
        save_file(content, path / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(exact_folder, dtype=torch.float32).double().eval()
    model.set_experts_implementation("batched_mm")
    return WrittenCheckpoint(folder, model.to(DEVICE))


def dequantize(stored: StoredMatrix) -> StoredMatrix:
    return StoredMatrix({"weight": stored.values.float()}, stored.values)


def list_experts_modules(model: torch.nn.Module) -> list[Any]:
    return [module for module in model.modules() if is_dispatched(module)]


def measure_errors(model: torch.nn.Module, exact: torch.nn.Module) -> list[float]:
    """Return the relative error of each experts module, for the same input and routing."""
    results = []
    for experts, exact_experts in zip(
        list_experts_modules(model), list_experts_modules(exact), strict=True
    ):
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(13, HIDDEN, generator=generator).to(DEVICE, torch.bfloat16)
        logits = torch.randn(13, exact_experts.num_experts, generator=generator).to(DEVICE)
        values, ids = logits.topk(3)
        with torch.no_grad():
            got = experts(x, ids, values.softmax(-1))
            expected = exact_experts(x.double(), ids, values.softmax(-1).double())
        results.append(float((got.double() - expected).norm() / expected.norm()))
    return results


def load_model(folder: Path, **options: Any) -> Any:
    return from_pretrained(folder, experts_implementation=register(*OURS), device=DEVICE, **options)


def check_model(checkpoint: WrittenCheckpoint, kinds: dict[int, str], model: Any = None) -> Any:
    """Check the error and the scheme of each layer, and the logits of the model."""
    model = model or load_model(checkpoint.folder)
    results = measure_errors(model, checkpoint.exact)
    for error, kind in zip(results, [kinds[layer] for layer in sorted(kinds)], strict=True):
        assert error <= CHECKPOINT_FORMATS[kind].bound, kind
    quants = [module._mk_quant.partition(":")[0] for module in list_experts_modules(model)]
    assert quants == [CHECKPOINT_FORMATS[kinds[n]].scheme.partition(":")[0] for n in sorted(kinds)]
    ids = torch.arange(9, device=DEVICE)[None]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
        exact = checkpoint.exact(input_ids=ids, use_cache=False).logits
    assert (logits.double() - exact).norm() / exact.norm() <= 0.1
    return model


@pytest.mark.parametrize("name", MIXED)
def test_each_layer_runs_in_its_own_format(name: str, tmp_path: Path) -> None:
    kinds, quantization = MIXED[name]
    check_model(write(tmp_path, kinds, quantization), kinds)


@pytest.mark.parametrize(("name", "fused"), [("AWQ and bf16", 0), ("fp8, excluded layers", 1)])
def test_unquantized_experts_may_be_in_one_tensor(name: str, fused: int, tmp_path: Path) -> None:
    kinds, quantization = MIXED[name]
    checkpoint = write(tmp_path, kinds, quantization)
    fuse_experts(tmp_path, fused)
    check_model(checkpoint, kinds)


def test_other_weights_are_dequantized_by_their_own_format(tmp_path: Path) -> None:
    kinds, quantization = MIXED["compressed-tensors, two groups"]
    attention = {0: "compressed fp8 channel", 2: "compressed int4"}
    groups = dict(quantization["config_groups"])
    attention_group = groups["group_0"] | {"targets": ["model.layers.2.self_attn.o_proj"]}
    groups["group_1"] = groups["group_1"] | {
        "targets": [*groups["group_1"]["targets"], "re:.*layers.0.self_attn.o_proj"]
    }
    config = quantization | {"config_groups": groups | {"group_2": attention_group}}
    checkpoint = write(tmp_path, kinds, config, attention=attention)
    model = check_model(checkpoint, kinds)
    exact = dict(checkpoint.exact.named_parameters())
    for layer in kinds:
        name = f"model.layers.{layer}.self_attn.o_proj.weight"
        parameter = dict(model.named_parameters())[name]
        assert (parameter.double() - exact[name]).norm() / exact[name].norm() <= 3e-3


def test_quantized_weights_that_the_config_excludes_are_refused(tmp_path: Path) -> None:
    kinds, quantization = MIXED["AWQ and bf16"]
    write(tmp_path, kinds, quantization, attention={0: "awq"})
    message = (
        r"layers.0.self_attn.o_proj.qweight: got qweight of int32, "
        "need an unquantized weight, as the quantization_config"
    )
    with pytest.raises(WeightsError, match=message):
        load_model(tmp_path)


def test_quantized_weights_without_scales_are_refused(tmp_path: Path) -> None:
    kinds = {0: "awq"}
    write(tmp_path, kinds, AWQ, attention={0: "awq"})
    path = tmp_path / "model.safetensors"
    tensors = {name: t for name, t in load_file(path).items() if "o_proj.scales" not in name}
    save_file(tensors, path, {"format": "pt"})
    message = (
        r"o_proj.qweight: got qweight of int32 without scales, "
        r"need a weight of int4\S+ \(awq\), as the quantization_config"
    )
    with pytest.raises(WeightsError, match=message):
        load_model(tmp_path)


def test_the_config_file_of_modelopt_is_read(tmp_path: Path) -> None:
    kinds = {0: "modelopt nvfp4", 1: "bf16"}
    quantization = {"quant_algo": "NVFP4", "exclude_modules": ["model.layers.1*"]}
    checkpoint = write(tmp_path, kinds, {})
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    content = {"producer": {"name": "modelopt"}, "quantization": quantization}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
    check_model(checkpoint, kinds)


# ------------------------------------------------------------- layers that the model does not have


@pytest.mark.parametrize("kind", ["bf16", "awq", "deepseek fp8"])
def test_layers_for_multi_token_prediction_are_ignored(kind: str, tmp_path: Path) -> None:
    """The layers have numbers above those of the model, and a format that would be refused."""
    kinds = {1: "awq"}
    checkpoint = write(
        tmp_path, kinds, AWQ, family="deepseek_v3", extra={2: kind}, num_nextn_predict_layers=1
    )
    model = check_model(checkpoint, kinds)
    assert not [name for name in model.state_dict() if ".layers.2." in name]


def test_layers_that_the_model_class_ignores_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the number of layers is unknown, `_keys_to_ignore_on_load_unexpected` excludes layers."""
    from modular_kernel.integrations.transformers import pretrained

    monkeypatch.setattr(pretrained, "_get_num_layers", lambda config: None)
    kinds = {1: "awq"}
    checkpoint = write(tmp_path, kinds, AWQ, family="deepseek_v3", extra={61: "awq"})
    check_model(checkpoint, kinds)
    write(tmp_path / "other", kinds, AWQ, family="deepseek_v3", extra={60: "awq"})
    with pytest.raises(UnsupportedError, match=r"layers \[1, 60\], of which \[1\] are"):
        load_model(tmp_path / "other")


def test_files_may_have_more_layers_than_the_model(tmp_path: Path) -> None:
    kinds = {0: "awq", 1: "awq", 2: "awq"}
    checkpoint = write(tmp_path, kinds, AWQ)
    config = AutoConfig.from_pretrained(tmp_path)
    config.num_hidden_layers, config.layer_types = 2, None
    model = load_model(tmp_path, config=config)
    assert len(list_experts_modules(model)) == 2
    checkpoint.exact.model.layers = checkpoint.exact.model.layers[:2]
    assert max(measure_errors(model, checkpoint.exact)) <= CHECKPOINT_FORMATS["awq"].bound


def test_missing_layers_are_refused(tmp_path: Path) -> None:
    write(tmp_path, {0: "awq", 1: "awq"}, AWQ)
    path = tmp_path / "model.safetensors"
    tensors = {name: t for name, t in load_file(path).items() if "layers.1.mlp.experts" not in name}
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(UnsupportedError, match=r"layers \[0\], of which \[0, 1\] are dispatched"):
        load_model(tmp_path)


def test_partly_quantized_experts_are_refused(tmp_path: Path) -> None:
    excluded = {"modules_to_not_convert": ["model.layers.1.mlp.experts.2"]}
    write(tmp_path, {0: "awq", 1: "awq"}, AWQ | excluded)
    with pytest.raises(ConfigurationError, match=r"experts of layer 1: got int4\S+ .* and none of"):
        load_model(tmp_path)
