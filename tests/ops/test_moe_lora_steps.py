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
    want, batch = expected_outputs(c), make_pair_batch(c, grouped=grouped)
    a13, b13, a2, b2 = c.buffers
    u = moe_lora_a(c.x, a13, batch)
    h = moe_lora_gate_up_b(want["u"].to(dtype), b13, batch)
    v = moe_lora_a(want["h"].to(dtype), a2, batch)
    for name, got in (("u", u), ("h", h), ("v", v)):
        assert got.shape == want[name].shape
        assert not got[want[name] == 0].any()
        assert_close(got, want[name])
    out = c.output.clone()
    moe_lora_down_combine(want["v"].to(dtype), b2, batch, c.weights, c.info.scalings, out)
    assert_close(out, want["out"])


def test_pairs_of_one_adapter_and_expert_are_adjacent() -> None:
    c = make_call()
    batch = make_pair_batch(c, grouped=True)
    assert batch.order_P is not None
    assert sorted(batch.order_P.tolist()) == list(range(63))
    keys = batch.compute_keys().flatten()[batch.order_P].tolist()
    assert keys == sorted(keys)
    assert 1 < len(set(keys)) < 63
    assert batch.compute_keys().max() == 4 * 5  # nobody's, which come last


@pytest.mark.parametrize("step", ["a", "gate_up_b"])
def test_programs_process_pairs_in_the_given_order(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """With an order of one pair only, no other row is written."""
    c = make_call()
    batch = replace(make_pair_batch(c, grouped=True), order_P=torch.full((63,), 7, device=DEVICE))
    empty = torch.Tensor.new_empty

    def poisoned(like: torch.Tensor, *shape: int, **how: Any) -> torch.Tensor:
        made = empty(like, *shape, **how)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    with prefer_torch_reference(enabled=False):
        if step == "a":
            got = moe_lora_a(c.x, c.buffers[0], batch)
        else:
            got = moe_lora_gate_up_b(expected_outputs(c)["u"].float(), c.buffers[1], batch)
    assert (~got.isnan().flatten(0, 1).any(1)).nonzero().tolist() == [[7]]


@WITH_KERNELS_AND_TORCH
@pytest.mark.parametrize("strategy", ["staged", "fused"])
def test_masked_elements_are_not_summed(strategy: str) -> None:
    """Each u is near the largest float32, so that their sum overflows, and B is near the
    smallest."""
    c = make_call()
    c.info.weight_indices[:] = 2  # of rank 20
    c.x[:] = torch.eye(1, c.x.shape[1], device=DEVICE)
    c.buffers[0][2] = 3e37
    c.buffers[1][2] = c.buffers[1][2].sign() * 1e-37
    want = expected_outputs(c)
    assert want["u"].sum(2).max() > torch.finfo(torch.float32).max
    assert bool(want["out"].isfinite().all())
    assert_close(c.run(strategy), want["out"])


@WITH_KERNELS_AND_TORCH
@pytest.mark.parametrize("strategy", ["staged", "fused"])
def test_products_of_narrow_values_are_not_rounded(strategy: str) -> None:
    """(1 + 2^-7)^2 - (1 + 2^-6) is 2^-14, which rounding products to bf16 would lose."""
    c = make_call(dtype=torch.bfloat16)
    c.info.weight_indices[:] = 2  # of rank 20
    c.output.zero_()
    c.x.zero_()[:, :2] = torch.tensor([1 + 2**-7, 1])
    c.buffers[0][2] = 0
    c.buffers[0][2, ..., :2] = torch.tensor([1 + 2**-7, -1 - 2**-6])
    c.buffers[1][2] *= 2**14
    assert_close(c.run(strategy), expected_outputs(c)["out"])


# The first rows and columns of A13, gate and up of B13, A2 and B2; the others are 0.
LOW = "low"
SQUARES: dict[str, tuple[list[list[Any]], ...]] = {
    "u": ([[1, LOW], [1, 0]], [[64, -64]], [[1, 0]], [[1, 0]], [[1, 0]]),
    "h": ([[1, 0], [1, 0]], [[64, 0], [64, 0]], [[1, LOW], [1, 0]], [[1, -1]], [[1, 0]]),
    "v": ([[1, 0], [1, 0]], [[64, 0], [64, 0]], [[1, 0], [1, 0]], [[1, LOW], [1, 0]], [[1, -1]]),
}


@WITH_KERNELS_AND_TORCH
@pytest.mark.parametrize("strategy", ["staged", "fused"])
@pytest.mark.parametrize("step", SQUARES)
def test_u_h_and_v_are_rounded_to_the_dtype_of_x(step: str, strategy: str) -> None:
    """The difference of two values of a step: 1 + 2^-9 and 1 are equal in bf16, 1 + 2^-7 and 1 are
    not.
    """
    c = make_call(dtype=torch.bfloat16)
    c.info.weight_indices[:] = 2  # of rank 20
    c.output.zero_()
    c.x.zero_()[:, :2] = 1
    half = c.buffers[1].shape[2] // 2
    places = (
        c.buffers[0][2], c.buffers[1][2, :, :half], c.buffers[1][2, :, half:],
        c.buffers[2][2], c.buffers[3][2],
    )  # fmt: skip
    for low, differs in ((2**-9, False), (2**-7, True)):
        for place, values in zip(places, SQUARES[step], strict=True):
            square = [[low if value == LOW else value for value in row] for row in values]
            place.zero_()[:, : len(square), :2] = torch.tensor(square)
        assert bool(c.run(strategy).any()) is differs


def test_the_fused_kernel() -> None:
    c = make_call()
    out = c.output.clone()
    batch = make_pair_batch(c, grouped=False)
    moe_lora_fused(c.x, tuple(c.buffers), batch, c.weights, c.info.scalings, out)  # type: ignore[arg-type]
    assert_close(out, expected_outputs(c)["out"])
