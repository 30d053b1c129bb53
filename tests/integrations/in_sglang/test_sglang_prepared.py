"""Copies of int4 weights that the plugin prepares when SGLang has loaded a layer."""

from dataclasses import replace
from importlib import import_module

import pytest
from prepared_weights_samples import CPU, NO_GPU, make_launched_fixture
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
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare weights as on a GPU, with kernels of these tests only."""
    monkeypatch.setattr(WeightPreparer, "is_enabled_on", lambda self, device: True)
    monkeypatch.setattr(layer_runner, "select_backend", lambda device: "triton")
    fused_moe_kernels._make_kernel.cache_clear()


@pytest.mark.parametrize("zero_points", [False, True])
def test_a_layer_reads_a_copy_that_is_made_when_it_is_loaded(
    zero_points: bool, launched: list[int]
) -> None:
    quant = PROBLEM.quant + (",zero_points=true" if zero_points else "")
    problem = replace(PROBLEM, quant=quant)
    layer = fused_moe(problem, group_config(4, zero_points=zero_points))
    before = AUTO_PREPARED.held_bytes().get(CPU, 0)
    held = []
    for again in (False, True):  # torch does not track the second load, into the same tensors
        inputs = layer_inputs(problem)
        if again:
            flipped = inputs.weights.w1.flip(0).contiguous()
            inputs = replace(inputs, weights=replace(inputs.weights, w1=flipped))
        fill(layer, inputs.weights)
        held.append(AUTO_PREPARED.held_bytes()[CPU] - before)
        launched.clear()
        got = call(layer, inputs)
        assert len(launched) == 2
        facts = inputs.x_TH, inputs.weights, inputs.routing, problem
        found = compare(got, float64_reference(*facts), rounded_reference(*facts), problem)
        assert not found.problems, found
    assert held[0] >= inputs.weights.w1.nbytes + inputs.weights.w2.nbytes
    assert held[1] == held[0]
    assert layer.runner.runner_core.layer_runner.refusal is None


def test_both_methods_for_int4_weights_prepare_them() -> None:
    assert len(v0_5_23._INT4_METHODS) == 2
    for module, name in v0_5_23._INT4_METHODS.items():
        function = getattr(import_module(module), name).process_weights_after_loading
        assert hasattr(function, "modular_kernel_original"), name
