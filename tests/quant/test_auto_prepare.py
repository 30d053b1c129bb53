"""Weights that kernels prepare themselves on first use."""

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

from experts.triton.contiguous import TritonExperts
from experts.triton.grouped_w4.grouped_w4_path import GroupedW4Path
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
    """Count the calls of GroupedW4Path.prepare, which makes the tensors for its kernel."""
    counts = list[int]()
    prepare = GroupedW4Path.prepare

    def counted(self: GroupedW4Path, *args: Any) -> None:
        counts.append(len(counts))
        prepare(self, *args)

    monkeypatch.setattr(GroupedW4Path, "prepare", counted)
    return counts


def auto_kernel(auto: bool | None = True, tokens: int = 40) -> tuple[FusedMoEModularKernel, Inputs]:
    problem = replace(MXFP4, tokens=tokens)
    return make_kernel(*PAIR, problem, auto_prepare=auto), make_inputs(problem, "uniform", CPU)


def test_weights_are_prepared_once_for_all_kernels_plans_and_equal_weights(
    launched: list[int], prepared_counts: list[int]
) -> None:
    kernel, i = auto_kernel()
    other, _ = auto_kernel(tokens=64)
    plan = kernel.plan()
    expected = call_kernel(make_kernel(*PAIR, kernel.problem, auto_prepare=False), i,
                      kernel.prepare_weights(i.weights))  # fmt: skip
    launched.clear(), prepared_counts.clear()
    for weights in (i.weights, i.weights, replace(i.weights)):
        for run in (kernel, plan, other):
            assert torch.equal(run(i.x_TH, weights, i.routing), expected)
    for run in (kernel, other):
        assert torch.equal(run.start(i.x_TH, i.weights, i.routing).finish(), expected)
    assert prepared_counts == [0]
    assert launched == [32] * 22
    nbytes = sum(spec.nbytes for spec in kernel.experts.prepared_specs().values())
    assert AUTO_PREPARED.held_bytes()[CPU] >= nbytes


def test_a_cpu_and_a_kernel_without_preparation_use_weights_as_loaded(
    launched: list[int], prepared_counts: list[int]
) -> None:
    for auto in (None, False):
        kernel, i = auto_kernel(auto)
        call_kernel(kernel, i)
    assert not prepared_counts


@pytest.mark.parametrize("name", ["w1", "w1_scale", "w2", "w2_scale"])
def test_weights_are_prepared_again_after_a_write_in_the_same_memory(
    name: str, prepared_counts: list[int]
) -> None:
    kernel, i = auto_kernel()
    plan = kernel.plan()
    call_kernel(kernel, i)
    bound = kernel.known_weights.lookup(i.weights, CPU)
    assert bound is not None
    assert bound.prepared is not None
    tiles = bound.prepared.w1_tiles
    tensor: torch.Tensor = getattr(i.weights, name)
    tensor[0] = tensor[1].clone()
    manual = make_kernel(*PAIR, kernel.problem, auto_prepare=False)
    expected = call_kernel(manual, i, kernel.prepare_weights(i.weights))
    prepared_counts.clear()
    for run in (plan, kernel):
        assert torch.equal(run(i.x_TH, i.weights, i.routing), expected)
    assert prepared_counts == [0]
    bound = kernel.known_weights.lookup(i.weights, CPU)
    assert bound is not None
    assert bound.prepared is not None
    assert bound.prepared.w1_tiles is tiles


def test_prepared_tensors_are_freed_with_the_weights() -> None:
    gc.collect()
    before = AUTO_PREPARED.held_bytes().get(CPU, 0)
    kernel, i = auto_kernel()
    call_kernel(kernel, i)
    alias = i.weights.w1[:1]
    held = AUTO_PREPARED.held_bytes()[CPU]
    assert held > before
    gone = weakref.ref(next(reversed(AUTO_PREPARED._entries.values())).tensors["w1_tiles"])
    del i
    gc.collect()
    assert gone() is None  # at once, since w2 and the scales are gone
    assert AUTO_PREPARED.held_bytes().get(CPU, 0) == before
    del alias


def test_weights_stay_as_loaded_if_memory_is_short(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, launched: list[int]
) -> None:
    kernel, i = auto_kernel()
    expected = call_kernel(make_kernel(*PAIR, kernel.problem, auto_prepare=False), i)
    launched.clear()

    def fail(*_: object) -> dict[str, torch.Tensor]:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(prepared, "allocate_prepared", fail)
    with caplog.at_level(logging.WARNING, "modular_kernel.weights"):
        assert torch.equal(call_kernel(kernel, i), expected)
        assert torch.equal(call_kernel(kernel, i), expected)
    assert [record.getMessage().startswith("4-bit weights stay as loaded")
            for record in caplog.records] == [True]  # fmt: skip


def test_a_gpu_keeps_a_fifth_of_its_memory_free(monkeypatch: pytest.MonkeyPatch) -> None:
    gib, experts = 1 << 30, TritonExperts(MXFP4)
    specs, weights = experts.prepared_specs(), make_inputs(MXFP4, "uniform", CPU).weights
    nbytes = sum(spec.nbytes for spec in specs.values())
    assert auto_prepare.has_free_memory(nbytes, nbytes + gib, 5 * gib)
    assert not auto_prepare.has_free_memory(nbytes, nbytes + gib - 1, 5 * gib)
    assert weights.w1_tiles is None


def test_threads_prepare_once(prepared_counts: list[int]) -> None:
    kernel, i = auto_kernel()
    barrier, outputs = threading.Barrier(4), list[torch.Tensor]()

    def run() -> None:
        barrier.wait()
        outputs.append(call_kernel(kernel, i))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert prepared_counts == [0]
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_a_pickled_kernel_keeps_the_option() -> None:
    kernel, _ = auto_kernel()
    assert pickle.loads(pickle.dumps(kernel)).auto_prepare is True


def test_loading_a_state_prepares_weights_at_once(
    monkeypatch: pytest.MonkeyPatch, prepared_counts: list[int]
) -> None:
    layer, i = make_prepared_layer()
    monkeypatch.setattr(auto_prepare.WeightPreparer, "is_enabled_on", lambda *_: True)
    layer(i.x_TH, i.routing)
    assert prepared_counts == [0]
    state = {name: tensor.roll(1, 0) for name, tensor in layer.state_dict().items()}
    layer.load_state_dict(state)
    assert prepared_counts == [0, 1]
    got = layer(i.x_TH, i.routing)
    assert prepared_counts == [0, 1]
    other, _ = make_prepared_layer()
    other.load_state_dict(state)
    other.prepare_weights()
    assert torch.equal(got, other(i.x_TH, i.routing))


def test_weights_first_used_in_a_capture_are_prepared_by_the_next_call(
    monkeypatch: pytest.MonkeyPatch, prepared_counts: list[int]
) -> None:
    kernel, i = auto_kernel()
    with pytest.MonkeyPatch.context() as capture:
        for module in (auto_prepare, recording):
            capture.setattr(module, "can_keep_buffers", lambda _: False)
        call_kernel(kernel, i)
        call_kernel(kernel, i)
    assert not prepared_counts
    call_kernel(kernel, i)
    call_kernel(kernel, i)
    assert prepared_counts == [0]


def on_buffer(weights: ExpertWeights, buffer: bytearray) -> ExpertWeights:
    """Return the weights as views of a new storage on `buffer`, whose bytes are kept."""
    flat, start, views = torch.frombuffer(buffer, dtype=torch.uint8), 0, {}
    for name in ("w1", "w1_scale", "w2", "w2_scale"):
        tensor = getattr(weights, name)
        views[name] = flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        start += -(-tensor.nbytes // 64) * 64
    return replace(weights, **views)


def test_another_storage_at_the_same_address_is_distinguished(
    prepared_counts: list[int],
) -> None:
    """An address can be reused while a storage is alive if it was resized to 0."""
    kernel, i = auto_kernel()
    buffer = bytearray(4 * sum(t.nbytes for t in vars(i.weights).values() if t is not None) + 1024)
    first = on_buffer(i.weights, buffer)
    second = on_buffer(i.weights, buffer)
    for weights, shift in ((first, 0), (second, 1)):
        for name in ("w1", "w1_scale", "w2", "w2_scale"):
            getattr(weights, name).data.copy_(getattr(i.weights, name).roll(shift, 0))
        call_kernel(kernel, i, weights)
    assert prepared_counts == [0, 1]
    manual = make_kernel(*PAIR, kernel.problem, auto_prepare=False)
    expected = call_kernel(manual, i, kernel.prepare_weights(second))
    assert torch.equal(call_kernel(kernel, i, second), expected)


def test_a_concurrent_write_during_a_call_is_not_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel, i = auto_kernel()
    plan, check = kernel.plan(), validate.check_routing

    def write_and_check(*arguments: Any) -> None:
        assert i.weights.w1_scale is not None
        i.weights.w1_scale.mul_(1)
        check(*arguments)

    monkeypatch.setattr(validate, "check_routing", write_and_check)
    assert plan(i.x_TH, i.weights, i.routing).isfinite().all()


def test_memory_that_runs_out_while_preparing_leaves_the_weights_as_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel, i = auto_kernel()
    expected = call_kernel(make_kernel(*PAIR, kernel.problem, auto_prepare=False), i)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(GroupedW4Path, "prepare", fail)
    assert torch.equal(call_kernel(kernel, i), expected)


def test_no_tensors_accumulate_if_a_source_is_replaced() -> None:
    kernel, i = auto_kernel()
    registry: dict[Any, Any] = weakref.finalize._registry  # type: ignore[attr-defined]
    counts = []
    for _ in range(4):
        call_kernel(kernel, i, replace(i.weights, w1=i.weights.w1.clone()))
        gc.collect()
        counts.append((len(registry), len(AUTO_PREPARED._entries)))
    assert counts[1:] == counts[:-1]
