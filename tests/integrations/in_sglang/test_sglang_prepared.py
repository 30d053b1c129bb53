"""Prepared copies of int4 weights, which the plugin makes after SGLang has loaded a layer."""

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from prepared_weights_samples import NO_GPU, make_launched_fixture
from sglang_runtime import call, fill, fused_moe, group_config, layer_inputs

from modular_kernel.integrations import fused_moe_kernels
from modular_kernel.integrations.sglang import layer_runner, v0_5_23
from modular_kernel.quant.auto_prepare import AUTO_PREPARED, WeightPreparer
from modular_kernel.reference import float64_reference, rounded_reference
from modular_kernel.spec.problem import Problem
from modular_kernel.testing.verify.compare import compare

pytestmark = NO_GPU
launched = make_launched_fixture()
PROBLEM = Problem(
    tokens=64, hidden=64, intermediate=64, experts=4, top_k=2, quant="int4_w4a16_group:group=32"
)


@pytest.fixture(autouse=True)
def _prepare_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare weights as on a GPU, with kernels that other tests do not share."""
    monkeypatch.setattr(WeightPreparer, "is_enabled_on", lambda self, device: True)
    monkeypatch.setattr(layer_runner, "select_backend", lambda device: "triton")
    fused_moe_kernels._make_kernel.cache_clear()


def list_copies(others: list[Any]) -> list[torch.Tensor]:
    """Return the prepared tensors of the cache entries that are not in `others`."""
    entries = AUTO_PREPARED._entries.values()
    new_entries = [entry for entry in entries if not any(entry is other for other in others)]
    return [tensor for entry in new_entries for tensor in entry.tensors.values()]


@pytest.mark.parametrize("zero_points", [False, True])
def test_layers_use_the_copy_made_during_loading(zero_points: bool, launched: list[int]) -> None:
    quant = PROBLEM.quant + (",zero_points=true" if zero_points else "")
    problem = replace(PROBLEM, quant=quant)
    layer = fused_moe(problem, group_config(4, zero_points=zero_points))
    # Layers of other tests may be freed at any time, so sizes count only new entries.
    others = [*AUTO_PREPARED._entries.values()]
    sizes = []
    # The second load writes to the same tensors, which torch does not track.
    for is_reload in (False, True):
        inputs = layer_inputs(problem)
        if is_reload:
            flipped_w1 = inputs.weights.w1.flip(0).contiguous()
            inputs = replace(inputs, weights=replace(inputs.weights, w1=flipped_w1))
        fill(layer, inputs.weights)
        sizes.append(sum(tensor.nbytes for tensor in list_copies(others)))
        launched.clear()
        got = call(layer, inputs)
        assert len(launched) == 2
        arguments = inputs.x_TH, inputs.weights, inputs.routing, problem
        comparison = compare(
            got, float64_reference(*arguments), rounded_reference(*arguments), problem
        )
        assert not comparison.problems, comparison
    assert sizes[0] >= inputs.weights.w1.nbytes + inputs.weights.w2.nbytes
    assert sizes[1] == sizes[0]
    assert layer.runner.runner_core.layer_runner.refusal is None


def test_both_int4_methods_of_sglang_prepare_weights() -> None:
    assert len(v0_5_23._INT4_METHODS) == 2
    for module, name in v0_5_23._INT4_METHODS.items():
        function = getattr(import_module(module), name).process_weights_after_loading
        assert hasattr(function, "modular_kernel_original"), name
