"""`mk` judges each quantization scheme of a model whose layers have several schemes."""

import json
from pathlib import Path

import pytest
from mixed_samples import MIXED, write_mixed
from run_mk import run_mk

from modular_kernel.testing.checkpoints.published_formats import CHECKPOINT_FORMATS

PAIR = ("--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "TorchExperts")
MIXED_FORMAT = "compressed-tensors, two groups"
INT4, CHANNEL = "int4_w4a16_group:group=32", "fp8_w8a8_channel"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_mixed(tmp_path, *MIXED[MIXED_FORMAT])
    return tmp_path


def test_check_has_a_verdict_for_each_scheme(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for model in (folder, folder / "config.json"):
        result = run_mk(capsys, "check", *PAIR, "--model", str(model))
        assert result.code == 0
        lines = [line for line in result.out.splitlines() if "layer" in line or "valid" in line]
        verdict_lines = lines[-4:]
        assert verdict_lines[0] == f"layers 0, 2: {INT4}"
        assert verdict_lines[2] == f"layer 1: {CHANNEL}"
        assert f"quant={INT4}" in verdict_lines[1]
        assert f"quant={CHANNEL}" in verdict_lines[3]
        record = run_mk(capsys, "check", *PAIR, "--model", str(model), "--json").json
        groups = [(group["layers"], group["problem"]["quant"]) for group in record["groups"]]
        assert groups == [([0, 2], INT4), ([1], CHANNEL)]
        assert all(group["ok"] for group in record["groups"])
        assert ("checkpoint" in record) == (model == folder)
    description = f"experts of layers 0, 2 in {INT4} (compressed-tensors), "
    assert description in run_mk(capsys, "check", *PAIR, "--model", str(folder)).out


def test_record_of_a_folder_lists_its_groups(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = run_mk(capsys, "check", *PAIR, "--model", str(folder), "--json").json["checkpoint"]
    assert record["layers"] == [0, 1, 2]
    assert (record["format"], record["quant"]) == (None, None)
    assert [group["layers"] for group in record["groups"]] == [[0, 2], [1]]
    assert sum(group["bytes"] for group in record["groups"]) == record["bytes"]


def test_one_refused_scheme_fails_the_model(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """GroupedGemmExperts supports fp8, but not int4."""
    args = ("check", *PAIR[:3], "GroupedGemmExperts", "--model", str(folder))
    result = run_mk(capsys, *args)
    assert result.code == 1
    assert result.out.count("valid for") == 1
    assert result.out.count("refused for") == 1
    assert run_mk(capsys, *args, "--quant", CHANNEL).code == 0


def test_matrix_is_printed_for_each_scheme(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_mk(capsys, "check", "--model", str(folder / "config.json"))
    assert result.code == 0
    assert result.out.count("pairings are valid") == 2
    record = run_mk(capsys, "check", "--model", str(folder / "config.json"), "--json").json
    assert [len(group["pairs"]) > 10 for group in record["groups"]] == [True, True]


def test_plan_estimates_each_scheme(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("plan", "--machine", "h200", "--tokens", "64", "--model", str(folder / "config.json"))
    result = run_mk(capsys, *args)
    assert result.code == 0
    assert "layers 0, 2 (int4_w4a16_group:group=32): decode on h200" in result.out
    assert "layer 1 (fp8_w8a8_channel): decode on h200" in result.out
    rows = run_mk(capsys, *args, "--json").json["estimates"]
    bytes_by_layers = {tuple(row["layers"]): row["weights_bytes"] for row in rows}
    assert set(bytes_by_layers) == {(0, 2), (1,)}
    assert bytes_by_layers[0, 2] < bytes_by_layers[1,]
    rows = run_mk(capsys, *args, "--quant", "none", "--json").json["estimates"]
    assert all(row["layers"] is None for row in rows)


@pytest.mark.parametrize("verb", ["compose", "plan", "check"])
def test_quant_selects_one_scheme(
    folder: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    args = (verb, "--model", str(folder / "config.json"))
    if verb == "compose":
        result = run_mk(capsys, *args)
        assert result.code == 2
        assert f"several schemes (layers 0, 2: {INT4}; layer 1: {CHANNEL})" in result.err
        assert "--quant to select one" in result.err
        return
    result = run_mk(capsys, *args, "--quant", CHANNEL)
    assert "layer 1:" not in result.out
    assert INT4 not in result.out


def test_layers_for_multi_token_prediction_are_not_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_mixed(
        tmp_path, {0: "awq", 1: "awq", 2: "bf16"}, CHECKPOINT_FORMATS["awq"].config, num_layers=2
    )
    result = run_mk(capsys, "check", *PAIR, "--model", str(tmp_path))
    assert result.code == 0
    assert "experts of layers 0 to 1 in int4" in result.out
    assert "; MTP layer 2 unquantized, according to" in result.out
    assert result.out.count("valid for") == 1
    record = run_mk(capsys, "check", *PAIR, "--model", str(tmp_path), "--json").json
    assert record["checkpoint"]["mtp_layers"] == {"2": "unquantized"}


def test_dense_models_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_mixed(tmp_path, {0: "bf16"}, None)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_experts": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run_mk(capsys, "check", "--model", str(tmp_path / "config.json"))
    assert result.code == 2
    assert "got num_experts = 1: a dense model, need a model with 2 or more experts" in result.err
