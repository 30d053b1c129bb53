"""Invalid arguments of run_moe_lora: the error names the argument, and no kernel is launched."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from moe_lora_calls import DEVICE, make_call

from modular_kernel.errors import (
    ConfigurationError,
    DeviceError,
    DtypeError,
    InputError,
    LayoutError,
    ShapeError,
    UnsupportedError,
)
from modular_kernel.ops.moe_lora import BUFFERS, run_moe_lora

META = torch.device("meta")
# Argument, its invalid value, the error, and a pattern that the message must match.
INVALID_ARGUMENTS: list[tuple[str, Any, type[InputError], str]] = [
    ("x", torch.zeros(21, 71), ShapeError, r"gate_up_a_buffer: got \(4, 5, 20, 72\), need \(4, 5"),
    ("x", torch.zeros(21, 72, 1), ShapeError, "hidden_states: got"),
    ("x", torch.zeros(21, 72).double(), DtypeError, "hidden_states: got torch.float64"),
    ("x", torch.zeros(72, 21).T, LayoutError, "hidden_states: got strides"),
    ("x", torch.zeros(21, 72, requires_grad=True), UnsupportedError, "gradients: got hidden_st"),
    ("x", None, DtypeError, "hidden_states: got NoneType"),
    ("ids", torch.zeros(21, 3), DtypeError, "topk_ids: got torch.float32, need torch.int32 or"),
    ("ids", torch.zeros(20, 3).int(), ShapeError, r"topk_ids: got \(20, 3\), need \(21, 3\)"),
    ("ids", torch.zeros(21, 0).int(), ShapeError, "K = 0"),
    ("ids", torch.zeros(21).int(), ShapeError, "topk_ids: got"),
    ("weights", torch.zeros(21, 2), ShapeError, r"topk_weights: got \(21, 2\), need \(21, 3\)"),
    ("weights", torch.zeros(21, 3).half(), DtypeError, "topk_weights: got torch.float16"),
    ("weights", torch.zeros(21, 3, device=META), DeviceError, "topk_weights: got meta"),
    ("output", torch.zeros(21, 72).half(), DtypeError, "output: got torch.float16, need torch.fl"),
    ("output", torch.zeros(21, 71), ShapeError, "output: got"),
    ("output", torch.zeros(72).expand(21, 72), LayoutError, r"output: got strides \(0, 1\)"),
    ("gate_up_a", torch.zeros(4, 5, 257, 72), ShapeError, "gate_up_a_buffer: got .*and R <= 256"),
    ("gate_up_a", torch.zeros(5, 20, 72), ShapeError, "gate_up_a_buffer: got"),
    ("gate_up_b", torch.zeros(4, 5, 79, 20), ShapeError, "gate_up_b_buffer: got"),
    ("gate_up_b", torch.zeros(4, 4, 80, 20), ShapeError, "gate_up_b_buffer: got"),
    ("gate_up_b", torch.zeros(4, 5, 80, 20).half(), DtypeError, "gate_up_b_buffer: got"),
    ("gate_up_b", torch.zeros(4, 5, 20, 80).mT, LayoutError, "gate_up_b_buffer: got strides"),
    ("down_a", torch.zeros(4, 5, 20, 40)[..., ::2], ShapeError, "gate_up_b_buffer"),
    ("down_a", torch.zeros(4, 5, 20), ShapeError, "down_a_buffer: got"),
    ("down_b", torch.zeros(4, 5, 72, 19), ShapeError, "down_b_buffer: got"),
]


@pytest.mark.parametrize("case", INVALID_ARGUMENTS, ids=lambda case: f"{case[0]} {case[3][:24]}")
def test_errors_name_the_invalid_argument(
    case: tuple[str, Any, type[InputError], str],
) -> None:
    name, tensor, error, message = case
    c = make_call()
    if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
        # Make an equal tensor on DEVICE. `to` would not keep the strides.
        numel = tensor.untyped_storage().nbytes() // tensor.element_size()
        on_device = torch.zeros(numel, dtype=tensor.dtype, device=DEVICE)
        on_device = on_device.as_strided(tensor.shape, tensor.stride())
        tensor = on_device.requires_grad_(tensor.requires_grad)
    if name in BUFFERS:
        c.buffers[BUFFERS.index(name)] = tensor
    else:
        c = replace(c, **{name: tensor})
    output_before = c.output.clone()
    with pytest.raises(error, match=message):
        run_moe_lora(c.x, c.ids, c.weights, c.info, *c.buffers, c.output)
    assert torch.equal(c.output, output_before)


def test_overlapping_outputs_and_invalid_options_are_refused() -> None:
    c = make_call()
    with pytest.raises(ConfigurationError, match="output: got memory of hidden_states"):
        run_moe_lora(c.x, c.ids, c.weights, c.info, *c.buffers, c.x)
    with pytest.raises(ConfigurationError, match="strategy: got 'both', need auto or fused or st"):
        c.run("both")
    with pytest.raises(ConfigurationError, match="moe_lora_info: got None"):
        replace(c, info=None).run()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"weight_indices": torch.zeros(20).int()}, ShapeError, r"got \(20,\), need \(21,\), or"),
        ({"weight_indices": torch.zeros(21, 1).int()}, ShapeError, "weight_indices: got"),
        ({"weight_indices": torch.zeros(21)}, DtypeError, "weight_indices: got torch.float32"),
        ({"lora_ranks": torch.zeros(3).int()}, ShapeError, r"scalings: got \(4,\), need \(3,\)"),
        ({"lora_ranks": torch.zeros(4, 6).int()}, ShapeError, r"lora_ranks: got \(4, 6\), need"),
        ({"lora_ranks": torch.zeros(4)}, DtypeError, "lora_ranks: got torch.float32"),
        ({"scalings": torch.zeros(4).double()}, DtypeError, "scalings: got torch.float64"),
        ({"scalings": [1.0] * 4}, DtypeError, "scalings: got list"),
        ({"seg_indptr": torch.zeros(4).int()}, ShapeError, "sequences: got"),
        ({"scalings": torch.zeros(4, device=META)}, DeviceError, "scalings: got meta"),
    ],
)
def test_invalid_lora_info_is_refused(
    changes: dict[str, Any], error: type[InputError], message: str
) -> None:
    c = make_call()
    on_device = {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) and not value.is_meta else value
        for name, value in changes.items()
    }
    with pytest.raises(error, match=message):
        replace(c, info=replace(c.info, **on_device)).run()
