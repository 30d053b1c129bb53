"""Weights that kernels prepare (repack) automatically on first use."""

import gc
import logging
import pickle
import threading
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from grouped_gemm_stand_in import MXFP4
from prepared_weights_samples import (
    CPU,
    NO_GPU,
    PAIR,
    call_kernel,
    make_launched_fixture,
    make_prepared_layer,
)

from experts.triton.grouped_w4.grouped_w4_path import GroupedW4Path
from experts.triton.standard import TritonExperts
from modular_kernel import FusedMoEModularKernel, make_kernel, validate
from modular_kernel.quant import auto_prepare, prepared
from modular_kernel.quant.auto_prepare import AUTO_PREPARED
from modular_kernel.replay import recording
from modular_kernel.tensors import ExpertWeights
from modular_kernel.testing.cases.inputs import Inputs, make_inputs

pytestmark = NO_GPU
launched = make_launched_fixture()


@pytest.fixture(name="prepared_counts", autouse=True)
def prepared_counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Append an item for each call of GroupedW4Path.prepare, which makes the tensors for its
    kernel.
    """
    counts = list[int]()
    prepare = GroupedW4Path.prepare

    def count_and_prepare(self: GroupedW4Path, *args: Any) -> None:
        counts.append(len(counts))
        prepare(self, *args)

    monkeypatch.setattr(GroupedW4Path, "prepare", count_and_prepare)
    return counts


def make_auto_kernel(
    auto: bool | None = True, tokens: int = 40
) -> tuple[FusedMoEModularKernel, Inputs]:
    problem = replace(MXFP4, tokens=tokens)
    return make_kernel(*PAIR, problem, auto_prepare=auto), make_inputs(problem, "uniform", CPU)


def test_weights_are_prepared_once_for_all_kernels_and_plans(
    launched: list[int], prepared_counts: list[int]
) -> None:
    kernel, inputs = make_auto_kernel()
    other_kernel, _ = make_auto_kernel(tokens=64)
    plan = kernel.plan()
    expected = call_kernel(make_kernel(*PAIR, kernel.problem, auto_prepare=False), inputs,
                      kernel.prepare_weights(inputs.weights))  # fmt: skip
    launched.clear(), prepared_counts.clear()
    for weights in (inputs.weights, inputs.weights, replace(inputs.weights)):
        for run in (kernel, plan, other_kernel):
            assert torch.equal(run(inputs.x_TH, weights, inputs.routing), expected)
    for run in (kernel, other_kernel):
        assert torch.equal(
            run.start(inputs.x_TH, inputs.weights, inputs.routing).finish(), expected
        )
    assert prepared_counts == [0]
    assert launched == [32] * 22
    nbytes = sum(spec.nbytes for spec in kernel.experts.prepared_specs().values())
    assert AUTO_PREPARED.held_bytes()[CPU] >= nbytes


def test_weights_are_used_as_loaded_on_a_cpu_and_without_auto_prepare(
    launched: list[int], prepared_counts: list[int]
) -> None:
    for auto in (None, False):
        kernel, inputs = make_auto_kernel(auto)
        call_kernel(kernel, inputs)
    assert not prepared_counts


@pytest.mark.parametrize("name", ["w1", "w1_scale", "w2", "w2_scale"])
def test_weights_are_prepared_again_after_an_in_place_write(
    name: str, prepared_counts: list[int]
) -> None:
    kernel, inputs = make_auto_kernel()
    plan = kernel.plan()
    call_kernel(kernel, inputs)
    bound = kernel.known_weights.lookup(inputs.weights, CPU)
    assert bound is not None
    assert bound.prepared is not None
    tiles = bound.prepared.w1_tiles
    tensor: torch.Tensor = getattr(inputs.weights, name)
    tensor[0] = tensor[1].clone()
    kernel_without_preparing = make_kernel(*PAIR, kernel.problem, auto_prepare=False)
    expected = call_kernel(kernel_without_preparing, inputs, kernel.prepare_weights(inputs.weights))
    prepared_counts.clear()
    for run in (plan, kernel):
        assert torch.equal(run(inputs.x_TH, inputs.weights, inputs.routing), expected)
    assert prepared_counts == [0]
    bound = kernel.known_weights.lookup(inputs.weights, CPU)
    assert bound is not None
    assert bound.prepared is not None
    assert bound.prepared.w1_tiles is tiles


def test_prepared_tensors_are_freed_with_the_weights() -> None:
    gc.collect()
    held_bytes_before = AUTO_PREPARED.held_bytes().get(CPU, 0)
    kernel, inputs = make_auto_kernel()
    call_kernel(kernel, inputs)
    alias = inputs.weights.w1[:1]
    held_bytes = AUTO_PREPARED.held_bytes()[CPU]
    assert held_bytes > held_bytes_before
    tiles_ref = weakref.ref(next(reversed(AUTO_PREPARED._entries.values())).tensors["w1_tiles"])
    del inputs
    gc.collect()
    assert tiles_ref() is None  # freed although a view of w1 is alive
    assert AUTO_PREPARED.held_bytes().get(CPU, 0) == held_bytes_before
    del alias


def test_weights_stay_as_loaded_if_memory_is_short(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, launched: list[int]
) -> None:
    kernel, inputs = make_auto_kernel()
    expected = call_kernel(make_kernel(*PAIR, kernel.problem, auto_prepare=False), inputs)
    launched.clear()

    def fail(*_: object) -> dict[str, torch.Tensor]:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(prepared, "allocate_prepared", fail)
    with caplog.at_level(logging.WARNING, "modular_kernel.weights"):
        assert torch.equal(call_kernel(kernel, inputs), expected)
        assert torch.equal(call_kernel(kernel, inputs), expected)
    assert [record.getMessage().startswith("4-bit weights stay as loaded")
            for record in caplog.records] == [True]  # fmt: skip


def test_preparing_keeps_a_fifth_of_gpu_memory_free(monkeypatch: pytest.MonkeyPatch) -> None:
    gib, experts = 1 << 30, TritonExperts(MXFP4)
    specs, weights = experts.prepared_specs(), make_inputs(MXFP4, "uniform", CPU).weights
    nbytes = sum(spec.nbytes for spec in specs.values())
    assert auto_prepare.has_free_memory(nbytes, nbytes + gib, 5 * gib)
    assert not auto_prepare.has_free_memory(nbytes, nbytes + gib - 1, 5 * gib)
    assert weights.w1_tiles is None


def test_concurrent_threads_prepare_once(prepared_counts: list[int]) -> None:
    kernel, inputs = make_auto_kernel()
    barrier, outputs = threading.Barrier(4), list[torch.Tensor]()

    def run() -> None:
        barrier.wait()
        outputs.append(call_kernel(kernel, inputs))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert prepared_counts == [0]
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_pickled_kernels_keep_auto_prepare() -> None:
    kernel, _ = make_auto_kernel()
    assert pickle.loads(pickle.dumps(kernel)).auto_prepare is True


def test_load_state_dict_prepares_weights(
    monkeypatch: pytest.MonkeyPatch, prepared_counts: list[int]
) -> None:
    layer, inputs = make_prepared_layer()
    monkeypatch.setattr(auto_prepare.WeightPreparer, "is_enabled_on", lambda *_: True)
    layer(inputs.x_TH, inputs.routing)
    assert prepared_counts == [0]
    state = {name: tensor.roll(1, 0) for name, tensor in layer.state_dict().items()}
    layer.load_state_dict(state)
    assert prepared_counts == [0, 1]
    output = layer(inputs.x_TH, inputs.routing)
    assert prepared_counts == [0, 1]
    other_layer, _ = make_prepared_layer()
    other_layer.load_state_dict(state)
    other_layer.prepare_weights()
    assert torch.equal(output, other_layer(inputs.x_TH, inputs.routing))


def test_weights_first_used_in_a_capture_are_prepared_by_the_next_call(
    monkeypatch: pytest.MonkeyPatch, prepared_counts: list[int]
) -> None:
    kernel, inputs = make_auto_kernel()
    with pytest.MonkeyPatch.context() as capture:
        for module in (auto_prepare, recording):
            capture.setattr(module, "can_keep_buffers", lambda _: False)
        call_kernel(kernel, inputs)
        call_kernel(kernel, inputs)
    assert not prepared_counts
    call_kernel(kernel, inputs)
    call_kernel(kernel, inputs)
    assert prepared_counts == [0]


def make_views_of_buffer(weights: ExpertWeights, buffer: bytearray) -> ExpertWeights:
    """Return the weights as views of a new storage on `buffer`, without writing to it."""
    flat, start, views = torch.frombuffer(buffer, dtype=torch.uint8), 0, {}
    for name in ("w1", "w1_scale", "w2", "w2_scale"):
        tensor = getattr(weights, name)
        views[name] = flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        start += -(-tensor.nbytes // 64) * 64
    return replace(weights, **views)


def test_a_different_storage_at_the_same_address_is_detected(
    prepared_counts: list[int],
) -> None:
    """If a storage is resized to 0, its address can be reused while it is alive."""
    kernel, inputs = make_auto_kernel()
    buffer = bytearray(
        4 * sum(t.nbytes for t in vars(inputs.weights).values() if t is not None) + 1024
    )
    first = make_views_of_buffer(inputs.weights, buffer)
    second = make_views_of_buffer(inputs.weights, buffer)
    for weights, shift in ((first, 0), (second, 1)):
        for name in ("w1", "w1_scale", "w2", "w2_scale"):
            getattr(weights, name).data.copy_(getattr(inputs.weights, name).roll(shift, 0))
        call_kernel(kernel, inputs, weights)
    assert prepared_counts == [0, 1]
    kernel_without_preparing = make_kernel(*PAIR, kernel.problem, auto_prepare=False)
    expected = call_kernel(kernel_without_preparing, inputs, kernel.prepare_weights(second))
    assert torch.equal(call_kernel(kernel, inputs, second), expected)


def test_a_concurrent_write_during_a_call_is_not_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel, inputs = make_auto_kernel()
    plan, check = kernel.plan(), validate.check_routing

    def write_and_check(*arguments: Any) -> None:
        assert inputs.weights.w1_scale is not None
        inputs.weights.w1_scale.mul_(1)
        check(*arguments)

    monkeypatch.setattr(validate, "check_routing", write_and_check)
    assert plan(inputs.x_TH, inputs.weights, inputs.routing).isfinite().all()


def test_weights_stay_as_loaded_if_preparing_runs_out_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel, inputs = make_auto_kernel()
    expected = call_kernel(make_kernel(*PAIR, kernel.problem, auto_prepare=False), inputs)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(GroupedW4Path, "prepare", fail)
    assert torch.equal(call_kernel(kernel, inputs), expected)


def test_prepared_tensors_do_not_accumulate_if_weights_are_replaced() -> None:
    kernel, inputs = make_auto_kernel()
    registry: dict[Any, Any] = weakref.finalize._registry  # type: ignore[attr-defined]
    counts = []
    for _ in range(4):
        call_kernel(kernel, inputs, replace(inputs.weights, w1=inputs.weights.w1.clone()))
        gc.collect()
        counts.append((len(registry), len(AUTO_PREPARED._entries)))
    assert counts[1:] == counts[:-1]
