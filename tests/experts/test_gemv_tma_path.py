"""The host code of the `gemv_tma` path without a GPU: accepted weights, and workspaces.

tests/gpu/test_streamed_path.py tests the path's outputs.
"""

from dataclasses import replace

import pytest
import torch

from experts import TritonExperts
from experts.triton.configs.select import on_device
from experts.triton.gemv_tma.gemv_tma_path import GemvTmaPath
from experts.triton.launch_config import Device
from modular_kernel import ExpertWeights, Problem
from modular_kernel.tensors import StandardShape
from modular_kernel.testing.random_inputs import random_inputs

H200 = Device("NVIDIA H200", tma=True)
LAYER = Problem(
    tokens=1, hidden=32, intermediate=48, experts=128, top_k=8, quant="fp8_w8a8_channel"
)
X_TH = torch.empty(LAYER.tokens, LAYER.hidden)  # any alignment is supported


def make_weights() -> ExpertWeights:
    return random_inputs(LAYER, torch.device("cpu"))[1]


def make_shape(tokens: int) -> StandardShape:
    return StandardShape(tokens=tokens, top_k=LAYER.top_k)


def test_weights_that_tma_can_load_are_accepted() -> None:
    assert GemvTmaPath(LAYER).supports_tensors(make_weights(), X_TH)


@pytest.mark.parametrize("name", ["w1", "w2", "w1_scale", "w2_scale"])
def test_tensors_with_gaps_are_refused(name: str) -> None:
    original = make_weights()
    tensor = getattr(original, name)
    strided = torch.empty(2 * tensor.shape[0], *tensor.shape[1:], dtype=tensor.dtype)[::2]
    assert not GemvTmaPath(LAYER).supports_tensors(replace(original, **{name: strided}), X_TH)


@pytest.mark.parametrize("name", ["w1", "w2"])
def test_misaligned_weights_are_refused(name: str) -> None:
    original = make_weights()
    tensor = getattr(original, name)
    path = GemvTmaPath(LAYER)
    buffer = torch.empty(tensor.numel() + 32, dtype=tensor.dtype)
    aligned_offset = -buffer.data_ptr() % 16
    for offset, is_accepted in ((aligned_offset, True), (aligned_offset + 8, False)):
        view = buffer[offset : offset + tensor.numel()].view(tensor.shape)
        assert path.supports_tensors(replace(original, **{name: view}), X_TH) is is_accepted


def test_x_is_unquantized_only_if_every_call_can_quantize_it() -> None:
    """If TMA cannot load the weights of a call, the call takes another path. With up to 4 tokens,
    this is the `gemv` path, which quantizes x itself. With 5 to 8 tokens, it is the `aligned` path,
    which requires a quantized x.
    """
    with on_device(H200):
        part = TritonExperts(LAYER)
        assert [part.takes_unquantized(make_shape(tokens)) for tokens in (1, 4, 5, 8, 9)] == [
            *(True, True),
            *(False, False, False),
        ]


def test_workspaces_are_sized_for_both_paths() -> None:
    with on_device(H200):
        extra = TritonExperts(LAYER).workspace_shapes(make_shape(1)).extra
    assert {"gemv_tma_amax", "gemv_amax"} <= set(extra)
    assert extra["gemv_tma_amax"].shape == (8 * 2,)
    with on_device(replace(H200, tma=False)):
        extra = TritonExperts(LAYER).workspace_shapes(make_shape(1)).extra
    assert "gemv_tma_amax" not in extra
