"""Small mxfp4 kernels and layers, for tests of prepared weights."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from grouped_gemm_stand_in import H200, MXFP4, multiply_w4

from experts.triton.configs.select import on_device
from experts.triton.grouped_w4.grouped_w4_path import GroupedW4Path
from experts.triton.launch_config import LaunchConfig
from modular_kernel import FusedMoEModularKernel, make_kernel
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.tensors import ExpertWeights
from modular_kernel.testing.cases.inputs import Inputs, make_inputs

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu tests it on GPUs")
PAIR = ("MoEPrepareAndFinalizeNoEP", "TritonExperts")
CPU = torch.device("cpu")


def make_launched_fixture() -> Any:
    """Return the fixture `launched`, a list with block_m of each GEMM that the path launches."""

    @pytest.fixture(name="launched", autouse=True)
    def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
        block_ms: list[int] = []

        def multiply(
            self: GroupedW4Path, rows: Any, product: Any, tile: LaunchConfig, *arguments: Any
        ) -> None:
            block_ms.append(tile.block_m)
            multiply_w4(self, rows, product, tile, *arguments)

        monkeypatch.setattr(GroupedW4Path, "multiply", multiply)
        with on_device(H200):
            yield block_ms

    return launched


def make_prepared_kernel(**changes: Any) -> tuple[FusedMoEModularKernel, Inputs]:
    """Return an mxfp4 kernel and its inputs. changes: fields of MXFP4; the default is 40 tokens."""
    problem = replace(MXFP4, **({"tokens": 40} | changes))
    return make_kernel(*PAIR, problem), make_inputs(problem, "uniform", CPU)


def make_prepared_layer() -> tuple[FusedMoE, Inputs]:
    problem = replace(MXFP4, tokens=64, hidden=96)
    layer, inputs = FusedMoE(
        problem.experts, problem.hidden, problem.intermediate, top_k=problem.top_k,
        experts="TritonExperts", params_dtype=problem.dtype, quant_config="mxfp4_w4a16",
    ), make_inputs(problem, "uniform", CPU)  # fmt: skip
    layer.set_weights(inputs.weights)
    return layer, inputs


def call_kernel(
    kernel: FusedMoEModularKernel, inputs: Inputs, weights: ExpertWeights | None = None
) -> torch.Tensor:
    """Return a copy of the kernel's output."""
    return kernel(inputs.x_TH, weights or inputs.weights, inputs.routing).clone()
