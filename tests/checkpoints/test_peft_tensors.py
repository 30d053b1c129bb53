"""Tensors of PEFT adapters whose names or shapes do not match the problem are refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_samples import EXPERT, GOLDEN, PROBLEM, AdapterFolder, E, H, I
from safetensors.torch import load_file

from modular_kernel.checkpoints.peft import load_adapter
from modular_kernel.errors import ConfigurationError, DtypeError, ShapeError, WeightsError

BLOCK = "base_model.model.model.layers.1.mlp.experts"


def test_tensors_of_other_modules_are_refused_unless_ignored(tmp_path: Path) -> None:
    folder = AdapterFolder(tmp_path, "down")
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    folder.tensors[key] = torch.zeros(4, H)
    with pytest.raises(WeightsError, match=r"got .*self_attn.q_proj.lora_A.weight, need"):
        folder.load()
    for ignored_modules in (("self_attn",), ["self_attn"]):
        assert folder.load(ignored_modules=ignored_modules).lora_a2.any()


def test_error_lists_at_most_four_unknown_names(tmp_path: Path) -> None:
    folder = AdapterFolder(tmp_path, "down")
    for number in range(6):
        key = f"base_model.model.model.layers.{number}.self_attn.q_proj.lora_A.weight"
        folder.tensors[key] = torch.zeros(4, H)
    with pytest.raises(WeightsError, match=r"layers\.3\.self_attn\S+ and 2 more, need") as caught:
        folder.load()
    assert "layers.4" not in str(caught.value)


def test_names_longer_than_512_characters_are_refused(tmp_path: Path) -> None:
    folder = AdapterFolder(tmp_path, "down")
    longest = max(map(len, folder.tensors))
    for length, accepted in ((512, True), (513, False)):
        model = "model" + "l" * (length - longest)
        tensors = {
            key.replace("model.layers", f"{model}.layers"): value
            for key, value in load_file(GOLDEN / "down" / "adapter_model.safetensors").items()
        }
        assert max(map(len, tensors)) == length
        folder.tensors = tensors
        if accepted:
            assert torch.equal(
                folder.load().lora_a2, load_adapter(GOLDEN / "down", 1, PROBLEM).lora_a2
            )
        else:
            with pytest.raises(WeightsError, match="need LoRA factors of experts"):
                folder.load()


FIRST, LAST = f"{EXPERT}.0.w1.lora_A.weight", f"{EXPERT}.3.w2.lora_B.weight"


@pytest.mark.parametrize(
    ("key", "tensor", "error", "match"),
    [
        (FIRST, None, WeightsError, r"got .*0.w1.lora_B.weight alone, need lora_A, lora_B"),
        (FIRST, torch.zeros(4, H), ShapeError, r"0.w1.lora_A.weight: got \(4, 16\), need \(3, 1"),
        (FIRST, torch.zeros(3, H, 1), ShapeError, r"got \(3, 16, 1\), need \(3, 16\)|dimensions"),
        (FIRST, torch.zeros(3, H).int(), DtypeError, r"0.w1.lora_A.weight: got torch.int32"),
        (LAST, torch.full((H, 2), torch.inf), WeightsError, r"3.w2.lora_B.weight: got values that"),
        (f"{EXPERT}.4.w1.lora_A.weight", torch.zeros(3, H), WeightsError, "alone"),
        (f"{EXPERT}.0.w4.lora_A.weight", torch.zeros(3, H), WeightsError, r"got .*\.w4\."),
        (f"{EXPERT}.0.gate_proj.lora_A.weight", torch.zeros(3, H), WeightsError, "alone"),
        (FIRST.replace("lora_A", "lora_magnitude_vector"), torch.zeros(3), WeightsError, "magnit"),
    ],
)  # fmt: skip
def test_wrong_shapes_and_dtypes_are_refused(
    tmp_path: Path,
    key: str,
    tensor: torch.Tensor | None,
    error: type[Exception],
    match: str,
) -> None:
    folder = AdapterFolder(tmp_path, "modules")
    folder.tensors.pop(key, None)
    if tensor is not None:
        folder.tensors[key] = tensor
    with pytest.raises(error, match=match):
        folder.load()


@pytest.mark.parametrize("number", ["01", "\N{ARABIC-INDIC DIGIT ONE}"])
def test_duplicate_expert_is_refused(tmp_path: Path, number: str) -> None:
    folder = AdapterFolder(tmp_path, "modules")
    folder.tensors[f"{EXPERT}.{number}.w1.lora_A.weight"] = torch.ones(3, H)
    with pytest.raises(WeightsError, match=rf"experts\.{number}\.w1\.lora_A"):
        folder.load()


@pytest.mark.parametrize("ignored_modules", [None, "self_attn", (1,)])
def test_ignored_modules_must_be_names(ignored_modules: Any) -> None:
    with pytest.raises(ConfigurationError, match="ignored_modules: got"):
        load_adapter(GOLDEN / "modules", 1, PROBLEM, ignored_modules=ignored_modules)


def test_two_blocks_of_experts_in_a_layer_are_refused(tmp_path: Path) -> None:
    folder = AdapterFolder(tmp_path, "down")
    for side, shape in (("A", (4 * E, H)), ("B", (2 * I, 4 * E))):
        second_block = BLOCK.replace("model.layers", "other.layers")
        folder.tensors[f"{second_block}.lora_{side}.weight"] = torch.zeros(shape)
    with pytest.raises(WeightsError, match=r"model.layers.1.mlp.experts and .*other.layers"):
        folder.load()


def test_missing_experts_and_projections_are_refused(tmp_path: Path) -> None:
    folder = AdapterFolder(tmp_path, "modules")
    factors = {key: folder.tensors[key] for key in folder.tensors if f"{EXPERT}.3.w3" in key}
    for key, value in factors.items():
        del folder.tensors[key]
        folder.tensors[key.replace(".3.w3", ".4.w3")] = value
    with pytest.raises(WeightsError, match=r"got .*\.4\.w3\..*, need experts 0 to 3"):
        folder.load()
    for key in factors:
        del folder.tensors[key.replace(".3.w3", ".4.w3")]
    with pytest.raises(WeightsError, match=r"layer 1: got up without experts \[3\]"):
        folder.load()
    for key in [key for key in folder.tensors if ".w3." in key]:
        del folder.tensors[key]
    with pytest.raises(WeightsError, match="layer 1: got no w3, need all targets of adapter"):
        folder.load()
    folder.config["target_modules"] = ["w1", "w2"]
    assert folder.load().lora_a13.any()


def test_mixed_layouts_are_refused(tmp_path: Path) -> None:
    folder = AdapterFolder(tmp_path, "fused")
    for side, shape in (("A", (3, H)), ("B", (I, 3))):
        for expert in range(E):
            folder.tensors[f"{BLOCK}.{expert}.gate_proj.lora_{side}.weight"] = torch.zeros(shape)
    with pytest.raises(WeightsError, match="gate and up both fused and separate"):
        folder.load()
    duplicated = AdapterFolder(tmp_path / "twice", "down")
    for side in "AB":
        value = duplicated.tensors[f"{BLOCK}.lora_{side}.weight"]
        duplicated.tensors[f"{BLOCK}.base_layer.lora_{side}.weight"] = value.clone()
    with pytest.raises(WeightsError, match="down once more"):
        duplicated.load()


@pytest.mark.parametrize("sizes", [{"hidden": 24}, {"intermediate": 6}, {"experts": 8}])
@pytest.mark.parametrize("kind", ["fused", "modules"])
def test_sizes_of_another_base_model_are_refused(kind: str, sizes: dict[str, int]) -> None:
    problem = replace(PROBLEM, **sizes)  # type: ignore[arg-type]
    with pytest.raises((ShapeError, WeightsError), match="got"):
        load_adapter(GOLDEN / kind, 1, problem)


def test_ambiguous_fused_factors_need_the_peft_version(tmp_path: Path) -> None:
    """Up to PEFT 0.18, lora_A of a fused weight had the rows of the weight. If H = I, the shapes of
    the factors are the same in the older and the newer layout.
    """
    problem = replace(PROBLEM, intermediate=H)
    folder = AdapterFolder(tmp_path, "down")
    for key, value in folder.tensors.items():
        folder.tensors[key] = value if "lora_B" in key else torch.ones(len(value), H)
    assert folder.load(problem).lora_a2.any()
    for version in ("0.18.1", None, "new"):
        folder.config["peft_version"] = version
        with pytest.raises(ConfigurationError, match=r"peft_version: got .*, need 0.19 or newer"):
            folder.load(problem)


def test_problem_without_adapters_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="lora: got none"):
        load_adapter(GOLDEN / "down", 1, replace(PROBLEM, lora="none"))
    with pytest.raises(ConfigurationError, match="problem: got None"):
        load_adapter(GOLDEN / "down", 1, None)  # type: ignore[arg-type]


def test_values_outside_the_problem_dtype_are_refused(tmp_path: Path) -> None:
    folder = AdapterFolder(tmp_path, "down")
    folder.config["lora_alpha"] = 1e7
    half_problem = replace(PROBLEM, dtype=torch.float16)
    assert folder.load().lora_b2.isfinite().all()
    with pytest.raises(WeightsError, match=r"lora_B.weight: got values .* in torch.float16"):
        folder.load(half_problem)
    folder.config["lora_alpha"] = 8
    folder.tensors |= {k: 1e7 * a for k, a in folder.tensors.items() if "lora_A" in k}
    with pytest.raises(WeightsError, match=r"lora_A.weight: got values .* in torch.float16"):
        folder.load(half_problem)
