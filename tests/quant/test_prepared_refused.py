"""Prepared weights that do not belong to the call are refused: written, copied, of another kernel,
or not tensors.
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

from experts.triton.contiguous import TritonExperts
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


@pytest.mark.parametrize("of", ["w1", "w1_scale", "w2", "w2_scale"])
def test_a_call_after_weights_were_written_is_refused(of: str) -> None:
    kernel, i = make_prepared_kernel()
    plan, weights = kernel.plan(), kernel.prepare_weights(i.weights)
    for _ in range(2):
        plan(i.x_TH, weights, i.routing)
        call_kernel(kernel, i, weights)
    tensor: torch.Tensor = getattr(i.weights, of)
    tensor.view(-1)[0] += 1
    for run in (plan, kernel):
        with pytest.raises(WeightsError, match=rf"{of[:2]}_tile\w+.*prepare_weights"):
            run(i.x_TH, weights, i.routing)
    call_kernel(kernel, i)  # without them all is well
    call_kernel(kernel, i, kernel.prepare_weights(weights))


@pytest.mark.parametrize("name", SOURCE_FIELDS)
def test_a_call_after_prepared_tensors_were_written_is_refused(name: str) -> None:
    kernel, i = make_prepared_kernel(quant="int4_w4a16_group:group=32,zero_points=true")
    plan, weights = kernel.plan(), kernel.prepare_weights(i.weights)
    for _ in range(2):
        plan(i.x_TH, weights, i.routing)
        call_kernel(kernel, i, weights)
    with torch.inference_mode():
        getattr(weights, name).zero_()
    # Weights that were checked, others with the same tensors, and a kernel that knows neither.
    for given in (weights, replace(weights), replace(weights, expert_map=None)):
        for run in (plan, kernel, make_kernel(*PAIR, kernel.problem)):
            with pytest.raises(WeightsError, match=f"{name}: got written to since it was prepared"):
                run(i.x_TH, given, i.routing)
    call_kernel(kernel, i)
    call_kernel(kernel, i, kernel.prepare_weights(weights))


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
    kernel, i = make_prepared_kernel(quant="int4_w4a16_group:group=32,zero_points=true")
    plan, weights = kernel.plan(), kernel.prepare_weights(i.weights)
    for run in (plan, plan, kernel):
        run(i.x_TH, weights, i.routing)
    changed = change(weights)
    given = changed if isinstance(changed, ExpertWeights) else weights
    for run in (plan, kernel):
        with pytest.raises(WeightsError, match="derived from other weights"):
            run(i.x_TH, given, i.routing)


def test_prepared_tensors_of_other_weights_are_refused() -> None:
    kernel, i = make_prepared_kernel()
    weights = kernel.prepare_weights(i.weights)
    turned = i.weights.w2.as_strided(i.weights.w2.shape, (0, 0, 0))
    for w2 in (i.weights.w2.clone(), turned):
        with pytest.raises(WeightsError, match="derived from other weights"):
            call_kernel(kernel, i, replace(weights, w2=w2))


def test_other_memory_at_the_same_address_is_detected() -> None:
    """If parameters leave a GPU and others are allocated, the allocator can reuse the address."""
    kernel, i = make_prepared_kernel()
    memory = i.weights.w1.clone().numpy()
    w1 = torch.from_numpy(memory)
    weights, plan = kernel.prepare_weights(replace(i.weights, w1=w1)), kernel.plan()
    for run in (plan, plan, kernel):
        run(i.x_TH, weights, i.routing)
    place = w1.data_ptr(), w1._version
    w1.data = torch.empty(0, dtype=torch.uint8)
    gc.collect()  # what the interpreter may hold
    memory[:] ^= 1
    w1.data = torch.from_numpy(memory)
    assert (w1.data_ptr(), w1._version) == place
    for run, given in ((plan, weights), (kernel, weights), (kernel, replace(weights))):
        with pytest.raises(WeightsError, match="derived from other weights"):
            run(i.x_TH, given, i.routing)


@pytest.mark.parametrize("copied_by", [copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))])
def test_copies_without_their_sources_are_refused(
    copied_by: Callable[[ExpertWeights], ExpertWeights],
) -> None:
    kernel, i = make_prepared_kernel()
    copied = copied_by(kernel.prepare_weights(i.weights))
    with pytest.raises(WeightsError, match="a tensor that no kernel prepared"):
        call_kernel(kernel, i, copied)
    call_kernel(kernel, i, kernel.prepare_weights(copied))


@pytest.mark.parametrize(
    "others",
    [
        {"quant": "mxfp4_w4a16:repacked=true"},
        {"activation": "silu:interleaved=true"},
    ],
    ids=str,
)
def test_tensors_prepared_for_another_layout_are_refused(
    others: dict[str, Any],
) -> None:
    kernel, i = make_prepared_kernel()
    other, _ = make_prepared_kernel(**others)
    assert other.experts.prepared_specs() == kernel.experts.prepared_specs()
    weights = other.prepare_weights(i.weights)
    with pytest.raises(WeightsError, match="w1_tiles: got prepared for TritonExperts of mxfp4"):
        call_kernel(kernel, i, weights)


@pytest.mark.parametrize("others", [{"tokens": 80}, {"lora": "adapters=2,rank=8"}], ids=str)
def test_tensors_prepared_by_a_kernel_of_the_same_layer_are_accepted(
    others: dict[str, Any], launched: list[int]
) -> None:
    (kernel, i), (other, j) = make_prepared_kernel(), make_prepared_kernel(**others)
    given = {n: t for n, t in vars(kernel.prepare_weights(i.weights)).items() if t is not None}
    routing = replace(j.routing, adapters_T="none" if "lora" in others else None)
    other(j.x_TH, replace(j.weights, **given), routing)
    assert launched == ([64, 64] if "tokens" in others else [32, 32])
    mine = type("Mine", (TritonExperts,), {})
    assert make_layout_key(mine, kernel.problem) == make_layout_key(TritonExperts, other.problem)


@pytest.mark.parametrize("w1", [None, [1], torch.empty(1, device="meta")], ids=str)
def test_values_that_are_not_tensors_are_refused(w1: Any) -> None:
    kernel, i = make_prepared_kernel()
    with pytest.raises((DtypeError, DeviceError), match="w1: got"):
        kernel.prepare_weights(replace(i.weights, w1=w1))


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
    kernel, i = make_prepared_kernel()
    weights = kernel.prepare_weights(i.weights)
    ((name, value),) = change.items()
    if value == "copy":
        value = getattr(weights, name).clone()
    elif value == "of w2":
        value = weights.w2_tiles
    with pytest.raises(error, match=name):
        call_kernel(kernel, i, replace(weights, **{name: value}))


def test_experts_without_preparation_return_the_weights() -> None:
    triton, i = make_prepared_kernel()
    kernel = make_kernel(PAIR[0], "TorchExperts", triton.problem)
    assert kernel.prepare_weights(i.weights) is i.weights
    assert torch.equal(
        call_kernel(kernel, i, triton.prepare_weights(i.weights)), call_kernel(kernel, i)
    )
    beside = {name: torch.zeros(1, dtype=torch.int32) for name in SOURCE_FIELDS}
    with pytest.raises(WeightsError, match="w1_tiles: got a tensor that no kernel"):
        call_kernel(kernel, i, replace(i.weights, **beside))
    with pytest.raises(ShapeError, match="w1"):
        kernel.prepare_weights(replace(i.weights, w1=i.weights.w1[:, 1:]))
    assert PermuteExpertsUnpermute.prepared_specs(kernel.experts) == {}


def test_a_part_that_declares_no_field_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, i = make_prepared_kernel()
    specs = {"w3_tiles": BufferSpec((1,), torch.int32)}
    monkeypatch.setattr(TritonExperts, "prepared_specs", lambda _: specs)
    with pytest.raises(ConfigurationError, match="prepared_specs: got w3_tiles, need some of w1_t"):
        kernel.prepare_weights(i.weights)
