"""Verification runs the calls with strided tensors with lowered limits, which change tile sizes but
not results.
"""

import importlib

import pytest
import torch

from modular_kernel.catalog import this_machine
from modular_kernel.ops import quantize_tiles
from modular_kernel.spec.problem import Problem
from modular_kernel.testing.cases.case import Case
from modular_kernel.testing.verify.lowered_limits import LOWERED_LIMITS, lower_limits
from modular_kernel.testing.verify.trial import Trial, call

LIMITS = [(module, name) for module, limits in LOWERED_LIMITS.items() for name in limits]


@pytest.mark.parametrize(("module_name", "name"), LIMITS)
def test_limits_are_lowered_and_restored(module_name: str, name: str) -> None:
    module, value = importlib.import_module(module_name), LOWERED_LIMITS[module_name][name]
    default = getattr(module, name)
    assert value < default
    with lower_limits():
        assert getattr(module, name) == value
    assert getattr(module, name) == default
    with lower_limits(enabled=False):
        assert getattr(module, name) == default


def test_the_call_with_lowered_limits_has_streamed_tiles_and_equal_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = Problem(
        6, 128, 64, experts=2, top_k=1, dtype=torch.bfloat16, quant="fp8_w8a8_block:block=32x32"
    )
    trial = Trial(Case("MoEPrepareAndFinalizeNoEP", "TorchExperts", problem), this_machine())
    stages = []
    tile_groups = quantize_tiles.tile_groups

    def record_stages(*arguments: object) -> quantize_tiles.TileConfig:
        tiles = tile_groups(*arguments)
        stages.append(tiles.stages)
        return tiles

    monkeypatch.setattr("modular_kernel.ops.quantize.tile_groups", record_stages)
    call(trial.kernel, trial.first)
    num_stages_of_first_call = len(stages)
    assert num_stages_of_first_call
    assert set(stages) == {1}
    output = call(trial.kernel, trial.other)
    assert set(stages[num_stages_of_first_call:]) == {3}
    inputs = trial.other.inputs
    expected = trial.kernel(trial.other.x_TH(), inputs.weights, inputs.routing)
    assert torch.equal(output, expected)
