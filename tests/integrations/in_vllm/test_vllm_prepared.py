"""Copies of 4-bit weights that the plugin prepares when vLLM has loaded a layer."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from prepared_weights_samples import NO_GPU, make_launched_fixture
from vllm_layers import (
    call,
    fill,
    prepared_tensors,
    reload,
    stand_in_operators,
    tensors,
    version_module,
    vllm_layer,
    vllm_process,
)

from modular_kernel.errors import ShapeError
from modular_kernel.integrations.vllm import calls, prepared_copy, register
from modular_kernel.quant import prepared
from modular_kernel.reference import float64_reference, rounded_reference
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.verify.compare import compare

pytestmark = NO_GPU
launched = make_launched_fixture()
BASE = Problem(tokens=64, hidden=64, intermediate=32, experts=4, top_k=2, quant="mxfp4_w4a16")
INT4 = "int4_w4a16_group:group=32"
# (problem, format of the checkpoint)
CASES = [
    (BASE, ""),
    (replace(BASE, activation="swiglu_oai", bias=True), ""),
    (replace(BASE, quant="nvfp4_w4a16"), ""),
    (replace(BASE, quant="nvfp4_w4a16"), "modelopt"),
]
if "int_wna16" in version_module().ORACLES:
    CASES += [
        (replace(BASE, quant=INT4), ""),
        (replace(BASE, quant=f"{INT4},zero_points=true"), ""),
        (replace(BASE, quant=INT4, intermediate=64), "gptq"),
        (replace(BASE, quant=INT4), "moe_wna16"),
        (replace(BASE, quant=f"{INT4},zero_points=true"), "awq"),
    ]
each_case = pytest.mark.parametrize(("problem", "form"), CASES, ids=str)


@pytest.fixture(scope="module", autouse=True)
def engine() -> Iterator[None]:
    with vllm_process():
        register()
        yield


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    stand_in_operators(monkeypatch)
    monkeypatch.setenv("MK_VLLM", "TritonExperts")
    monkeypatch.setattr(prepared_copy, "_DEVICES_WARNED_OF", set())
    calls._make_kernel.cache_clear()  # kernels depend on the simulated GPU
    yield
    calls._make_kernel.cache_clear()


def loaded_layer(problem: Problem, form: str, weights: ExpertWeights) -> Any:
    layer = vllm_layer(problem, form)
    fill(layer, problem, weights, form)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def addresses_of(layer: Any) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in prepared_tensors(layer).items()}


def check(layer: Any, x_TH: torch.Tensor, weights: ExpertWeights, routing: Routing) -> None:
    problem = layer.quant_method.moe_kernel.fused_experts._calls.problem
    problem = replace(problem, tokens=len(x_TH))
    got = call(layer, x_TH, routing)
    inputs = x_TH, weights, routing, problem
    comparison = compare(got, float64_reference(*inputs), rounded_reference(*inputs), problem)
    assert comparison.ok, comparison.problems


@each_case
def test_a_layer_reads_a_copy_that_is_made_when_it_is_loaded(
    problem: Problem, form: str, launched: list[int]
) -> None:
    x_TH, weights, _, routing = tensors(problem)
    layer = loaded_layer(problem, form, weights)
    assert prepared_tensors(layer).keys() == prepared.SOURCE_FIELDS.keys()
    addresses = addresses_of(layer)
    assert not launched
    check(layer, x_TH, weights, routing)
    assert len(launched) == 2
    first = Routing(routing.topk_weights_TK[:1], routing.topk_ids_TK[:1])
    check(layer, x_TH[:1], weights, first)
    assert len(launched) == 2  # a call with few rows reads the weights as loaded
    assert addresses_of(layer) == addresses


@each_case
def test_a_reload_writes_the_copy_in_place(
    problem: Problem, form: str, launched: list[int]
) -> None:
    x_TH, weights, _, routing = tensors(problem)
    layer = loaded_layer(problem, form, weights)
    check(layer, x_TH, weights, routing)
    copy = prepared_tensors(layer)
    addresses = addresses_of(layer)
    _, others, _, _ = tensors(problem, seed=4)
    new = loaded_layer(problem, form, others)
    want = {name: tensor.clone() for name, tensor in prepared_tensors(new).items()}
    assert not all(torch.equal(want[name], copy[name]) for name in want)

    reload(layer, problem, others, form)
    # Before any call, because replays of CUDA graphs read the copy.
    assert {
        name: tensor.data_ptr() for name, tensor in prepared_tensors(layer).items()
    } == addresses
    for name, tensor in copy.items():
        assert torch.equal(tensor, want[name]), name
    launched.clear()
    check(layer, x_TH, others, routing)
    assert len(launched) == 2


def test_a_write_that_torch_tracks_reaches_the_copy_in_the_next_call(launched: list[int]) -> None:
    """vLLM updates weights in its kernels' format in this way."""
    x_TH, weights, _, routing = tensors(BASE)
    layer = loaded_layer(BASE, "", weights)
    check(layer, x_TH, weights, routing)
    addresses = addresses_of(layer)
    _, others, _, _ = tensors(BASE, seed=4)
    with torch.no_grad():
        layer.w13_weight.copy_(others.w1)
        layer.w13_weight_scale.copy_(others.w1_scale)
    launched.clear()
    written = replace(weights, w1=others.w1, w1_scale=others.w1_scale)
    check(layer, x_TH, written, routing)
    assert len(launched) == 2
    assert {
        name: tensor.data_ptr() for name, tensor in prepared_tensors(layer).items()
    } == addresses


def test_a_variable_turns_preparation_off(
    monkeypatch: pytest.MonkeyPatch, launched: list[int]
) -> None:
    monkeypatch.setenv("MK_VLLM_PREPARE", "0")
    x_TH, weights, _, routing = tensors(BASE)
    layer = loaded_layer(BASE, "", weights)
    assert not prepared_tensors(layer)
    check(layer, x_TH, weights, routing)
    assert not launched


def test_weights_stay_as_loaded_if_memory_is_short(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, launched: list[int]
) -> None:
    def fail(*_: object) -> dict[str, torch.Tensor]:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(prepared, "allocate_prepared", fail)
    x_TH, weights, _, routing = tensors(BASE)
    with caplog.at_level(logging.WARNING, "modular_kernel.weights"):
        layers = [loaded_layer(BASE, "", weights) for _ in range(2)]
    texts = [record.getMessage() for record in caplog.records if record.name.endswith("weights")]
    assert [text.startswith("4-bit weights stay as loaded") for text in texts] == [True]
    for layer in layers:
        assert not prepared_tensors(layer)
        check(layer, x_TH, weights, routing)
    assert not launched


def test_no_copy_is_made_in_a_reload_if_the_first_load_made_none(
    monkeypatch: pytest.MonkeyPatch, launched: list[int]
) -> None:
    """Memory that is free during a reload may belong to the KV cache of a sleeping engine."""

    def fail(*_: object) -> dict[str, torch.Tensor]:
        raise torch.OutOfMemoryError("no memory")

    x_TH, weights, _, routing = tensors(BASE)
    with monkeypatch.context() as patch:
        patch.setattr(prepared, "allocate_prepared", fail)
        layer = loaded_layer(BASE, "", weights)
    reload(layer, BASE, weights)
    assert not prepared_tensors(layer)
    check(layer, x_TH, weights, routing)
    assert not launched


@pytest.mark.parametrize("reloads", [0, 1])
def test_a_write_between_a_load_and_the_first_call_reaches_the_copy(
    reloads: int, launched: list[int]
) -> None:
    x_TH, weights, _, routing = tensors(BASE)
    layer = loaded_layer(BASE, "", weights)
    for _ in range(reloads):
        check(layer, x_TH, weights, routing)
        reload(layer, BASE, weights)
    _, others, _, _ = tensors(BASE, seed=4)
    with torch.no_grad():
        layer.w13_weight.copy_(others.w1)
    check(layer, x_TH, replace(weights, w1=others.w1), routing)
    assert launched


def test_a_reload_without_preparation_does_not_leave_an_old_copy(
    monkeypatch: pytest.MonkeyPatch, launched: list[int]
) -> None:
    x_TH, weights, _, routing = tensors(BASE)
    layer = loaded_layer(BASE, "", weights)
    check(layer, x_TH, weights, routing)
    _, others, _, _ = tensors(BASE, seed=4)
    monkeypatch.setenv("MK_VLLM_PREPARE", "0")
    reload(layer, BASE, others)
    check(layer, x_TH, others, routing)


def test_a_failed_preparation_in_a_reload_raises(
    monkeypatch: pytest.MonkeyPatch, launched: list[int]
) -> None:
    """CUDA graphs would otherwise read the copy of the old weights."""

    def fail(*_: object) -> None:
        raise ShapeError("w1", got=1, need=2)

    x_TH, weights, _, routing = tensors(BASE)
    layer = loaded_layer(BASE, "", weights)
    check(layer, x_TH, weights, routing)
    monkeypatch.setattr(calls.validate, "check_weights", fail)
    with pytest.raises(ShapeError):
        reload(layer, BASE, weights)
