"""Invalid checkpoints raise typed errors that name the file, the key, its value and what is needed
instead.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from invalid_checkpoints import FILE, INVALID_CHECKPOINTS
from safetensors.torch import load_file, save_file

import modular_kernel as mk
from modular_kernel.checkpoints import safetensors_files as files_module
from modular_kernel.errors import ConfigurationError, DeviceError, InputError
from modular_kernel.testing.checkpoints.samples import write

# The headers of files do not reveal these errors, so they are raised after a tensor is read.
DETECTED_IN_VALUES = (
    "a scale of NaN",
    "a group scale of infinity",
    "an E8M0 scale of NaN",
    "a channel scale of 0",
    "a static scale below 0",
    "an infinite reciprocal of a matrix scale",
    "a matrix scale of NaN",
    "columns out of order",
    "act-order groups of different sizes",
    "gate and up in different column orders",
)


@pytest.mark.parametrize("case", INVALID_CHECKPOINTS)
def test_invalid_checkpoint_is_refused(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors that file headers reveal must be raised before any tensor is read."""
    write_checkpoint, error_type, message = INVALID_CHECKPOINTS[case]
    write_checkpoint(tmp_path)
    names_read = list[str]()
    monkeypatch.setattr(
        files_module.TensorFiles, "read", wrap_read(names_read, files_module.TensorFiles.read)
    )
    with pytest.raises(error_type, match=message) as raised:
        mk.load_experts(tmp_path, 0)
    assert type(raised.value) is error_type
    assert raised.value.got is not None
    assert raised.value.need is not None
    assert bool(names_read) == (case in DETECTED_IN_VALUES)


def wrap_read(names: list[str], original_read: Any) -> Any:
    """Return a replacement of `TensorFiles.read` that also appends tensor names to `names`."""

    def read_and_record(self: Any, name: str, box: Any) -> torch.Tensor:
        names.append(name)
        tensor: torch.Tensor = original_read(self, name, box)
        return tensor

    return read_and_record


@pytest.mark.parametrize("file_kind", ["fifo", "folder", "missing", "loop"])
def test_non_regular_file_is_refused(file_kind: str, tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / FILE
    path.unlink()
    if file_kind == "fifo":
        os.mkfifo(path)
    elif file_kind == "folder":
        path.mkdir()
    elif file_kind == "loop":
        path.symlink_to(path)
    with pytest.raises(InputError, match=str(tmp_path)):
        mk.load_experts(path if file_kind == "missing" else tmp_path, 0)


def test_symbolic_link_is_followed(tmp_path: Path) -> None:
    """Snapshots in the cache of the Hugging Face Hub consist of links to files elsewhere."""
    write(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for name in (FILE, "config.json"):
        (tmp_path / "snapshot" / name).symlink_to(tmp_path / "blobs" / name)
    assert mk.load_experts(tmp_path / "snapshot", 0).weights.w1.shape == (4, 512, 128)


def test_single_file_needs_a_config_in_its_folder_or_as_an_argument(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "config.json").rename(tmp_path / "other.json")
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        mk.load_experts(tmp_path / FILE, 0)
    loaded = mk.load_experts(tmp_path / FILE, 0, config=tmp_path / "other.json")
    assert loaded.weights.w1.shape == (4, 512, 128)


def test_error_lists_layers_and_prefixes_with_experts(tmp_path: Path) -> None:
    write(tmp_path, "qwen3_moe", layers=(3, 4, 5, 9))
    with pytest.raises(ConfigurationError, match="layer: got 0, need one with experts: 3 to 5, 9"):
        mk.load_experts(tmp_path, 0)
    tensors = load_file(tmp_path / FILE)
    mtp_tensors = {n.replace("model.", "mtp."): t.clone() for n, t in tensors.items()}
    save_file(tensors | mtp_tensors, tmp_path / FILE)
    mk.load_experts(tmp_path, 3)  # "model." takes precedence over "mtp."
    other_tensors = {n.replace("model.", "other."): t for n, t in tensors.items()}
    save_file(other_tensors | mtp_tensors, tmp_path / FILE)
    with pytest.raises(ConfigurationError, match=r"got 'mtp\.' and 'other\.', need prefix="):
        mk.load_experts(tmp_path, 3)
    assert mk.load_experts(tmp_path, 3, prefix="mtp.").weights.w1.shape == (4, 512, 128)


INVALID_ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"ep": (2, 2)}, r"ep: rank: got 2, need in \[0, 2\)"),
    "tp": ({"tp": (-1, 2)}, "tp: rank: got -1"),
    "ranks": ({"ep": (0, 0)}, "ep: ranks: got 0"),
    "more ranks than experts": ({"ep": (0, 5)}, "an expert for each of 5 ranks"),
    "a list": ({"ep": [0, 1]}, "ep: .rank, ranks.: got list"),
    "dtype": ({"dtype": "int8"}, "dtype: got int8"),
    "placement": ({"placement": "round"}, "placement"),
    "device": ({"device": "gpu"}, "device: got 'gpu', need a torch device"),
    "config": ({"config": 3}, "config: got 3"),
    "prefix": ({"prefix": 3}, "prefix: got 3"),
    "unknown prefix": ({"prefix": "x."}, "no experts, need experts in x.layers.L"),
}


@pytest.mark.parametrize("case", INVALID_ARGUMENTS)
def test_invalid_arguments_are_refused(case: str, tmp_path: Path) -> None:
    write(tmp_path)
    arguments, message = INVALID_ARGUMENTS[case]
    with pytest.raises(ConfigurationError, match=message):
        mk.load_experts(tmp_path, 0, **arguments)
    with pytest.raises(ConfigurationError, match="checkpoint: got 7"):
        mk.load_experts(7, 0)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"layer: got 0.5"):
        mk.load_experts(tmp_path, 0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cuda:99", "meta"])
def test_unusable_device_is_refused(device: str, tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(DeviceError, match=f"device: got {device.partition(':')[0]}"):
        mk.load_experts(tmp_path, 0, device=device)


def test_missing_safetensors_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(
        ConfigurationError, match=r"got no safetensors, need .*pip install safetensors"
    ):
        mk.load_experts(tmp_path, 0)
