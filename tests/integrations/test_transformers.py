"""Models of transformers on our pairings: as right as on their own experts, or refused."""

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
from modular_kernel.cli.demo_models import SMALL_MODELS, small_model
from modular_kernel.integrations.transformers import register, registration

MODELS = tuple(SMALL_MODELS)


@pytest.fixture(scope="module")
def baselines() -> "dict[tuple[str, str], demo.Baseline]":
    return {}


@pytest.fixture
def baseline_of(baselines):
    """The baseline of a small model; each is made once for all tests."""

    def made(name: str, dtype: str = "float32") -> demo.Baseline:
        if (name, dtype) not in baselines:
            baselines[name, dtype] = demo.baseline(small_model(name, dtype, DEVICE))
        return baselines[name, dtype]

    return made


# ------------------------------------------------------------------------------------- models


@pytest.mark.share(8)
@pytest.mark.parametrize("pair", demo.PAIRINGS, ids=" x ".join)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_within_the_bound(name, dtype, pair, baseline_of) -> None:
    skip_if_refused(pair)
    row = demo.compare(baseline_of(name, dtype), register(*pair), name, None)
    assert row.ok, row
    assert row.pairing == " x ".join(pair)


@pytest.mark.parametrize("name", MODELS)
def test_decodes_the_same_tokens(name, baseline_of) -> None:
    """A prefill of 17 tokens, then 31 steps of one, all chosen by the model itself."""
    base = baseline_of(name)
    own = demo.greedy_tokens(base)
    assert len(set(own)) > demo.NEW_TOKENS / 2  # not stuck
    row = demo.compare(base, register(NO_EP, "TorchExperts"), name, own)
    assert row.ok, row
    assert row.equal_tokens == row.decoded_tokens == demo.NEW_TOKENS


@pytest.mark.parametrize("name", MODELS)
def test_triton_decodes_the_same_tokens(name, baseline_of) -> None:
    """Fewer of them, for the interpreter's sake; `mk demo` decodes more."""
    pair = (NO_EP, "TritonExperts")
    skip_if_refused(pair)
    base = baseline_of(name)
    row = demo.compare(base, register(*pair), name, demo.greedy_tokens(base, 6))
    assert row.ok, row
    assert row.equal_tokens == row.decoded_tokens == 6


@pytest.mark.parametrize("name", MODELS)
def test_the_routing_replayed_is_the_model_s_own(name, baseline_of) -> None:
    """In float32 the routers choose what they choose in float64, so replaying hides nothing."""
    base, own = baseline_of(name), demo.RecordedRouting()
    with own.recorded(base.model):
        demo.logits(base.model, base.ids)
    assert own.of_module.keys() == base.routing.of_module.keys() != set()
    for module, (ids, _) in own.of_module.items():
        assert torch.equal(ids, base.routing.of_module[module][0])


class GateUpSwapped(TorchExperts):
    """The gate rows of w1 taken for the up rows, and the reverse."""

    def apply(self, tokens, *, weights, workspace, output) -> None:
        interleaved = self.problem.act.interleaved
        pairs = weights.w1.unflatten(1, (-1, 2) if interleaved else (2, -1))
        weights = replace(weights, w1=pairs.flip(2 if interleaved else 1).flatten(1, 2))
        super().apply(tokens, weights=weights, workspace=workspace, output=output)


class LastTokenDropped(TorchExperts):
    """An off-by-one at the tail."""

    def apply(self, tokens, *, weights, workspace, output) -> None:
        super().apply(tokens, weights=weights, workspace=workspace, output=output)
        output[-1].zero_()


class ExpertDropped(TorchExperts):
    """Whoever goes to expert 0 gets nothing from it."""

    def apply(self, tokens, *, weights, workspace, output) -> None:
        super().apply(tokens, weights=weights, workspace=workspace, output=output)
        output[tokens.routing.topk_ids_TK == 0] = 0


class SlotsSwapped(TorchExperts):
    """Every pair gets the router weight of another one."""

    def apply(self, tokens, *, weights, workspace, output) -> None:
        super().apply(tokens, weights=weights, workspace=workspace, output=output)
        output.copy_(output.roll(1, dims=1))


MUTANTS = (GateUpSwapped, LastTokenDropped, ExpertDropped, SlotsSwapped)


@pytest.mark.share(4)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_the_bound_kills_a_broken_kernel(name, dtype, mutant, baseline_of) -> None:
    base = baseline_of(name, dtype)
    own = demo.greedy_tokens(base)
    row = demo.compare(base, register(NO_EP, mutant, name="mutant"), name, own)
    assert row.difference > 2 * row.bound
    assert row.equal_tokens < row.decoded_tokens
    assert not row.ok


def test_from_config_and_from_pretrained_take_the_name(tmp_path) -> None:
    name = register(NO_EP, "TorchExperts", name="loaded")
    model = small_model("mixtral", "float32", DEVICE)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", experts_implementation=name
    ).to(DEVICE)
    fresh = transformers.AutoModelForCausalLM.from_config(model.config, experts_implementation=name)
    assert fresh.config._experts_implementation == name
    assert not registration(name).kernels
    ids = torch.arange(8, device=DEVICE)[None]
    difference = (demo.logits(loaded, ids) - demo.logits(model, ids)).abs().max()
    assert difference < 1e-4
    assert registration(name).kernels


def test_each_name_runs_its_own_pairing(baseline_of) -> None:
    base = baseline_of("mixtral")
    contiguous = register(NO_EP, "TorchExperts", name="one")
    batched = register("BatchedPrepareAndFinalize", "NaiveBatchedExperts", name="two")
    for name in (contiguous, batched):
        demo.compare(base, name, "mixtral", None)
    assert {kernel.pairing for kernel in registration("one").kernels.values()} == {
        f"{NO_EP} x TorchExperts"
    }
    found = {kernel.pairing for kernel in registration("two").kernels.values()}
    assert found == {"BatchedPrepareAndFinalize x NaiveBatchedExperts"}


def test_switching_back_to_eager_leaves_no_trace(baseline_of) -> None:
    base = baseline_of("gpt_oss")
    before = demo.logits(base.model, base.ids)
    demo.compare(base, register(NO_EP, "TorchExperts"), "gpt_oss", None)
    assert base.model.config._experts_implementation == "eager"
    assert torch.equal(demo.logits(base.model, base.ids), before)


# --------------------------------------------------------------------------------- the command


def test_demo_fails_where_a_row_fails(monkeypatch, capsys) -> None:
    from click.exceptions import Exit

    monkeypatch.setenv("COLUMNS", "200")
    rates = {"transformers' eager": 2000.0}
    monkeypatch.setattr(demo, "_rates", lambda *_: rates)

    good = demo.DemoRow("m", "float32", "a x b", 1.0, 1.0, 64, 64, 0.0)
    layer = demo.CheckpointRow("m", "awq", "int4_w4a16_group", "a x b", 1e-2, 1e-2, 64, 0.0)
    bad = (
        ([replace(good, difference=1.1)], [layer]),
        ([good, replace(good, equal_tokens=63)], [layer]),
        ([replace(good, difference=float("nan"))], [layer]),
        ([replace(good, pairing="")], [layer]),
        ([good], [layer, replace(layer, pairing="a x c", error=1.1e-2)]),
        ([good], [replace(layer, error=float("nan"))]),
        ([good], []),
        ([], [layer]),
    )
    for rows, packed in bad:
        monkeypatch.setattr(demo, "_model_results", lambda *a, rows=rows, **k: iter(rows))
        monkeypatch.setattr(
            demo, "_checkpoint_results", lambda *a, packed=packed, **k: iter(packed)
        )
        with pytest.raises(Exit) as ended:
            demo.demo()
        assert ended.value.exit_code == 1
        assert ("FAILED" in capsys.readouterr().out) is bool(rows and packed)
    pairings = [" x ".join(pair) for pair in demo.PAIRINGS]
    shown_rows = [replace(good, pairing=pairing) for pairing in pairings]
    packed = [replace(layer, pairing=pairing) for pairing in pairings[:2]]
    monkeypatch.setattr(demo, "_model_results", lambda *a, **k: iter(shown_rows))
    monkeypatch.setattr(demo, "_checkpoint_results", lambda *a, **k: iter(packed))
    capsys.readouterr()
    demo.demo()
    shown = capsys.readouterr().out
    assert "4 of 4 runs agree with transformers' own experts" in shown
    assert "2 of 2 quantized layers agree with float64" in shown
    assert "256 of 256 greedily decoded tokens are equal" in shown
    assert f"transformers' eager {2000:,}" in shown
    assert [line.split()[:2] for line in shown.splitlines()[-3:]] == [
        ["mk", "check"],
        ["mk", "test"],
        ["mk", "compose"],
    ]
    assert len(shown.splitlines()) <= 24


@pytest.mark.share(2)
@pytest.mark.slow
def test_demo_runs_in_one_dtype() -> None:
    """The whole command, in a process of its own."""
    import json

    words = [sys.executable, "-m", "modular_kernel", "demo", "--dtype", "bfloat16", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert {row["model"] for row in told["rows"]} == set(MODELS)
    assert all(row["ok"] for row in told["rows"])
    assert {row["dtype"] for row in told["rows"]} == {"bfloat16"}
    assert {row["model"] for row in told["checkpoints"]} == set(MODELS)
    assert len({row["quant"].partition(":")[0] for row in told["checkpoints"]}) == 3
    assert all(row["ok"] for row in told["checkpoints"])
    assert len(told["tokens_per_second"]) == 2
    assert all(rate > 0 for rate in told["tokens_per_second"].values())
