"""`mk check --model FOLDER` judges the tensors of a checkpoint, not only its config.json."""

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
    ended = run_mk(capsys, "check", *PAIR, "--model", str(tmp_path))
    assert ended.code == 0
    told = "experts of layers 3 to 5, 7 in fp8_w8a8_block (fp8), 1180032 bytes"
    assert f"{told}, according to its config.json" in ended.out
    assert "quant=fp8_w8a8_block:block=64x128" in ended.out  # as the layer will have it
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
    asked = run_mk(capsys, "check", *PAIR, "--model", str(tmp_path), "--quant", "none")
    assert "quant=" not in asked.out


def test_bytes_are_those_of_experts(tmp_path: Path) -> None:
    write(tmp_path, "gpt_oss", "mxfp4", layers=(0, 1))
    tensors = load_file(tmp_path / "model.safetensors")
    assert inspect(tmp_path).nbytes == sum(t.nbytes for n, t in tensors.items() if "experts" in n)


def test_tensors_that_contradict_the_config_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "mixtral", "awq", layers=(0, 1))
    tensors = load_file(tmp_path / "model.safetensors")
    gone = "model.layers.1.block_sparse_moe.experts.3.w2.scales"
    save_file(
        {name: t for name, t in tensors.items() if name != gone}, tmp_path / "model.safetensors"
    )
    ended = run_mk(capsys, "check", *PAIR, "--model", str(tmp_path))
    assert ended.code == 2
    assert f"got no {gone}" in ended.err
    # Its config.json alone says nothing of that.
    assert run_mk(capsys, "check", *PAIR, "--model", str(tmp_path / "config.json")).code == 0


def test_folder_with_only_a_config_is_judged_by_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    ended = run_mk(capsys, "check", *PAIR, "--model", str(tmp_path))
    assert ended.code == 0
    assert "according to its config.json" not in ended.out


def without_dtype(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["torch_dtype"]
    (folder / "config.json").write_text(json.dumps(config))


def test_dtype_of_the_files_is_used_without_one_in_the_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "mixtral", "fp32", shards=2)
    without_dtype(tmp_path)
    ended = run_mk(capsys, "check", *PAIR, "--model", str(tmp_path))
    assert "-float32" in ended.out
    assert "dtype" not in ended.err
    told = "according to its config.json; it has no dtype, using float32 of the files\n"
    assert told in ended.out
    record = run_mk(capsys, "check", *PAIR, "--model", str(tmp_path), "--json").json
    assert record["checkpoint"]["dtype_of_files"] is True
    assert inspect(tmp_path).problem_fields["dtype"] == "float32"
    assert load_experts(tmp_path, 0).weights.w1.dtype == torch.float32
    asked = run_mk(capsys, "check", *PAIR, "--model", str(tmp_path), "--dtype", "float16")
    assert "-float16" in asked.out
    assert "it has no dtype" not in asked.out
    assert "config.json; the files have float32, loaded as float16\n" in asked.out


@pytest.mark.parametrize("within", [True, False], ids=["in a layer", "between layers"])
def test_files_of_several_dtypes_determine_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], within: bool
) -> None:
    """Using one dtype for all could round values of another 16-bit dtype, or overflow."""
    write(tmp_path, "mixtral", "fp32", layers=(0, 1))
    path = tmp_path / "model.safetensors"
    other = "layers.0.block_sparse_moe.experts.2.w3" if within else "layers.1."
    kinds = {True: torch.float16, False: torch.bfloat16}
    changed = {name: t.to(kinds[other in name]) for name, t in load_file(path).items()}
    save_file(changed, path)
    stated = load_experts(tmp_path, 0).weights.w1.dtype
    words = ("check", *PAIR, "--model", str(tmp_path))
    assert run_mk(capsys, *words).code == 0
    without_dtype(tmp_path)
    ended = run_mk(capsys, *words)
    assert (ended.code, ended.out) == (2, "")
    need = "need one dtype, or an explicit one in config.json or by dtype= or --dtype\n"
    assert ended.err.endswith(need)
    for kind in ("bfloat16 in ", " and float16 in "):
        assert kind in ended.err
    if within:
        assert f"model.{other}.weight" in ended.err
        with pytest.raises(DtypeError, match=r"got bfloat16 in .* and float16 in .*w3\.weight"):
            load_experts(tmp_path, 0)
    else:  # each layer has one
        assert load_experts(tmp_path, 0).weights.w1.dtype == torch.bfloat16
        assert load_experts(tmp_path, 1).weights.w1.dtype == torch.float16
    asked = run_mk(capsys, *words, "--dtype", "float32")
    assert asked.code == 0
    assert "-float32" in asked.out
    exact = load_experts(tmp_path, 0, dtype="float32").weights.w1
    assert exact.dtype == torch.float32
    assert stated == torch.float32
    first = changed["model.layers.0.block_sparse_moe.experts.2.w3.weight"]
    assert torch.equal(exact[2].chunk(2)[1], first.float())


def test_converted_dtypes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "mixtral", "fp32")
    without_dtype(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({name: tensor.double() for name, tensor in load_file(path).items()}, path)
    ended = run_mk(capsys, "check", *PAIR, "--model", str(tmp_path))
    assert ended.code == 2
    assert "block_sparse_moe.experts.0.w1.weight: got float64, need bfloat16 or" in ended.err


@pytest.mark.parametrize("kind", ["fp32", "deepseek fp8"])
def test_assumed_dtype_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """A config.json alone, and quantized files, do not determine the dtype."""
    write(tmp_path, "deepseek_v3", kind)
    given = tmp_path / ("config.json" if kind == "fp32" else ".")
    told = f"{given} has no dtype; using bfloat16 (see --dtype)"
    assert told not in run_mk(capsys, "check", *PAIR, "--model", str(given)).err
    without_dtype(tmp_path)
    ended = run_mk(capsys, "check", *PAIR, "--model", str(given))
    assert "-bfloat16" in ended.out
    assert ended.err.count(told) == 1
    asked = run_mk(capsys, "check", *PAIR, "--model", str(given), "--dtype", "float32")
    assert "assumed" not in asked.err
    named = run_mk(capsys, "check", *PAIR, "--model", "Qwen/Qwen3-30B-A3B")  # no file
    assert "assumed" not in named.err


def test_the_dtype_of_files_is_that_of_any_unquantized_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lowest layer, a quantized one, has none."""
    write_mixed(tmp_path, *MIXED["fp8, excluded layers"])
    config = json.loads((tmp_path / "config.json").read_text())
    del config["torch_dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    ended = run_mk(capsys, "check", *PAIR, "--model", str(tmp_path))
    assert ended.code == 0
    assert "it has no dtype, using bfloat16 of the files" in ended.out
