"""The weights of MoeRunner: flags or a name for the scheme, and padded and transposed storage."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from devices import DEVICE
from fused_experts_calls import BASE, E, H, I, assert_close, make_layer
from runner_calls import NOT_INPLACE, make_dispatch_output, make_quant_info, run_layer

from modular_kernel.errors import ConfigurationError, ShapeError, UnsupportedError
from modular_kernel.integrations.moe_runner import MoeQuantInfo, MoeRunner
from modular_kernel.reference import float64_reference

FLAGS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"use_fp8_w8a8": True}, "fp8_w8a8_tensor"),
    ({"use_fp8_w8a8": True}, "fp8_w8a8_tensor:static=true"),
    ({"use_fp8_w8a8": True, "per_channel_quant": True}, "fp8_w8a8_channel"),
    ({"use_fp8_w8a8": True, "block_shape": [32, 32]}, "fp8_w8a8_block:block=32x32"),
    ({"use_int8_w8a8": True, "per_channel_quant": True}, "int8_w8a8_channel"),
    ({"use_int8_w8a16": True}, "int8_w8a16_channel"),
    ({"use_int4_w4a16": True, "block_shape": [0, 32]}, "int4_w4a16_group:group=32"),
    ({"quant": "mxfp4_w4a16"}, "mxfp4_w4a16"),
    ({"quant": "nvfp4_w4a16"}, "nvfp4_w4a16"),
)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("flags", "quant"), FLAGS, ids=[quant for _, quant in FLAGS])
def test_flags_or_a_name_determine_the_scheme(
    flags: dict[str, Any], quant: str, backend: str
) -> None:
    problem = replace(BASE, quant=quant)
    x_TH, weights, routing = make_layer(problem, DEVICE)
    expected = float64_reference(x_TH, weights, routing, problem)
    for fused in {True, backend == "torch"}:
        got = run_layer(MoeRunner(backend, NOT_INPLACE, fused=fused), problem, **flags)
        assert_close(got, expected, 0.1 if "w8a8" in quant else 1e-5)


def test_contradicting_schemes_are_refused() -> None:
    _, weights, _ = make_layer(BASE, DEVICE)
    for flags, message in (
        ({"use_fp8_w8a8": True, "quant": "mxfp4_w4a16"}, "quant: got mxfp4_w4a16 and fp8"),
        ({"use_fp8_w8a8": True, "use_int8_w8a8": True}, "one use_"),
        ({"quant": "fp9"}, "quant: got fp9"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            make_quant_info(weights, **flags).scheme()
    with pytest.raises(ConfigurationError, match=r"MoeQuantInfo\.w13_weight: got 7"):
        MoeQuantInfo(7, weights.w2)  # type: ignore[arg-type]


@pytest.mark.parametrize("quant", ["none", "fp8_w8a8_tensor"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_padded_weights_give_the_same_result(backend: str, quant: str) -> None:
    problem = replace(BASE, quant=quant)
    x_TH, weights, routing = make_layer(problem, DEVICE)
    flags = {"use_fp8_w8a8": True} if quant != "none" else {}
    padded_weights = replace(weights, w1=_pad_columns(weights.w1), w2=_pad_columns(weights.w2))
    unpadded_output = MoeRunner(backend, NOT_INPLACE).run(
        make_dispatch_output(x_TH, routing), make_quant_info(weights, **flags)
    )
    runner = MoeRunner(backend, NOT_INPLACE, padding=True)
    got = runner.run(make_dispatch_output(x_TH, routing), make_quant_info(padded_weights, **flags))
    assert torch.equal(got.hidden_states, unpadded_output.hidden_states)
    if quant != "none":
        with pytest.raises(UnsupportedError, match="padding: got int4"):
            runner.run(
                make_dispatch_output(x_TH, routing),
                make_quant_info(padded_weights, quant="int4_w4a16_group:group=32"),
            )
        return
    with pytest.raises(ShapeError, match="padded weights"):
        runner.run(
            make_dispatch_output(x_TH, routing),
            make_quant_info(replace(padded_weights, w1=weights.w1[:, :, 1:])),
        )
    with pytest.raises(ShapeError):
        MoeRunner(backend, NOT_INPLACE).run(
            make_dispatch_output(x_TH, routing), make_quant_info(padded_weights, **flags)
        )


def _pad_columns(weight: torch.Tensor) -> torch.Tensor:
    padding = torch.full((*weight.shape[:2], 128), torch.nan, device=weight.device)
    return torch.cat([weight.float(), padding], 2).to(weight.dtype)


def test_transposed_weights_give_the_same_result() -> None:
    x_TH, weights, routing = make_layer(BASE, DEVICE)
    transposed_weights = replace(
        weights,
        w1=weights.w1.transpose(1, 2).contiguous(),
        w2=weights.w2.transpose(1, 2).contiguous(),
    )
    assert transposed_weights.w1.shape == (E, H, 2 * I)
    got = MoeRunner("torch", NOT_INPLACE).run(
        make_dispatch_output(x_TH, routing),
        make_quant_info(transposed_weights, use_triton_kernels=True),
    )
    assert_close(got.hidden_states, float64_reference(x_TH, weights, routing, BASE), 1e-6)
