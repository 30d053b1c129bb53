"""Models of transformers run on our pairings as accurately as on transformers' own experts."""

import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from transformers_samples import DEVICE, NO_EP, skip_if_refused

from experts import TorchExperts

if find_spec("transformers") is None:
    pytest.skip("the extra is not installed", allow_module_level=True)

import transformers

from modular_kernel.cli import demo
from modular_kernel.cli.demo_models import SMALL_MODELS, build_small_model
from modular_kernel.integrations.transformers import register, registration

MODELS = tuple(SMALL_MODELS)


@pytest.fixture(scope="module")
def baselines() -> "dict[tuple[str, str], demo.Baseline]":
    return {}


@pytest.fixture
def get_baseline(baselines):
    """Return a function that returns the baseline of a small model, and computes it only once."""

    def get(name: str, dtype: str = "float32") -> demo.Baseline:
        if (name, dtype) not in baselines:
            baselines[name, dtype] = demo.run_baseline(build_small_model(name, dtype, DEVICE))
        return baselines[name, dtype]

    return get


# ------------------------------------------------------------------------------------- models


@pytest.mark.share(8)
@pytest.mark.parametrize("pair", demo.PAIRINGS, ids=" x ".join)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_within_the_bound(name, dtype, pair, get_baseline) -> None:
    skip_if_refused(pair)
    row = demo.compare_with_baseline(get_baseline(name, dtype), register(*pair), name, None)
    assert row.ok, row
    assert row.pairing == " x ".join(pair)


@pytest.mark.parametrize("name", MODELS)
def test_generation_decodes_the_same_tokens(name, get_baseline) -> None:
    """17 prompt tokens are decoded in one call, and then 31 generated tokens one at a time."""
    baseline = get_baseline(name)
    expected = demo.decode_greedily(baseline)
    assert len(set(expected)) > demo.NEW_TOKENS / 2  # the model does not repeat one token
    row = demo.compare_with_baseline(baseline, register(NO_EP, "TorchExperts"), name, expected)
    assert row.ok, row
    assert row.equal_tokens == row.decoded_tokens == demo.NEW_TOKENS


@pytest.mark.parametrize("name", MODELS)
def test_triton_decodes_the_same_tokens(name, get_baseline) -> None:
    """Few tokens are decoded, because the interpreter is slow. `mk demo` decodes more."""
    pair = (NO_EP, "TritonExperts")
    skip_if_refused(pair)
    baseline = get_baseline(name)
    row = demo.compare_with_baseline(
        baseline, register(*pair), name, demo.decode_greedily(baseline, 6)
    )
    assert row.ok, row
    assert row.equal_tokens == row.decoded_tokens == 6


@pytest.mark.parametrize("name", MODELS)
def test_replayed_routing_equals_that_of_the_float32_model(name, get_baseline) -> None:
    """Routers select the same experts in float32 and in float64, so a replay hides no error."""
    baseline, recorder = get_baseline(name), demo.RoutingRecorder()
    with recorder.record(baseline.model):
        demo.compute_logits(baseline.model, baseline.ids)
    assert recorder.by_module.keys() == baseline.routing.by_module.keys() != set()
    for module, (ids, _) in recorder.by_module.items():
        assert torch.equal(ids, baseline.routing.by_module[module][0])


class GateUpSwapped(TorchExperts):
    """A defective part that uses the gate rows of w1 as up rows, and vice versa."""

    def apply(self, tokens, *, weights, workspace, output) -> None:
        interleaved = self.problem.act.interleaved
        pairs = weights.w1.unflatten(1, (-1, 2) if interleaved else (2, -1))
        weights = replace(weights, w1=pairs.flip(2 if interleaved else 1).flatten(1, 2))
        super().apply(tokens, weights=weights, workspace=workspace, output=output)


class LastTokenDropped(TorchExperts):
    """A defective part that sets the output of the last token to 0."""

    def apply(self, tokens, *, weights, workspace, output) -> None:
        super().apply(tokens, weights=weights, workspace=workspace, output=output)
        output[-1].zero_()


class ExpertDropped(TorchExperts):
    """A defective part that ignores expert 0."""

    def apply(self, tokens, *, weights, workspace, output) -> None:
        super().apply(tokens, weights=weights, workspace=workspace, output=output)
        output[tokens.routing.topk_ids_TK == 0] = 0


class SlotsSwapped(TorchExperts):
    """A defective part that gives every (token, expert) pair the router weight of another pair."""

    def apply(self, tokens, *, weights, workspace, output) -> None:
        super().apply(tokens, weights=weights, workspace=workspace, output=output)
        output.copy_(output.roll(1, dims=1))


DEFECTIVE_PARTS = (GateUpSwapped, LastTokenDropped, ExpertDropped, SlotsSwapped)


@pytest.mark.share(4)
@pytest.mark.parametrize("mutant", DEFECTIVE_PARTS, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_the_bound_detects_a_defective_kernel(name, dtype, mutant, get_baseline) -> None:
    baseline = get_baseline(name, dtype)
    expected = demo.decode_greedily(baseline)
    row = demo.compare_with_baseline(
        baseline, register(NO_EP, mutant, name="mutant"), name, expected
    )
    assert row.difference > 2 * row.bound
    assert row.equal_tokens < row.decoded_tokens
    assert not row.ok


def test_from_config_and_from_pretrained_accept_the_name(tmp_path) -> None:
    name = register(NO_EP, "TorchExperts", name="loaded")
    model = build_small_model("mixtral", "float32", DEVICE)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", experts_implementation=name
    ).to(DEVICE)
    fresh = transformers.AutoModelForCausalLM.from_config(model.config, experts_implementation=name)
    assert fresh.config._experts_implementation == name
    assert not registration(name).kernels
    ids = torch.arange(8, device=DEVICE)[None]
    difference = (demo.compute_logits(loaded, ids) - demo.compute_logits(model, ids)).abs().max()
    assert difference < 1e-4
    assert registration(name).kernels


def test_each_name_runs_its_own_pairing(get_baseline) -> None:
    baseline = get_baseline("mixtral")
    contiguous = register(NO_EP, "TorchExperts", name="one")
    batched = register("BatchedPrepareAndFinalize", "NaiveBatchedExperts", name="two")
    for name in (contiguous, batched):
        demo.compare_with_baseline(baseline, name, "mixtral", None)
    assert {kernel.pairing for kernel in registration("one").kernels.values()} == {
        f"{NO_EP} x TorchExperts"
    }
    batched_pairings = {kernel.pairing for kernel in registration("two").kernels.values()}
    assert batched_pairings == {"BatchedPrepareAndFinalize x NaiveBatchedExperts"}


def test_switching_back_to_eager_restores_the_model(get_baseline) -> None:
    baseline = get_baseline("gpt_oss")
    before = demo.compute_logits(baseline.model, baseline.ids)
    demo.compare_with_baseline(baseline, register(NO_EP, "TorchExperts"), "gpt_oss", None)
    assert baseline.model.config._experts_implementation == "eager"
    assert torch.equal(demo.compute_logits(baseline.model, baseline.ids), before)


# --------------------------------------------------------------------------------- the command


def test_demo_fails_if_a_row_fails(monkeypatch, capsys) -> None:
    from click.exceptions import Exit

    monkeypatch.setenv("COLUMNS", "200")
    rates = {"transformers' eager": 2000.0}
    monkeypatch.setattr(demo, "_measure_rates", lambda *_: rates)

    row = demo.DemoRow("m", "float32", "a x b", 1.0, 1.0, 64, 64, 0.0)
    checkpoint_row = demo.CheckpointRow(
        "m", "awq", "int4_w4a16_group", "a x b", 1e-2, 1e-2, 64, 0.0
    )
    failing_reports = (
        ([replace(row, difference=1.1)], [checkpoint_row]),
        ([row, replace(row, equal_tokens=63)], [checkpoint_row]),
        ([replace(row, difference=float("nan"))], [checkpoint_row]),
        ([replace(row, pairing="")], [checkpoint_row]),
        ([row], [checkpoint_row, replace(checkpoint_row, pairing="a x c", error=1.1e-2)]),
        ([row], [replace(checkpoint_row, error=float("nan"))]),
        ([row], []),
        ([], [checkpoint_row]),
    )
    for rows, checkpoint_rows in failing_reports:
        monkeypatch.setattr(demo, "_run_models", lambda *a, rows=rows, **k: iter(rows))
        monkeypatch.setattr(
            demo, "_run_checkpoints", lambda *a, rows=checkpoint_rows, **k: iter(rows)
        )
        with pytest.raises(Exit) as caught:
            demo.demo()
        assert caught.value.exit_code == 1
        assert ("FAILED" in capsys.readouterr().out) is bool(rows and checkpoint_rows)
    pairings = [" x ".join(pair) for pair in demo.PAIRINGS]
    rows = [replace(row, pairing=pairing) for pairing in pairings]
    checkpoint_rows = [replace(checkpoint_row, pairing=pairing) for pairing in pairings[:2]]
    monkeypatch.setattr(demo, "_run_models", lambda *a, **k: iter(rows))
    monkeypatch.setattr(demo, "_run_checkpoints", lambda *a, **k: iter(checkpoint_rows))
    capsys.readouterr()
    demo.demo()
    output = capsys.readouterr().out
    assert "4 of 4 runs agree with transformers' own experts" in output
    assert "2 of 2 quantized layers agree with float64" in output
    assert "256 of 256 greedily decoded tokens are equal" in output
    assert f"transformers' eager {2000:,}" in output
    assert [line.split()[:2] for line in output.splitlines()[-3:]] == [
        ["mk", "check"],
        ["mk", "test"],
        ["mk", "compose"],
    ]
    assert len(output.splitlines()) <= 24


@pytest.mark.share(2)
@pytest.mark.slow
def test_demo_runs_in_one_dtype() -> None:
    """The command runs in a new process."""
    import json

    command = [sys.executable, "-m", "modular_kernel", "demo", "--dtype", "bfloat16", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert {row["model"] for row in report["rows"]} == set(MODELS)
    assert all(row["ok"] for row in report["rows"])
    assert {row["dtype"] for row in report["rows"]} == {"bfloat16"}
    assert {row["model"] for row in report["checkpoints"]} == set(MODELS)
    assert len({row["quant"].partition(":")[0] for row in report["checkpoints"]}) == 3
    assert all(row["ok"] for row in report["checkpoints"])
    assert len(report["tokens_per_second"]) == 2
    assert all(rate > 0 for rate in report["tokens_per_second"].values())
