"""If transformers cannot read a file, or would misread it, a typed error names the file."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("transformers") is None:
    pytest.skip("the extra is not installed", allow_module_level=True)

from safetensors.torch import load_file, save_file
from test_transformers_quantized import write

from modular_kernel.errors import InputError
from modular_kernel.integrations.transformers import from_pretrained, register

Change = Callable[[Path], Any]
HEAD = "lm_head.weight"


def edit_config(**changes: Any) -> Change:
    """Return a change of keys of config.json. The value `...` removes a key."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        content = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))

    return change


def write_file(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content)


def edit_index(change: Callable[[dict[str, Any]], Any]) -> Change:
    """Return a change that splits the file in two and writes an index.

    Args:
        change: gets the index's map from tensors to files, and changes the map in place or
            returns the text of the index.
    """

    def split(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        files = {name: f"part{number % 2}.safetensors" for number, name in enumerate(tensors)}
        for file in sorted(set(files.values())):
            file_tensors = {name: tensor for name, tensor in tensors.items() if files[name] == file}
            save_file(file_tensors, folder / file, {"format": "pt"})
        result = change(files)
        content = (
            result if isinstance(result, str) else json.dumps({"metadata": {}, "weight_map": files})
        )
        (folder / "model.safetensors.index.json").write_text(content)

    return split


def split_and_remove_file(folder: Path) -> None:
    edit_index(lambda files: None)(folder)
    (folder / "part1.safetensors").unlink()


def cast_tensor(name: str, dtype: torch.dtype) -> Change:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors[name] = tensors[name].to(dtype)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return change


EXPERT = "model.layers.0.block_sparse_moe.experts.3.w1.weight"
KINDS = ("bf16", "awq")
# The formats of the files, their change, and the error message, by case.
BAD_FILES: dict[str, tuple[tuple[str, ...], Change, str]] = {
    "no config.json": (
        KINDS, lambda folder: (folder / "config.json").unlink(), "config.json: got ValueError"),
    "an empty config.json": (KINDS, write_file("config.json", ""), "config.json: got OSError"),
    "an unknown model_type": (
        KINDS, edit_config(model_type="nothing"), "config.json: got ValueError"),
    "no model_type": (KINDS, edit_config(model_type=...), "config.json: got ValueError"),
    "a size that is text": (
        KINDS, edit_config(hidden_size="x"), "hidden_size' expected int, got str"),
    "an unknown dtype": (
        KINDS, edit_config(torch_dtype=..., dtype="x"), "config.json: got Attribute"),
    "a dtype of integers": (("bf16",), edit_config(torch_dtype=..., dtype="int8"),
                            "dtype: got torch.int8, need a floating-point dtype of at least 16"),
    "a dtype of 8 bits": (("bf16",), edit_config(torch_dtype=..., dtype="float8_e4m3fn"),
                          "dtype: got torch.float8_e4m3fn, need a floating-point dtype"),
    "an unknown activation": (KINDS, edit_config(hidden_act="x"), "'?x'?"),
    "an empty quantization_config": (
        KINDS, edit_config(quantization_config={}), "got {}, need an object with quant_method"),
    "a generation config that is a list": (
        KINDS, write_file("generation_config.json", "[]"), "got TypeError: 'list' object"),
    "an invalid value in the generation config": (
        KINDS, write_file("generation_config.json", '{"max_new_tokens": -3}'),
        "must be greater than 0"),
    "a missing file": (
        KINDS, split_and_remove_file, "no part1.safetensors, of 2 files that the index lists"),
    "an index that is not JSON": (KINDS, edit_index(lambda files: "{"), "index.json: got no JSON"),
    "an index without files": (
        KINDS, edit_index(lambda files: "{}"), "index.json: got no weight_map"),
    "an index of numbers": (
        KINDS, edit_index(lambda files: files.update({HEAD: 5})),
        "lm_head.weight in '5', need a file"),
    "an index with a path outside the folder": (
        KINDS, edit_index(lambda files: files.update({HEAD: "../x.safetensors"})),
        "in '../x.safeten"),
    "an index that names a missing file": (
        KINDS, edit_index(lambda files: files.update({HEAD: "x.safetensors"})),
        "no x.safetensors, of 3"),
    "no file": (("bf16",), lambda folder: (folder / "model.safetensors").unlink(),
                "got OSError: Error no file named model.safetensors"),
    "float8 without a format": (
        ("bf16",), cast_tensor(HEAD, torch.float8_e4m3fn),
        "lm_head.weight: got float8_e4m3fn without a quantization_config, need an unquantized"),
    "integers without a format": (
        ("bf16",), cast_tensor(EXPERT, torch.int8), "w1.weight: got int8 without a quantization_"),
}  # fmt: skip
CASES = [(name, kind) for name, (kinds, _, _) in BAD_FILES.items() for kind in kinds]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_unreadable_files_are_refused(name: str, kind: str, tmp_path: Path) -> None:
    write(tmp_path, "mixtral", kind)
    _, change, match = BAD_FILES[name]
    change(tmp_path)
    with pytest.raises(InputError, match=match):
        from_pretrained(tmp_path, experts_implementation=register())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, "int32", "nothing"])
def test_unsupported_dtypes_are_refused(dtype: Any, tmp_path: Path) -> None:
    write(tmp_path, "mixtral", "bf16")
    with pytest.raises(
        InputError, match=r"dtype: got .*, need a floating-point dtype of at least 16 bits"
    ):
        from_pretrained(tmp_path, experts_implementation=register(), dtype=dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_models_in_several_files_are_loaded(kind: str, tmp_path: Path) -> None:
    write(tmp_path, "mixtral", kind)
    edit_index(lambda files: None)(tmp_path)
    assert from_pretrained(tmp_path, experts_implementation=register())
