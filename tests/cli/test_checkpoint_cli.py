"""`mk check --model FOLDER` checks the tensors of a checkpoint, not only its config.json."""

import json
from pathlib import Path

import pytest
import torch
from mixed_samples import MIXED, write_mixed
from run_mk import run_mk
from safetensors.torch import load_file, save_file

from modular_kernel.checkpoints.inspection import inspect
from modular_kernel.checkpoints.loading import load_experts
from modular_kernel.errors import DtypeError
from modular_kernel.testing.checkpoints.samples import write

PAIR = ("--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "TorchExperts")


def test_layers_and_format_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "deepseek_v3", "deepseek fp8", layers=(3, 4, 5, 7), intermediate=192, shards=2)
    result = run_mk(capsys, "check", *PAIR, "--model", str(tmp_path))
    assert result.code == 0
    description = "experts of layers 3 to 5, 7 in fp8_w8a8_block (fp8), 1180032 bytes"
    assert f"{description}, according to its config.json" in result.out
    # A block of 128 rows, as in the checkpoint, would not divide the intermediate size of 192.
    assert "quant=fp8_w8a8_block:block=64x128" in result.out
    record = run_mk(capsys, "check", *PAIR, "--model", str(tmp_path), "--json").json
    assert record["checkpoint"] == {
        "layers": [3, 4, 5, 7],
        "format": "fp8_w8a8_block (fp8)",
        "bytes": 1180032,
        "quant": "fp8_w8a8_block:block=64x128",
        "groups": [
            {
                "layers": [3, 4, 5, 7],
                "format": "fp8_w8a8_block (fp8)",
                "quant": "fp8_w8a8_block:block=64x128",
                "bytes": 1180032,
            }
        ],
        "mtp_layers": {},
        "dtype_of_files": False,
        "converted": [],
    }
    result = run_mk(capsys, "check", *PAIR, "--model", str(tmp_path), "--quant", "none")
    assert "quant=" not in result.out


def test_size_counts_only_experts(tmp_path: Path) -> None:
    write(tmp_path, "gpt_oss", "mxfp4", layers=(0, 1))
    tensors = load_file(tmp_path / "model.safetensors")
    assert inspect(tmp_path).nbytes == sum(t.nbytes for n, t in tensors.items() if "experts" in n)


def test_tensors_that_contradict_the_config_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "mixtral", "awq", layers=(0, 1))
    tensors = load_file(tmp_path / "model.safetensors")
    missing = "model.layers.1.block_sparse_moe.experts.3.w2.scales"
    del tensors[missing]
    save_file(tensors, tmp_path / "model.safetensors")
    result = run_mk(capsys, "check", *PAIR, "--model", str(tmp_path))
    assert result.code == 2
    assert f"got no {missing}" in result.err
    # The config.json alone is valid.
    assert run_mk(capsys, "check", *PAIR, "--model", str(tmp_path / "config.json")).code == 0


def test_folders_with_only_a_config_are_checked_by_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    result = run_mk(capsys, "check", *PAIR, "--model", str(tmp_path))
    assert result.code == 0
    assert "according to its config.json" not in result.out


def remove_dtype(folder: Path) -> None:
    """Remove the dtype from the config.json in a folder."""
    config = json.loads((folder / "config.json").read_text())
    del config["torch_dtype"]
    (folder / "config.json").write_text(json.dumps(config))


def test_dtype_of_the_files_is_used_if_the_config_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "mixtral", "fp32", shards=2)
    remove_dtype(tmp_path)
    result = run_mk(capsys, "check", *PAIR, "--model", str(tmp_path))
    assert "-float32" in result.out
    assert "dtype" not in result.err
    source = "according to its config.json; it has no dtype, using float32 of the files\n"
    assert source in result.out
    record = run_mk(capsys, "check", *PAIR, "--model", str(tmp_path), "--json").json
    assert record["checkpoint"]["dtype_of_files"] is True
    assert inspect(tmp_path).problem_fields["dtype"] == "float32"
    assert load_experts(tmp_path, 0).weights.w1.dtype == torch.float32
    result = run_mk(capsys, "check", *PAIR, "--model", str(tmp_path), "--dtype", "float16")
    assert "-float16" in result.out
    assert "it has no dtype" not in result.out
    assert "config.json; the files have float32, loaded as float16\n" in result.out


@pytest.mark.parametrize("in_one_layer", [True, False], ids=["in a layer", "between layers"])
def test_files_of_several_dtypes_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], in_one_layer: bool
) -> None:
    """Conversion of the files to one dtype could round values or overflow."""
    write(tmp_path, "mixtral", "fp32", layers=(0, 1))
    path = tmp_path / "model.safetensors"
    changed_name = "layers.0.block_sparse_moe.experts.2.w3" if in_one_layer else "layers.1."
    dtypes = {True: torch.float16, False: torch.bfloat16}
    tensors = {name: t.to(dtypes[changed_name in name]) for name, t in load_file(path).items()}
    save_file(tensors, path)
    dtype_by_config = load_experts(tmp_path, 0).weights.w1.dtype
    args = ("check", *PAIR, "--model", str(tmp_path))
    assert run_mk(capsys, *args).code == 0
    remove_dtype(tmp_path)
    result = run_mk(capsys, *args)
    assert (result.code, result.out) == (2, "")
    message_end = "need one dtype, or an explicit one in config.json or by dtype= or --dtype\n"
    assert result.err.endswith(message_end)
    for text in ("bfloat16 in ", " and float16 in "):
        assert text in result.err
    if in_one_layer:
        assert f"model.{changed_name}.weight" in result.err
        with pytest.raises(DtypeError, match=r"got bfloat16 in .* and float16 in .*w3\.weight"):
            load_experts(tmp_path, 0)
    else:  # each layer has a single dtype
        assert load_experts(tmp_path, 0).weights.w1.dtype == torch.bfloat16
        assert load_experts(tmp_path, 1).weights.w1.dtype == torch.float16
    result = run_mk(capsys, *args, "--dtype", "float32")
    assert result.code == 0
    assert "-float32" in result.out
    w1 = load_experts(tmp_path, 0, dtype="float32").weights.w1
    assert w1.dtype == torch.float32
    assert dtype_by_config == torch.float32
    up = tensors["model.layers.0.block_sparse_moe.experts.2.w3.weight"]
    assert torch.equal(w1[2].chunk(2)[1], up.float())


def test_converted_dtypes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "mixtral", "fp32")
    remove_dtype(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({name: tensor.double() for name, tensor in load_file(path).items()}, path)
    result = run_mk(capsys, "check", *PAIR, "--model", str(tmp_path))
    assert result.code == 2
    assert "block_sparse_moe.experts.0.w1.weight: got float64, need bfloat16 or" in result.err


@pytest.mark.parametrize("format_name", ["fp32", "deepseek fp8"])
def test_assumed_dtype_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], format_name: str
) -> None:
    """A config.json alone, and quantized files, do not determine the dtype."""
    write(tmp_path, "deepseek_v3", format_name)
    model = tmp_path / ("config.json" if format_name == "fp32" else ".")
    note = f"{model} has no dtype; using bfloat16 (see --dtype)"
    assert note not in run_mk(capsys, "check", *PAIR, "--model", str(model)).err
    remove_dtype(tmp_path)
    result = run_mk(capsys, "check", *PAIR, "--model", str(model))
    assert "-bfloat16" in result.out
    assert result.err.count(note) == 1
    result = run_mk(capsys, "check", *PAIR, "--model", str(model), "--dtype", "float32")
    assert "assumed" not in result.err
    result = run_mk(capsys, "check", *PAIR, "--model", "Qwen/Qwen3-30B-A3B")  # no file
    assert "assumed" not in result.err


def test_dtype_of_the_files_is_read_from_an_unquantized_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files of the first layer, which is quantized, do not have the activations' dtype."""
    write_mixed(tmp_path, *MIXED["fp8, excluded layers"])
    config = json.loads((tmp_path / "config.json").read_text())
    del config["torch_dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run_mk(capsys, "check", *PAIR, "--model", str(tmp_path))
    assert result.code == 0
    assert "it has no dtype, using bfloat16 of the files" in result.out
