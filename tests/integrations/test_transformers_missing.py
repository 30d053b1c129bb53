"""Models with missing tensors, which transformers would initialize randomly, are refused."""

import json
from importlib.util import find_spec

import pytest

if find_spec("transformers") is None:
    pytest.skip("the extra is not installed", allow_module_level=True)

from test_transformers_quantized import write
from transformers import AutoModel, AutoModelForSequenceClassification

from modular_kernel.errors import InputError
from modular_kernel.integrations.transformers import from_pretrained, register


def remove_tensors(ending: str):
    return lambda tensors: [tensors.pop(key) for key in list(tensors) if key.endswith(ending)]


def truncate_tensor(ending: str):
    def change(tensors) -> None:
        key = next(key for key in tensors if key.endswith(ending))
        tensors[key] = tensors[key][:3].clone()

    return change


CHANGES_AND_MESSAGES = {
    "a norm": (
        "awq",
        remove_tensors("layers.1.input_layernorm.weight"),
        "no model.layers.1.input_layernorm",
    ),
    "a router": (
        "awq",
        remove_tensors("layers.0.block_sparse_moe.gate.weight"),
        r"no model.layers.0.mlp.gate",
    ),
    "scales of a projection": (
        "awq",
        remove_tensors("o_proj.scales"),
        r"0.self_attn.o_proj.qweight: got qweight of int32 without scales",
    ),
    "the head": ("bf16", remove_tensors("lm_head.weight"), "no lm_head.weight, need all tensors"),
    "an expert's matrix": (
        "bf16",
        remove_tensors("0.w2.weight"),
        r"down_proj: got \(7, 128, 256\), need \(8, ",
    ),
    "one projection of an expert": (
        "bf16",
        remove_tensors("experts.3.w1.weight"),
        r"experts.3.w1.weight",
    ),
    "an expert's shape": (
        "bf16",
        truncate_tensor("experts.3.w1.weight"),
        r"3.w1.weight: got \(3, 128",
    ),
    "a shape": (
        "awq",
        truncate_tensor("block_sparse_moe.gate.weight"),
        r"got \(3, 128\), need \(8, 128\)",
    ),
}


@pytest.mark.parametrize("case", CHANGES_AND_MESSAGES)
def test_missing_tensors_are_refused(case, tmp_path) -> None:
    """transformers by itself only warns, and continues with random values."""
    kind, change, match = CHANGES_AND_MESSAGES[case]
    write(tmp_path, "mixtral", kind, change)
    with pytest.raises(InputError, match=match):
        from_pretrained(tmp_path, experts_implementation=register())


@pytest.mark.parametrize("kind", ["bf16", "awq"])
def test_truncated_files_are_refused_by_name(kind, tmp_path) -> None:
    write(tmp_path, "mixtral", kind)
    (path,) = tmp_path.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=path.name):
        from_pretrained(tmp_path, experts_implementation=register())


def test_packed_files_without_a_quantization_config_are_refused(tmp_path) -> None:
    write(tmp_path, "mixtral", "awq")
    config = json.loads((tmp_path / "config.json").read_text())
    for quantization, match in (
        (None, "qweight: got int32 without a quantization_config"),
        ("awq", "need an object"),
        ([], "an object"),
    ):
        config["quantization_config"] = quantization
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(InputError, match=match):
            from_pretrained(tmp_path, experts_implementation=register())
    config["quantization_config"] = None
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="device: got 'nowhere'"):
        from_pretrained(tmp_path, experts_implementation=register(), device="nowhere")


@pytest.mark.parametrize("kind", ["bf16", "awq"])
def test_models_with_another_head_may_have_new_parameters(kind, tmp_path) -> None:
    write(tmp_path, "mixtral", kind)
    for auto_class in (AutoModelForSequenceClassification, AutoModel):
        model = from_pretrained(tmp_path, experts_implementation=register(), auto_class=auto_class)
        assert not any(parameter.is_meta for parameter in model.parameters())
