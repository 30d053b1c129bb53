"""Selection of the files to read from a checkpoint folder, and names of models on the Hugging Face
Hub.
"""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from invalid_checkpoints import FILE, W1
from safetensors.torch import load_file, save_file

import modular_kernel as mk
from modular_kernel.checkpoints.inspection import inspect
from modular_kernel.errors import ConfigurationError, WeightsError
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.testing.checkpoints.samples import write

INDEX = "model.safetensors.index.json"
NAME = "some-group/A.model-1B"


def load_scaled_tensors(path: Path, factor: float) -> dict[str, torch.Tensor]:
    """Return the tensors of a file multiplied by a factor."""
    return {name: tensor * factor for name, tensor in load_file(path).items()}


def test_model_safetensors_takes_precedence(tmp_path: Path) -> None:
    """model.safetensors takes precedence over indices and over other files."""
    write(tmp_path, seed=1)
    want = mk.load_experts(tmp_path, 0).weights
    doubled = load_scaled_tensors(tmp_path / FILE, 2.0)
    save_file(doubled, tmp_path / "another.safetensors")
    save_file(doubled, tmp_path / "consolidated.safetensors")
    weight_map = dict.fromkeys(doubled, "another.safetensors")
    for index in (INDEX, "other.safetensors.index.json"):
        (tmp_path / index).write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(mk.load_experts(tmp_path, 0).weights.w1, want.w1)
    # A path to a file or to an index selects that file.
    for path in ("another.safetensors", INDEX, "consolidated.safetensors"):
        assert torch.equal(mk.load_experts(tmp_path / path, 0).weights.w1, 2 * want.w1)


def test_model_index_takes_precedence_over_other_indices(tmp_path: Path) -> None:
    write(tmp_path, shards=2)
    want = mk.load_experts(tmp_path, 0).weights
    (tmp_path / "consolidated.safetensors.index.json").write_text("{}")
    (tmp_path / "other.safetensors.index.json").write_text("{}")
    save_file({"x": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    assert torch.equal(mk.load_experts(tmp_path, 0).weights.w1, want.w1)
    assert inspect(tmp_path).layers == (0,)


def test_single_other_index_is_read_and_several_are_refused(tmp_path: Path) -> None:
    write(tmp_path, shards=2)
    (tmp_path / INDEX).rename(tmp_path / "a.safetensors.index.json")
    (tmp_path / "consolidated.safetensors.index.json").write_text("{}")
    want = mk.load_experts(tmp_path, 0).weights
    shutil.copy(tmp_path / "a.safetensors.index.json", tmp_path / "b.safetensors.index.json")
    message = (
        "got a.safetensors.index.json and b.safetensors.index.json, need model.safetensors.index"
    )
    with pytest.raises(ConfigurationError, match=message):
        mk.load_experts(tmp_path, 0)
    from_index = mk.load_experts(tmp_path / "b.safetensors.index.json", 0)
    assert torch.equal(from_index.weights.w1, want.w1)


def test_duplicate_tensor_without_an_index_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    want, tensors = mk.load_experts(tmp_path, 0).weights, load_file(tmp_path / FILE)
    (tmp_path / FILE).rename(tmp_path / "consolidated.safetensors")
    assert torch.equal(mk.load_experts(tmp_path, 0).weights.w1, want.w1)  # the only file
    save_file({n: t for n, t in tensors.items() if n != W1}, tmp_path / "a.safetensors")
    save_file({W1: tensors[W1]}, tmp_path / "b.safetensors")
    assert torch.equal(mk.load_experts(tmp_path, 0).weights.w1, want.w1)
    save_file({W1: tensors[W1]}, tmp_path / "c.safetensors")
    with pytest.raises(WeightsError, match=rf"{W1}, which is in b.safetensors too, need each"):
        mk.load_experts(tmp_path, 0)


def test_missing_files_of_an_index_are_listed(tmp_path: Path) -> None:
    write(tmp_path, shards=3, layers=(0, 1))
    kept_file = tmp_path / "model-00002-of-00003.safetensors"
    for path in tmp_path.glob("model-*.safetensors"):
        if path != kept_file:
            path.unlink()
    message = (
        "got no model-00001-of-00003.safetensors, model-00003-of-00003.safetensors, of 3 files "
        "that the index lists, need these files: complete the download, or remove a stale index"
    )
    with pytest.raises(WeightsError, match=message):
        mk.load_experts(tmp_path, 0)


def test_missing_files_of_other_layers_are_ignored(tmp_path: Path) -> None:
    write(tmp_path, layers=(0, 1))
    tensors = load_file(tmp_path / FILE)
    (tmp_path / FILE).unlink()
    weight_map = {n: f"part-{'layers.1.' in n:d}.safetensors" for n in tensors}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    layer_0 = {n: t for n, t in tensors.items() if weight_map[n] == "part-0.safetensors"}
    save_file(layer_0, tmp_path / "part-0.safetensors")
    assert mk.load_experts(tmp_path, 0).weights.w1.shape == (4, 512, 128)
    with pytest.raises(WeightsError, match=r"got no part-1\.safetensors, of 2 files"):
        mk.load_experts(tmp_path, 1)


def test_safetensors_take_precedence_over_gguf(tmp_path: Path) -> None:
    """If a folder has a GGUF file and no safetensors file, the GGUF file is read and config.json is
    ignored.
    """
    write(tmp_path)
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"GGUF" + bytes(60))
    assert mk.load_experts(tmp_path, 0).weights.w1.shape == (4, 512, 128)
    (tmp_path / FILE).unlink()
    for path in (tmp_path, tmp_path / "model-Q4_K_M.gguf"):
        with pytest.raises(WeightsError, match=r"Q4_K_M\.gguf: got version 0, need version 2 or 3"):
            mk.load_experts(path, 0)


def make_hub_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a local cache of huggingface_hub, and return the snapshot folder of a model in it.

    With the local cache, tests need no network.
    """
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    model = folder / f"models--{NAME.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("abc")
    return model / "snapshots" / "abc"


def test_hub_name_is_resolved_in_the_local_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = make_hub_cache(tmp_path, monkeypatch)
    write(snapshot)
    want = mk.load_experts(snapshot, 0).weights
    assert torch.equal(mk.load_experts(NAME, 0).weights.w1, want.w1)
    assert FusedMoE.from_config(NAME, 0, top_k=2).num_experts == 4
    message = f"got 'other/{NAME[11:]}': no such file or folder.*need .*hf download other/"
    with pytest.raises(ConfigurationError, match=message):
        mk.load_experts(f"other/{NAME[11:]}", 0)


def test_huggingface_hub_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigurationError, match=f"no such model in .* hf download {NAME}"):
        mk.load_experts(NAME, 0)
    monkeypatch.chdir(tmp_path)
    write(tmp_path / NAME)  # a local folder with the name takes precedence
    assert mk.load_experts(NAME, 0).weights.w1.shape == (4, 512, 128)
