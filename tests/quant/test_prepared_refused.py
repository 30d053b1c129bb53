"""Prepared weights are refused if they were written to or copied, were prepared by another kernel,
or are not tensors.
"""

import copy
import gc
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from prepared_weights_samples import (
    NO_GPU,
    PAIR,
    call_kernel,
    make_launched_fixture,
    make_prepared_kernel,
)

from experts.triton.standard import TritonExperts
from modular_kernel import make_kernel
from modular_kernel.contracts import PermuteExpertsUnpermute
from modular_kernel.errors import (
    ConfigurationError,
    DeviceError,
    DtypeError,
    ShapeError,
    WeightsError,
)
from modular_kernel.quant.prepared import SOURCE_FIELDS, make_layout_key
from modular_kernel.tensors import ExpertWeights
from modular_kernel.workspace import BufferSpec

pytestmark = NO_GPU
launched = make_launched_fixture()


@pytest.mark.parametrize("written_field", ["w1", "w1_scale", "w2", "w2_scale"])
def test_a_call_after_weights_were_written_is_refused(written_field: str) -> None:
    kernel, inputs = make_prepared_kernel()
    plan, weights = kernel.plan(), kernel.prepare_weights(inputs.weights)
    for _ in range(2):
        plan(inputs.x_TH, weights, inputs.routing)
        call_kernel(kernel, inputs, weights)
    tensor: torch.Tensor = getattr(inputs.weights, written_field)
    tensor.view(-1)[0] += 1
    for run in (plan, kernel):
        with pytest.raises(WeightsError, match=rf"{written_field[:2]}_tile\w+.*prepare_weights"):
            run(inputs.x_TH, weights, inputs.routing)
    call_kernel(kernel, inputs)  # a call without prepared weights is accepted
    call_kernel(kernel, inputs, kernel.prepare_weights(weights))


@pytest.mark.parametrize("name", SOURCE_FIELDS)
def test_a_call_after_prepared_tensors_were_written_is_refused(name: str) -> None:
    kernel, inputs = make_prepared_kernel(quant="int4_w4a16_group:group=32,zero_points=true")
    plan, weights = kernel.plan(), kernel.prepare_weights(inputs.weights)
    for _ in range(2):
        plan(inputs.x_TH, weights, inputs.routing)
        call_kernel(kernel, inputs, weights)
    with torch.inference_mode():
        getattr(weights, name).zero_()
    # Weights that were checked already, new ExpertWeights with the same tensors, and a new kernel.
    for weights_to_use in (weights, replace(weights), replace(weights, expert_map=None)):
        for run in (plan, kernel, make_kernel(*PAIR, kernel.problem)):
            with pytest.raises(WeightsError, match=f"{name}: got written to since it was prepared"):
                run(inputs.x_TH, weights_to_use, inputs.routing)
    call_kernel(kernel, inputs)
    call_kernel(kernel, inputs, kernel.prepare_weights(weights))


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.w1_zero_point.view(-1)[:1].add_(1),
        lambda w: w.w2_zero_point.view(-1)[:1].add_(1),
        lambda w: replace(w, w2_zero_point=w.w2_zero_point.clone()),
        lambda w: replace(w, w1_scale=w.w1_scale.half()),
        lambda w: replace(w, w2_scale=w.w2_scale.bfloat16()),
    ],
)
def test_other_zero_points_and_dtypes_of_scales_are_refused(
    change: Callable[[ExpertWeights], Any],
) -> None:
    kernel, inputs = make_prepared_kernel(quant="int4_w4a16_group:group=32,zero_points=true")
    plan, weights = kernel.plan(), kernel.prepare_weights(inputs.weights)
    for run in (plan, plan, kernel):
        run(inputs.x_TH, weights, inputs.routing)
    changed = change(weights)
    weights_to_use = changed if isinstance(changed, ExpertWeights) else weights
    for run in (plan, kernel):
        with pytest.raises(WeightsError, match="derived from other weights"):
            run(inputs.x_TH, weights_to_use, inputs.routing)


def test_prepared_tensors_of_other_weights_are_refused() -> None:
    kernel, inputs = make_prepared_kernel()
    weights = kernel.prepare_weights(inputs.weights)
    expanded = inputs.weights.w2.as_strided(inputs.weights.w2.shape, (0, 0, 0))
    for w2 in (inputs.weights.w2.clone(), expanded):
        with pytest.raises(WeightsError, match="derived from other weights"):
            call_kernel(kernel, inputs, replace(weights, w2=w2))


def test_other_memory_at_the_same_address_is_detected() -> None:
    """If parameters leave a GPU and others are allocated, the allocator can reuse an address."""
    kernel, inputs = make_prepared_kernel()
    memory = inputs.weights.w1.clone().numpy()
    w1 = torch.from_numpy(memory)
    weights, plan = kernel.prepare_weights(replace(inputs.weights, w1=w1)), kernel.plan()
    for run in (plan, plan, kernel):
        run(inputs.x_TH, weights, inputs.routing)
    address_and_version = w1.data_ptr(), w1._version
    w1.data = torch.empty(0, dtype=torch.uint8)
    gc.collect()  # frees tensors that the interpreter may keep alive
    memory[:] ^= 1
    w1.data = torch.from_numpy(memory)
    assert (w1.data_ptr(), w1._version) == address_and_version
    for run, weights_to_use in ((plan, weights), (kernel, weights), (kernel, replace(weights))):
        with pytest.raises(WeightsError, match="derived from other weights"):
            run(inputs.x_TH, weights_to_use, inputs.routing)


@pytest.mark.parametrize("copy_weights", [copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))])
def test_copies_without_their_sources_are_refused(
    copy_weights: Callable[[ExpertWeights], ExpertWeights],
) -> None:
    kernel, inputs = make_prepared_kernel()
    copies = copy_weights(kernel.prepare_weights(inputs.weights))
    with pytest.raises(WeightsError, match="a tensor that no kernel prepared"):
        call_kernel(kernel, inputs, copies)
    call_kernel(kernel, inputs, kernel.prepare_weights(copies))


@pytest.mark.parametrize(
    "changes",
    [
        {"quant": "mxfp4_w4a16:repacked=true"},
        {"activation": "silu:interleaved=true"},
    ],
    ids=str,
)
def test_tensors_prepared_for_another_layout_are_refused(
    changes: dict[str, Any],
) -> None:
    kernel, inputs = make_prepared_kernel()
    other_kernel, _ = make_prepared_kernel(**changes)
    assert other_kernel.experts.prepared_specs() == kernel.experts.prepared_specs()
    weights = other_kernel.prepare_weights(inputs.weights)
    with pytest.raises(WeightsError, match="w1_tiles: got prepared for TritonExperts of mxfp4"):
        call_kernel(kernel, inputs, weights)


@pytest.mark.parametrize("changes", [{"tokens": 80}, {"lora": "adapters=2,rank=8"}], ids=str)
def test_tensors_prepared_by_a_kernel_of_the_same_layer_are_accepted(
    changes: dict[str, Any], launched: list[int]
) -> None:
    (kernel, inputs), (other_kernel, other_inputs) = (
        make_prepared_kernel(),
        make_prepared_kernel(**changes),
    )
    prepared = {
        n: t for n, t in vars(kernel.prepare_weights(inputs.weights)).items() if t is not None
    }
    routing = replace(other_inputs.routing, adapters_T="none" if "lora" in changes else None)
    other_kernel(other_inputs.x_TH, replace(other_inputs.weights, **prepared), routing)
    assert launched == ([64, 64] if "tokens" in changes else [32, 32])
    part_subclass = type("Mine", (TritonExperts,), {})
    assert make_layout_key(part_subclass, kernel.problem) == make_layout_key(
        TritonExperts, other_kernel.problem
    )


@pytest.mark.parametrize("w1", [None, [1], torch.empty(1, device="meta")], ids=str)
def test_values_that_are_not_tensors_are_refused(w1: Any) -> None:
    kernel, inputs = make_prepared_kernel()
    with pytest.raises((DtypeError, DeviceError), match="w1: got"):
        kernel.prepare_weights(replace(inputs.weights, w1=w1))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"w2_tiles": None}, WeightsError),
        ({"w1_tiles": torch.zeros(1, dtype=torch.int32)}, WeightsError),
        ({"w1_tile_scales": "copy"}, WeightsError),
        ({"w1_tiles": "of w2"}, WeightsError),
        ({"w2_tile_scales": 3}, DtypeError),
    ],
    ids=str,
)
def test_tensors_with_wrong_shapes_and_dtypes_are_refused(
    change: dict[str, Any], error: type[Exception]
) -> None:
    kernel, inputs = make_prepared_kernel()
    weights = kernel.prepare_weights(inputs.weights)
    ((name, value),) = change.items()
    if value == "copy":
        value = getattr(weights, name).clone()
    elif value == "of w2":
        value = weights.w2_tiles
    with pytest.raises(error, match=name):
        call_kernel(kernel, inputs, replace(weights, **{name: value}))


def test_experts_without_preparation_return_the_weights() -> None:
    triton_kernel, inputs = make_prepared_kernel()
    kernel = make_kernel(PAIR[0], "TorchExperts", triton_kernel.problem)
    assert kernel.prepare_weights(inputs.weights) is inputs.weights
    assert torch.equal(
        call_kernel(kernel, inputs, triton_kernel.prepare_weights(inputs.weights)),
        call_kernel(kernel, inputs),
    )
    unprepared = {name: torch.zeros(1, dtype=torch.int32) for name in SOURCE_FIELDS}
    with pytest.raises(WeightsError, match="w1_tiles: got a tensor that no kernel"):
        call_kernel(kernel, inputs, replace(inputs.weights, **unprepared))
    with pytest.raises(ShapeError, match="w1"):
        kernel.prepare_weights(replace(inputs.weights, w1=inputs.weights.w1[:, 1:]))
    assert PermuteExpertsUnpermute.prepared_specs(kernel.experts) == {}


def test_undeclared_fields_of_prepared_specs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, inputs = make_prepared_kernel()
    specs = {"w3_tiles": BufferSpec((1,), torch.int32)}
    monkeypatch.setattr(TritonExperts, "prepared_specs", lambda _: specs)
    with pytest.raises(ConfigurationError, match="prepared_specs: got w3_tiles, need some of w1_t"):
        kernel.prepare_weights(inputs.weights)
