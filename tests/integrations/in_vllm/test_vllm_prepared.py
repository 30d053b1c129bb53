"""Prepared copies of 4-bit weights, which the plugin makes after vLLM has loaded a layer."""

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
# Problems and formats of the checkpoint.
CASES = [
    (BASE, ""),
    (replace(BASE, activation="swiglu_oai", bias=True), ""),
    (replace(BASE, quant="nvfp4_w4a16"), ""),
    (replace(BASE, quant="nvfp4_w4a16"), "modelopt"),
]
CASES += [
    (replace(BASE, quant=INT4), ""),
    (replace(BASE, quant=f"{INT4},zero_points=true"), ""),
    (replace(BASE, quant=INT4, intermediate=64), "gptq"),
    (replace(BASE, quant=f"{INT4},zero_points=true"), "awq"),
]
if not version_module().__name__.endswith("v0_26"):  # whose method does not call an oracle
    CASES += [(replace(BASE, quant=INT4), "moe_wna16")]
parametrize_cases = pytest.mark.parametrize(("problem", "checkpoint_format"), CASES, ids=str)


@pytest.fixture(scope="module", autouse=True)
def engine() -> Iterator[None]:
    with vllm_process():
        register()
        yield


@pytest.fixture(autouse=True)
def _simulate_gpu_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    stand_in_operators(monkeypatch)
    monkeypatch.setenv("MK_VLLM", "TritonExperts")
    monkeypatch.setattr(prepared_copy, "_DEVICES_WARNED_OF", set())
    calls._make_kernel.cache_clear()  # Cached kernels depend on the simulated GPU.
    yield
    calls._make_kernel.cache_clear()


def make_loaded_layer(problem: Problem, checkpoint_format: str, weights: ExpertWeights) -> Any:
    layer = vllm_layer(problem, checkpoint_format)
    fill(layer, problem, weights, checkpoint_format)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def get_addresses(layer: Any) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in prepared_tensors(layer).items()}


def check(layer: Any, x_TH: torch.Tensor, weights: ExpertWeights, routing: Routing) -> None:
    problem = layer.quant_method.moe_kernel.fused_experts._calls.problem
    problem = replace(problem, tokens=len(x_TH))
    got = call(layer, x_TH, routing)
    inputs = x_TH, weights, routing, problem
    comparison = compare(got, float64_reference(*inputs), rounded_reference(*inputs), problem)
    assert comparison.ok, comparison.problems


@parametrize_cases
def test_layers_use_the_copy_made_during_loading(
    problem: Problem, checkpoint_format: str, launched: list[int]
) -> None:
    x_TH, weights, _, routing = tensors(problem)
    layer = make_loaded_layer(problem, checkpoint_format, weights)
    assert prepared_tensors(layer).keys() == prepared.SOURCE_FIELDS.keys()
    addresses = get_addresses(layer)
    assert not launched
    check(layer, x_TH, weights, routing)
    assert len(launched) == 2
    first = Routing(routing.topk_weights_TK[:1], routing.topk_ids_TK[:1])
    check(layer, x_TH[:1], weights, first)
    assert len(launched) == 2  # A call with few rows reads the loaded weights, not the copy.
    assert get_addresses(layer) == addresses


@parametrize_cases
def test_reloads_write_the_copy_in_place(
    problem: Problem, checkpoint_format: str, launched: list[int]
) -> None:
    x_TH, weights, _, routing = tensors(problem)
    layer = make_loaded_layer(problem, checkpoint_format, weights)
    check(layer, x_TH, weights, routing)
    prepared_before = prepared_tensors(layer)
    addresses = get_addresses(layer)
    _, new_weights, _, _ = tensors(problem, seed=4)
    layer_with_new_weights = make_loaded_layer(problem, checkpoint_format, new_weights)
    expected = {
        name: tensor.clone() for name, tensor in prepared_tensors(layer_with_new_weights).items()
    }
    assert not all(torch.equal(expected[name], prepared_before[name]) for name in expected)

    reload(layer, problem, new_weights, checkpoint_format)
    # The copy must be current before any call, because replays of CUDA graphs read it.
    assert {
        name: tensor.data_ptr() for name, tensor in prepared_tensors(layer).items()
    } == addresses
    for name, tensor in prepared_before.items():
        assert torch.equal(tensor, expected[name]), name
    launched.clear()
    check(layer, x_TH, new_weights, routing)
    assert len(launched) == 2


def test_tracked_writes_update_the_copy_in_the_next_call(launched: list[int]) -> None:
    """vLLM writes new weights in place if they are in the format of its kernels."""
    x_TH, weights, _, routing = tensors(BASE)
    layer = make_loaded_layer(BASE, "", weights)
    check(layer, x_TH, weights, routing)
    addresses = get_addresses(layer)
    _, new_weights, _, _ = tensors(BASE, seed=4)
    with torch.no_grad():
        layer.w13_weight.copy_(new_weights.w1)
        layer.w13_weight_scale.copy_(new_weights.w1_scale)
    launched.clear()
    changed_weights = replace(weights, w1=new_weights.w1, w1_scale=new_weights.w1_scale)
    check(layer, x_TH, changed_weights, routing)
    assert len(launched) == 2
    assert {
        name: tensor.data_ptr() for name, tensor in prepared_tensors(layer).items()
    } == addresses


def test_environment_variable_disables_preparation(
    monkeypatch: pytest.MonkeyPatch, launched: list[int]
) -> None:
    monkeypatch.setenv("MK_VLLM_PREPARE", "0")
    x_TH, weights, _, routing = tensors(BASE)
    layer = make_loaded_layer(BASE, "", weights)
    assert not prepared_tensors(layer)
    check(layer, x_TH, weights, routing)
    assert not launched


def test_weights_are_not_prepared_if_memory_is_insufficient(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, launched: list[int]
) -> None:
    def raise_error(*_: object) -> dict[str, torch.Tensor]:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(prepared, "allocate_prepared", raise_error)
    x_TH, weights, _, routing = tensors(BASE)
    with caplog.at_level(logging.WARNING, "modular_kernel.weights"):
        layers = [make_loaded_layer(BASE, "", weights) for _ in range(2)]
    messages = [record.getMessage() for record in caplog.records if record.name.endswith("weights")]
    assert [m.startswith("4-bit weights stay as loaded") for m in messages] == [True]
    for layer in layers:
        assert not prepared_tensors(layer)
        check(layer, x_TH, weights, routing)
    assert not launched


def test_reloads_make_no_copy_if_the_first_load_made_none(
    monkeypatch: pytest.MonkeyPatch, launched: list[int]
) -> None:
    """Memory that is free during a reload may belong to the KV cache of a sleeping engine."""

    def raise_error(*_: object) -> dict[str, torch.Tensor]:
        raise torch.OutOfMemoryError("no memory")

    x_TH, weights, _, routing = tensors(BASE)
    with monkeypatch.context() as patch:
        patch.setattr(prepared, "allocate_prepared", raise_error)
        layer = make_loaded_layer(BASE, "", weights)
    reload(layer, BASE, weights)
    assert not prepared_tensors(layer)
    check(layer, x_TH, weights, routing)
    assert not launched


@pytest.mark.parametrize("reloads", [0, 1])
def test_writes_before_the_first_call_update_the_copy(reloads: int, launched: list[int]) -> None:
    x_TH, weights, _, routing = tensors(BASE)
    layer = make_loaded_layer(BASE, "", weights)
    for _ in range(reloads):
        check(layer, x_TH, weights, routing)
        reload(layer, BASE, weights)
    _, new_weights, _, _ = tensors(BASE, seed=4)
    with torch.no_grad():
        layer.w13_weight.copy_(new_weights.w1)
    check(layer, x_TH, replace(weights, w1=new_weights.w1), routing)
    assert launched


def test_reloads_without_preparation_do_not_use_an_old_copy(
    monkeypatch: pytest.MonkeyPatch, launched: list[int]
) -> None:
    x_TH, weights, _, routing = tensors(BASE)
    layer = make_loaded_layer(BASE, "", weights)
    check(layer, x_TH, weights, routing)
    _, new_weights, _, _ = tensors(BASE, seed=4)
    monkeypatch.setenv("MK_VLLM_PREPARE", "0")
    reload(layer, BASE, new_weights)
    check(layer, x_TH, new_weights, routing)


def test_failed_preparation_during_a_reload_raises(
    monkeypatch: pytest.MonkeyPatch, launched: list[int]
) -> None:
    """Without the error, CUDA graphs would read the copy of the old weights."""

    def raise_error(*_: object) -> None:
        raise ShapeError("w1", got=1, need=2)

    x_TH, weights, _, routing = tensors(BASE)
    layer = make_loaded_layer(BASE, "", weights)
    check(layer, x_TH, weights, routing)
    monkeypatch.setattr(calls.validate, "check_weights", raise_error)
    with pytest.raises(ShapeError):
        reload(layer, BASE, weights)
