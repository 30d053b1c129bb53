"""`mk bench --hf` times a whole model with random weights on three experts implementations."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from run_mk import run_mk

if find_spec("transformers") is None:
    pytest.skip("the extra is not installed", allow_module_level=True)

from modular_kernel.bench import model_speed, random_model
from modular_kernel.bench.model_speed import FAILED, OK, WRONG, Implementation, Workload, measure
from modular_kernel.cli.demo_models import SMALL_MODELS, build_small_model
from modular_kernel.errors import ConfigurationError
from modular_kernel.integrations.transformers import register

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHORT = ("--prompt", "9", "--new-tokens", "3")


def write_config(folder: Path, name: str, **changes: object) -> Path:
    build_small_model(name, "float32", "cpu").config.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


@pytest.fixture(autouse=True)
def _time_once(monkeypatch) -> None:
    monkeypatch.setattr(model_speed, "_TIMED_RUNS", 1)


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_model_of_a_folder_is_timed(name, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("modular_kernel.cli.output.get_line_width", lambda _=None: 80)
    write_config(tmp_path, name, dtype="float32", quantization_config={"quant_method": "fp8"})
    record = tmp_path / "record.json"
    result = run_mk(capsys, "bench", "--hf", str(tmp_path), *SHORT, "--json", str(record))
    assert result.code == 0, result.out + result.err
    assert max(map(len, result.out.splitlines())) <= 80
    assert "quantization_config is ignored" in result.out
    assert ("kernels run in the interpreter" in " ".join(result.out.split())) is (
        DEVICE.type == "cpu"
    )
    report = json.loads(record.read_text())
    assert [row["experts"] for row in report["rows"]] == ["eager", "grouped_mm", "ours"]
    for row in report["rows"]:
        assert row["status"] == OK
        assert row["error"] <= row["bound"]
        assert min(row["prefill"], row["decode"]) > 0
    assert report["rows"][0]["error"] == 0
    assert report["model_type"] == name
    assert (report["layers"], report["dtype"]) == (2, "float32")


def test_fewer_layers_are_noted_and_names_are_accepted(monkeypatch) -> None:
    monkeypatch.setattr(random_model, "free_bytes", lambda _: None)
    build_model = random_model._build_model

    def build_on_meta_device(library, source, config, dtype, device):
        return build_model(library, source, config, dtype, torch.device("meta"))

    monkeypatch.setattr(random_model, "_build_model", build_on_meta_device)
    result = random_model.build_random_model("qwen3-235b", DEVICE, layers=2)
    config = result.model.config
    sizes = config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size
    assert sizes == (128, 8, 1536)
    assert (config.hidden_size, config.num_hidden_layers) == (4096, 2)
    assert any("2 of" in note for note in result.notes)
    assert any("defaults of Qwen3MoeConfig" in note for note in result.notes)
    assert result.bytes == 2 * result.parameters
    mixtral = random_model.build_random_model("mixtral-8x7b", DEVICE).model.config
    assert (mixtral.num_local_experts, mixtral.intermediate_size) == (8, 14336)


def test_lists_with_an_entry_per_layer_are_truncated(tmp_path) -> None:
    write_config(tmp_path, "gpt_oss")
    result = random_model.build_random_model(str(tmp_path), DEVICE, layers=1)
    assert len(result.model.config.layer_types) == 1
    assert result.layers == (1, 2)


def check_refused(source: object, match: str, **options: object) -> None:
    with pytest.raises(ConfigurationError, match=match):
        random_model.build_random_model(str(source), DEVICE, **options)


def test_models_without_experts_are_refused(tmp_path, monkeypatch) -> None:
    path = write_config(tmp_path, "deepseek_v3")
    check_refused(path, "no selectable experts in DeepseekV3ForCausalLM.*more --layers", layers=1)
    check_refused(path, "--layers: got 3, need from 1 to 2", layers=3)
    check_refused(path, "--layers: got 0", layers=0)
    write_config(tmp_path, "mixtral", model_type="llama")
    check_refused(tmp_path, "model_type = 'llama', need a supported MoE model_type")
    write_config(tmp_path, "mixtral", model_type="kimi_k2")
    check_refused(tmp_path, "model_type = 'kimi_k2', need one that AutoModelForCausalLM")
    write_config(tmp_path, "mixtral", num_key_value_heads=0)
    check_refused(tmp_path, "need a config that")
    write_config(tmp_path, "mixtral", num_hidden_layers="two")
    check_refused(tmp_path, "num_hidden_layers = 'two'")
    check_refused(
        "llama-4-scout", "the layer of meta-llama.* alone, need the path of its config.json"
    )
    write_config(tmp_path, "mixtral")
    monkeypatch.setattr(random_model, "free_bytes", lambda _: 1000)
    check_refused(tmp_path, "of weights, need at most")
    monkeypatch.setitem(sys.modules, "modular_kernel.integrations.transformers", None)
    check_refused(tmp_path, "need transformers: pip install")


def test_conflicting_options_and_invalid_numbers_are_bad_usage(capsys, tmp_path) -> None:
    write_config(tmp_path, "mixtral")
    for arguments, message in (
        (("--prompt", "9"), "--prompt: got no --hf"),
        (("--hf", str(tmp_path), "--tokens-list", "4"), "--tokens-list together with --hf"),
        (("--hf", str(tmp_path), "--quant", "none"), "--quant together with --hf"),
        (("--hf", str(tmp_path), "--new-tokens", "0"), "--new-tokens: got '0'"),
        (("--hf", "mixtral-8x"), "mixtral-8x7b"),
    ):
        result = run_mk(capsys, "bench", *arguments)
        assert result.code == 2
        assert message in result.err


def test_wrong_and_failing_implementations_have_no_speed(capsys) -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

    def double_output(module, x, ids, weights):
        return 2 * ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, x, ids, weights)

    def raise_error(module, x, ids, weights):
        raise RuntimeError("an error of the implementation")

    for name, function in (("doubled", double_output), ("broken", raise_error)):
        ExpertsInterface.register(name, function)
    refused_pair = register("BatchedPrepareAndFinalize", "TorchExperts", name="refused")
    model = build_small_model("mixtral", "float32", str(DEVICE))
    names = ("doubled", "broken", refused_pair, "eager")
    rows = measure(model, Workload(1, 5, 2), [Implementation(name, name) for name in names])
    assert [row.status for row in rows] == [WRONG, FAILED, FAILED, OK]
    assert rows[0].prefill is None
    assert rows[0].error == pytest.approx(1.0, rel=1e-3)
    assert "an error of the implementation" in rows[1].note
    assert "BatchedPrepareAndFinalize x TorchExperts" in rows[2].note
    assert model.config._experts_implementation == "eager"
    assert rows[3].error == 0
