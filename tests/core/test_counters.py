"""Counters of kernels and layers, and their export in Prometheus' text format."""

import copy
import logging
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from devices import DEVICE

import modular_kernel as mk
from modular_kernel.errors import ConfigurationError
from modular_kernel.replay.recording import RecordedCall
from modular_kernel.testing.random_inputs import random_inputs
from modular_kernel.utils import call_counters
from modular_kernel.utils.prometheus import prometheus_text

PROBLEM = mk.Problem(8, 32, 16, 4, 2, dtype=torch.float32)
PAIR = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")


def make_inputs(tokens: int) -> Any:
    return random_inputs(PROBLEM.with_tokens(tokens), DEVICE)


def test_kernels_count_calls_tokens_and_fallbacks() -> None:
    kernel = mk.make_kernel(*PAIR, PROBLEM)
    assert kernel.counters() == {
        "calls": 0,
        "tokens": 0,
        "replayed_calls": 0,
        "recorded_calls": 0,
        "fallback_calls": {},
        "plans": 0,
        "invalid_ids": 0,
        "workspace_bytes": kernel.counters()["workspace_bytes"],
    }
    for tokens in (8, 3):
        kernel(*make_inputs(tokens))
    kernel.start(*make_inputs(5)).finish()
    plan = kernel.plan()
    plan(*make_inputs(4))
    counters = kernel.counters()
    assert (counters["calls"], counters["tokens"], counters["plans"]) == (4, 20, 2)
    assert counters["fallback_calls"] == {
        call_counters.NOT_REPLAYABLE: 3,
        call_counters.OWN_WORKSPACE: 1,
    }
    assert copy.copy(kernel).counters()["calls"] == 0


def test_a_replayed_call_is_counted_with_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording without launches stands in for a recording on a GPU."""
    kernel = mk.make_kernel(*PAIR, PROBLEM)
    plan = kernel.plan()
    args = make_inputs(5)
    plan(*args)
    replays: list[int] = []
    recorded_call = RecordedCall(
        (lambda stream, pointers: replays.append(stream),), (), (), plan._replay_counts.counter(5)
    )
    plan._recorded.replayable = True
    monkeypatch.setattr(plan._recorded, "find", lambda signature: recorded_call)
    for _ in range(3):
        plan(*args)
    counters = kernel.counters()
    assert len(replays) == counters["replayed_calls"] == 3
    assert (counters["calls"], counters["tokens"]) == (4, 20)


def test_a_failed_recording_is_counted_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = mk.make_kernel(*PAIR, PROBLEM)
    monkeypatch.setattr(type(kernel), "replayable", True)  # although it calls torch functions
    plan = kernel.plan()
    for _ in range(3):
        plan(*make_inputs(6))
    counters = kernel.counters()
    assert counters["recorded_calls"] == 1
    ((reason, count),) = counters["fallback_calls"].items()  # type: ignore[attr-defined]
    assert "is not a launch of modular_kernel" in reason
    assert count == 2


def test_invalid_ids_are_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    kernel = mk.make_kernel(*PAIR, PROBLEM)
    kernel.label = "layer 7"
    x_TH, weights, routing = make_inputs(4)
    ids_TK = routing.topk_ids_TK.clone()
    ids_TK[0, 0] = 99
    kernel(x_TH, weights, replace(routing, topk_ids_TK=ids_TK))
    assert kernel.counters()["invalid_ids"] == 1
    with caplog.at_level(logging.WARNING, logger="modular_kernel.routing"):
        assert [kernel.invalid_ids for _ in range(2)] == [1, 1]
    (record,) = caplog.records
    assert record.getMessage().startswith("layer 7: MoEPrepareAndFinalizeNoEP x TorchExperts ")


def make_layer(layer_id: int) -> mk.FusedMoE:
    layer = mk.FusedMoE(4, 32, 16, layer_id=layer_id, top_k=2, params_dtype=torch.float32)
    layer.set_weights(make_inputs(1)[1])
    return layer.to(DEVICE)


def test_layers_count_their_own_calls_and_share_kernels() -> None:
    first, second = make_layer(0), make_layer(1)
    x_TH, _, routing = make_inputs(5)
    for layer in (first, second, second):
        layer(x_TH, routing)
    assert first.counters() == {"calls": 1, "tokens": 5}
    assert second.counters() == {"calls": 2, "tokens": 10}
    assert first.kernels() == second.kernels() != []
    assert copy.deepcopy(second).counters() == {"calls": 0, "tokens": 0}


SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)+)\})? (\d+)')
LABEL = re.compile(r'([a-z]+)="((?:[^"\\]|\\.)*)"')


def parse_metrics(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], int]]:
    """Return the value of each metric and labels, as {metric: {labels: value}}.

    Asserts that each metric has HELP, TYPE and its samples, once and in this order.
    """
    metrics: dict[str, dict[tuple[tuple[str, str], ...], int]] = {}
    lines = text.splitlines()
    assert text == "".join(f"{line}\n" for line in lines)
    current = ""
    for line in lines:
        if line.startswith("# HELP "):
            current = line.split(" ")[2]
            assert current not in metrics
            metrics[current] = {}
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name == current
            assert kind == ("counter" if name.endswith("_total") else "gauge")
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            name, labels, value = match.groups()
            key = tuple(LABEL.findall(labels or ""))
            assert name == current
            assert key not in metrics[name]
            metrics[name][key] = int(value)
    return metrics


def test_prometheus_text_refuses_values_without_counters() -> None:
    for counted, message in (
        ({"calls": 1}, "counted: got int under 'calls', need a kernel or a layer by name"),
        ([], "counted: got"),
        ({1: None}, "name of a kernel or layer: got 1"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            prometheus_text(counted)  # type: ignore[arg-type]
        assert message in str(caught.value)


def test_prometheus_text_is_in_the_exposition_format() -> None:
    first, second = make_layer(0), make_layer(1)
    kernel = mk.make_kernel(*PAIR, PROBLEM)
    x_TH, weights, routing = make_inputs(5)
    first(x_TH, routing)
    second(x_TH, routing)
    kernel(x_TH, weights, routing)
    name = 'a "quoted"\\name\n'
    metrics = parse_metrics(prometheus_text({"0": first, name: second, "draft": kernel}))
    escaped_name = 'a \\"quoted\\"\\\\name\\n'
    layer_calls = metrics["modular_kernel_layer_calls_total"]
    assert layer_calls == {(("layer", "0"),): 1, (("layer", escaped_name),): 1}
    kernel_calls = metrics["modular_kernel_calls_total"]
    # The layers share a kernel, which is exported once.
    assert set(kernel_calls) == {(("kernel", "0"),), (("kernel", "draft"),)}
    reasons = metrics["modular_kernel_fallback_calls_total"]
    assert reasons[("kernel", "draft"), ("reason", call_counters.NOT_REPLAYABLE)] == 1
    assert list(metrics["modular_kernel_workspace_bytes"]) == [()]
    assert prometheus_text({}) == ""
