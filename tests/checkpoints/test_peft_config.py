"""Options of PEFT's adapter_config.json beyond plain LoRA are refused, and the error names them."""

from pathlib import Path

import pytest
import torch
from peft_samples import PROBLEM, AdapterFolder, E, I

from modular_kernel.checkpoints.peft import load_adapter
from modular_kernel.errors import ConfigurationError, WeightsError


def test_layers_outside_layers_to_transform_are_zero(tmp_path: Path) -> None:
    folder = AdapterFolder(tmp_path, "down")
    with pytest.raises(WeightsError, match="got no tensor of layer 7"):
        folder.load(layer=7)
    folder.config["layers_to_transform"] = [0, 1]
    zero_adapter = folder.load(layer=7)
    assert zero_adapter.lora_a2.shape == (E, 1, I)
    assert not zero_adapter.lora_a2.any()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "LOHA"), ("peft_type", None), ("use_dora", True), ("bias", "all"),
        ("modules_to_save", ["lm_head"]), ("lora_bias", True), ("fan_in_fan_out", True),
        ("layer_replication", [[0, 2]]), ("of_a_later_release", {"a": 1}), ("use_rslora", 1),
        ("init_lora_weights", "pissa"), ("r", 0), ("r", None), ("lora_alpha", "8"),
        ("lora_alpha", None), ("lora_alpha", 1 << 2000), ("rank_pattern", {"w2": 0}),
        ("rank_pattern", ["w2"]), ("rank_pattern", {"(": 2}), ("alpha_pattern", {"(a+)+": 2}),
        ("rank_pattern", {"a*b*c*d*": 2}), ("layers_to_transform", "all"), ("peft_version", 19),
        ("rank_pattern", {"(?i)w2": 2}), ("rank_pattern", {"a)|(b": 2}),
        ("layers_to_transform", True), ("layers_to_transform", -1),
        ("layers_to_transform", [0, -1]), ("layers_to_transform", [0, "1"]),
        ("layers_to_transform", 1.0), ("layers_to_transform", {"1": 1}),
        ("target_modules", 7), ("target_modules", {"w1": 1}), ("target_modules", ["w1", 2]),
        ("target_modules", True), ("target_parameters", "experts.down_proj"),
        ("target_parameters", [None]), ("exclude_modules", [1]), ("exclude_modules", 0),
        ("init_lora_weights", 1), ("init_lora_weights", 0.0), ("init_lora_weights", []),
        ("init_lora_weights", "True"),
    ],
)  # fmt: skip
def test_unsupported_options_are_refused(tmp_path: Path, field: str, value: object) -> None:
    folder = AdapterFolder(tmp_path, "modules")
    folder.config[field] = value
    with pytest.raises(ConfigurationError, match=rf"adapter_config.json: {field}: got"):
        folder.load()


def test_fields_without_effect_are_accepted(tmp_path: Path) -> None:
    folder = AdapterFolder(tmp_path, "down")
    want = folder.load()
    folder.config.update(rank_pattern=None, alpha_pattern=None, exclude_modules=["lm_head"])
    assert torch.equal(folder.load().lora_b2, want.lora_b2)


def test_layers_to_transform_with_a_module_pattern_is_refused(tmp_path: Path) -> None:
    """PEFT does not write adapters with both options."""
    folder = AdapterFolder(tmp_path, "modules")
    folder.config["target_modules"] = "w[123]"
    assert folder.load().lora_a2.any()
    folder.config["layers_to_transform"] = [1]
    with pytest.raises(ConfigurationError, match=r"layers_to_transform: got \[1\], need none if"):
        folder.load()


@pytest.mark.parametrize(
    ("layers", "is_adapted"), [(1, True), ([1], True), ([0], False), ([], True)]
)
def test_empty_layers_to_transform_means_all_layers(
    tmp_path: Path, layers: object, is_adapted: bool
) -> None:
    """PEFT also applies adapters with an empty list to all layers."""
    folder = AdapterFolder(tmp_path, "modules")
    folder.config["layers_to_transform"] = layers
    if is_adapted:
        assert folder.load().lora_a2.any()
        return
    with pytest.raises(WeightsError, match="layers_to_transform"):
        folder.load()


@pytest.mark.parametrize("config_json", ["", "[]", "{", '{"r": 1, "r": 2}', None])
def test_invalid_config_is_refused(tmp_path: Path, config_json: str | None) -> None:
    folder = AdapterFolder(tmp_path, "down")
    path = folder.path / "adapter_config.json"
    path.unlink() if config_json is None else path.write_text(config_json)
    with pytest.raises(ConfigurationError, match=r"adapter_config.json: got"):
        load_adapter(folder.path, 1, PROBLEM)


def test_config_larger_than_1_mib_is_refused(tmp_path: Path) -> None:
    path = AdapterFolder(tmp_path, "down").path / "adapter_config.json"
    config_json = path.read_text()
    path.write_text(config_json.ljust(1 << 20))
    assert load_adapter(path.parent, 1, PROBLEM).lora_a2.any()
    path.write_text(config_json.ljust((1 << 20) + 1))
    with pytest.raises(ConfigurationError, match=r"adapter_config.json: got"):
        load_adapter(path.parent, 1, PROBLEM)


def test_tensors_of_a_layer_outside_layers_to_transform_are_refused(tmp_path: Path) -> None:
    folder = AdapterFolder(tmp_path, "modules")
    folder.config["layers_to_transform"] = [0]
    with pytest.raises(WeightsError, match="got tensors of layer 1, need none: layers_to_tr"):
        folder.load()
