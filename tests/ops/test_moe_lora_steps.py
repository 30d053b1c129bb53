"""The steps of run_moe_lora, each compared with its float64 loop, and where values are rounded."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from moe_lora_calls import (
    DEVICE,
    WITH_KERNELS_AND_TORCH,
    assert_close,
    expected_outputs,
    make_call,
    make_implementation_fixture,
    make_pair_batch,
)

from modular_kernel.machine import prefer_torch_reference
from modular_kernel.ops.moe_lora_stages import (
    moe_lora_a,
    moe_lora_down_combine,
    moe_lora_fused,
    moe_lora_gate_up_b,
)

_implementation = make_implementation_fixture()


@WITH_KERNELS_AND_TORCH
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_step_equals_its_float64_loop(dtype: torch.dtype, grouped: bool) -> None:
    """A step writes zeros for skipped pairs and beyond the rank."""
    c = make_call(dtype=dtype)
    expected, batch = expected_outputs(c), make_pair_batch(c, grouped=grouped)
    a13, b13, a2, b2 = c.buffers
    u = moe_lora_a(c.x, a13, batch)
    h = moe_lora_gate_up_b(expected["u"].to(dtype), b13, batch)
    v = moe_lora_a(expected["h"].to(dtype), a2, batch)
    for name, actual in (("u", u), ("h", h), ("v", v)):
        assert actual.shape == expected[name].shape
        assert not actual[expected[name] == 0].any()
        assert_close(actual, expected[name])
    out = c.output.clone()
    moe_lora_down_combine(expected["v"].to(dtype), b2, batch, c.weights, c.info.scalings, out)
    assert_close(out, expected["out"])


def test_pairs_of_one_adapter_and_expert_are_adjacent() -> None:
    c = make_call()
    batch = make_pair_batch(c, grouped=True)
    assert batch.order_P is not None
    assert sorted(batch.order_P.tolist()) == list(range(63))
    keys = batch.compute_keys().flatten()[batch.order_P].tolist()
    assert keys == sorted(keys)
    assert 1 < len(set(keys)) < 63
    assert batch.compute_keys().max() == 4 * 5  # the key of skipped pairs


@pytest.mark.parametrize("step", ["a", "gate_up_b"])
def test_programs_process_pairs_in_the_given_order(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """All programs get the same pair, so only the row of this pair is written."""
    c = make_call()
    batch = replace(make_pair_batch(c, grouped=True), order_P=torch.full((63,), 7, device=DEVICE))
    original_new_empty = torch.Tensor.new_empty

    def new_empty_with_nan(like: torch.Tensor, *shape: int, **options: Any) -> torch.Tensor:
        tensor = original_new_empty(like, *shape, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty_with_nan)
    with prefer_torch_reference(enabled=False):
        if step == "a":
            actual = moe_lora_a(c.x, c.buffers[0], batch)
        else:
            actual = moe_lora_gate_up_b(expected_outputs(c)["u"].float(), c.buffers[1], batch)
    assert (~actual.isnan().flatten(0, 1).any(1)).nonzero().tolist() == [[7]]


@WITH_KERNELS_AND_TORCH
@pytest.mark.parametrize("strategy", ["staged", "fused"])
def test_masked_elements_are_not_summed(strategy: str) -> None:
    """The sum of all values of u would overflow. The values of B are near the smallest float32."""
    c = make_call()
    c.info.weight_indices[:] = 2  # The adapter in slot 2 has rank 20.
    c.x[:] = torch.eye(1, c.x.shape[1], device=DEVICE)
    c.buffers[0][2] = 3e37
    c.buffers[1][2] = c.buffers[1][2].sign() * 1e-37
    expected = expected_outputs(c)
    assert expected["u"].sum(2).max() > torch.finfo(torch.float32).max
    assert bool(expected["out"].isfinite().all())
    assert_close(c.run(strategy), expected["out"])


@WITH_KERNELS_AND_TORCH
@pytest.mark.parametrize("strategy", ["staged", "fused"])
def test_products_of_narrow_values_are_not_rounded(strategy: str) -> None:
    """(1 + 2^-7)^2 - (1 + 2^-6) is 2^-14. If products were rounded to bf16, it would be 0."""
    c = make_call(dtype=torch.bfloat16)
    c.info.weight_indices[:] = 2  # The adapter in slot 2 has rank 20.
    c.output.zero_()
    c.x.zero_()[:, :2] = torch.tensor([1 + 2**-7, 1])
    c.buffers[0][2] = 0
    c.buffers[0][2, ..., :2] = torch.tensor([1 + 2**-7, -1 - 2**-6])
    c.buffers[1][2] *= 2**14
    assert_close(c.run(strategy), expected_outputs(c)["out"])


# For each step, the top left corners of A13, the gate and the up half of B13, A2 and B2. All other
# elements are 0. The test replaces LOW by a number slightly above 0.
LOW = "low"
CORNERS: dict[str, tuple[list[list[Any]], ...]] = {
    "u": ([[1, LOW], [1, 0]], [[64, -64]], [[1, 0]], [[1, 0]], [[1, 0]]),
    "h": ([[1, 0], [1, 0]], [[64, 0], [64, 0]], [[1, LOW], [1, 0]], [[1, -1]], [[1, 0]]),
    "v": ([[1, 0], [1, 0]], [[64, 0], [64, 0]], [[1, 0], [1, 0]], [[1, LOW], [1, 0]], [[1, -1]]),
}


@WITH_KERNELS_AND_TORCH
@pytest.mark.parametrize("strategy", ["staged", "fused"])
@pytest.mark.parametrize("step", CORNERS)
def test_u_h_and_v_are_rounded_to_the_dtype_of_x(step: str, strategy: str) -> None:
    """The branch computes a difference of two values of the step.
    In bf16, 1 + 2^-9 equals 1, and 1 + 2^-7 does not.
    """
    c = make_call(dtype=torch.bfloat16)
    c.info.weight_indices[:] = 2  # The adapter in slot 2 has rank 20.
    c.output.zero_()
    c.x.zero_()[:, :2] = 1
    intermediate = c.buffers[1].shape[2] // 2
    matrices = (
        c.buffers[0][2], c.buffers[1][2, :, :intermediate], c.buffers[1][2, :, intermediate:],
        c.buffers[2][2], c.buffers[3][2],
    )  # fmt: skip
    for low, differs in ((2**-9, False), (2**-7, True)):
        for matrix, values in zip(matrices, CORNERS[step], strict=True):
            corner = [[low if value == LOW else value for value in row] for row in values]
            matrix.zero_()[:, : len(corner), :2] = torch.tensor(corner)
        assert bool(c.run(strategy).any()) is differs


def test_fused_kernel_equals_the_loop() -> None:
    c = make_call()
    out = c.output.clone()
    batch = make_pair_batch(c, grouped=False)
    moe_lora_fused(c.x, tuple(c.buffers), batch, c.weights, c.info.scalings, out)  # type: ignore[arg-type]
    assert_close(out, expected_outputs(c)["out"])
