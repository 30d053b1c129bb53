"""Batched operations without a layer: the batched GEMM, and the alignment of rows to blocks.

Batched rows are a tensor (E, C, K), of which expert e uses the first counts[e] of C rows.
"""

from typing import Any

import pytest
import torch
from devices import CPU, DEVICE

from experts.compat.batched_gemm import batched_gemm
from modular_kernel.errors import (
    CapacityError,
    ConfigurationError,
    DtypeError,
    IncompatibleError,
    InputError,
    LayoutError,
    ShapeError,
    UnsupportedError,
)
from modular_kernel.ops.align import batched_moe_align_block_size
from modular_kernel.ops.quantize import dequantize_rows, quantize_values
from modular_kernel.quant.quantized_weights import dequantize, quantize_weights
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights

E, C, N, K = 3, 5, 48, 64
COUNTS = torch.tensor([5, 0, 3], dtype=torch.int32)
SCHEMES = (
    "none",
    "fp8_w8a8_tensor",
    "fp8_w8a8_channel",
    "fp8_w8a8_block:block=32x32",
    "int8_w8a8_channel",
    "int8_w8a16_group:group=32,zero_points=true",
    "int4_w4a16_group:group=32",
    "mxfp4_w4a16",
    "nvfp4_w4a16",
)


def make_operands(quant: str, device: torch.device = DEVICE) -> tuple[dict[str, Any], torch.Tensor]:
    """Return arguments with NaN in unused rows, and the float64 product of their values."""
    g = torch.Generator().manual_seed(1)
    problem = Problem(C, N, K, E, 1, dtype=torch.float32, quant=quant)
    w2 = torch.randn(E, N, K, generator=g).to(device)
    unquantized = ExpertWeights(torch.zeros(E, 2 * K, N, device=device), w2)
    weights = quantize_weights(unquantized, problem) if quant != "none" else unquantized
    a, counts = torch.randn(E, C, K, generator=g).to(device), COUNTS.to(device)
    arguments: dict[str, Any] = {
        "a_eCK": a, "b_eNK": weights.w2, "counts_e": counts, "quant": quant,
        "b_scale": weights.w2_scale, "b_zero_point": weights.w2_zero_point,
        "b_global_scale": weights.w2_global_scale,
    }  # fmt: skip
    scheme, b = problem.scheme, weights.w2
    if scheme.quantized:
        assert weights.w2_scale is not None
        b = dequantize(b, weights.w2_scale, weights.w2_zero_point, scheme)
    if weights.w2_global_scale is not None:
        b = b * weights.w2_global_scale[:, None]
    if scheme.quantizes_activations:
        q, scale = quantize_values(a.flatten(0, 1), scheme)
        a = dequantize_rows(q, scale, scheme).view(E, C, K)
        arguments["a_eCK"] = q.view(E, C, K)
        arguments["a_scale"] = scale if scale.dim() == 1 else scale.view(E, C, -1)
    expected = torch.einsum("eck,enk->ecn", a.double(), b.double())
    is_used = torch.arange(C, device=device) < counts[:, None]
    if not scheme.quantizes_activations:
        arguments["a_eCK"][~is_used] = torch.nan
    return arguments, expected.masked_fill(~is_used[..., None], torch.nan)


@pytest.mark.parametrize("quant", SCHEMES)
def test_batched_gemm_equals_float64(quant: str) -> None:
    arguments, expected = make_operands(quant)
    out = torch.full((E, C, N), torch.nan, device=DEVICE)
    actual = batched_gemm(**arguments, out=out)
    assert actual is out
    assert torch.equal(actual.isnan(), expected.isnan())
    error = (actual.double() - expected).nan_to_num().norm() / expected.nan_to_num().norm()
    assert float(error) < 1e-6


def test_counts_are_clamped_to_the_capacity() -> None:
    """A count above the capacity C would reach into the rows of the next expert."""
    arguments, _ = make_operands("none")
    counts = torch.full((E,), C, dtype=torch.int32, device=DEVICE)
    all_rows = arguments | {"a_eCK": arguments["a_eCK"].nan_to_num(), "counts_e": counts}
    clamped = batched_gemm(**all_rows | {"counts_e": counts + 99})
    assert torch.equal(clamped, batched_gemm(**all_rows))


def test_batched_gemm_allocates_output_and_reads_strided_weights() -> None:
    arguments, expected = make_operands("none")
    strided = arguments["b_eNK"].transpose(1, 2).contiguous().transpose(1, 2)
    actual = batched_gemm(**arguments | {"b_eNK": strided})
    assert torch.allclose(actual[0].double(), expected[0], atol=1e-4)
    arguments, _ = make_operands("fp8_w8a8_channel")
    assert batched_gemm(**arguments).dtype is torch.bfloat16
    assert batched_gemm(**arguments, dtype=torch.float16).dtype is torch.float16
    no_rows = {"a_eCK": arguments["a_eCK"][:, :0], "a_scale": arguments["a_scale"][:, :0]}
    assert batched_gemm(**arguments | no_rows).shape == (E, 0, N)


INVALID_ARGUMENTS: tuple[tuple[dict[str, Any], type[InputError], str], ...] = (
    ({"a_eCK": torch.zeros(C, K)}, ShapeError, "a and b"),
    ({"a_eCK": torch.zeros(E, C, 2 * K)[:, :, ::2]}, LayoutError, "a"),
    ({"b_eNK": torch.zeros(E, N, K + 1)}, ShapeError, "b"),
    ({"b_eNK": torch.zeros(E, N, K).half()}, DtypeError, "b"),
    ({"counts_e": COUNTS.long()}, DtypeError, "counts"),
    ({"counts_e": COUNTS[1:]}, ShapeError, "counts"),
    ({"b_scale": torch.ones(E)}, ConfigurationError, "b_scale"),
    ({"a_scale": torch.ones(1)}, ShapeError, "a_scale"),
    ({"out": torch.zeros(E, C, N).half()}, DtypeError, "out"),
    ({"quant": "int8_w8a16_channel"}, DtypeError, "b"),
    ({"out": [1]}, DtypeError, "out"),
    ({"a_scale": [1.0]}, DtypeError, "a_scale"),
    ({"b_scale": 1.0}, DtypeError, "b_scale"),
    ({"b_eNK": torch.zeros(E, N, K, requires_grad=True)}, UnsupportedError, "gradients"),
)


@pytest.mark.parametrize(("change", "error", "what"), INVALID_ARGUMENTS)
def test_errors_name_the_invalid_argument(
    change: dict[str, Any], error: type[InputError], what: str
) -> None:
    arguments, _ = make_operands("none", CPU)
    with pytest.raises(error) as caught:
        batched_gemm(**arguments | change)
    assert caught.value.what == what


def test_freed_and_overlapping_tensors_are_refused() -> None:
    a, b = torch.ones(E, K, K), torch.ones(E, K, K)
    for name, out in (("a", a), ("b", b)):
        with pytest.raises(
            ConfigurationError, match=f"out: got memory of {name}, need separate memory"
        ):
            batched_gemm(a, b, COUNTS, out=out)
    b.untyped_storage().resize_(0)
    with pytest.raises(LayoutError, match="b: got 0 bytes of memory"):
        batched_gemm(a, b, COUNTS)


def test_groups_that_fit_no_step_are_refused() -> None:
    arguments, _ = make_operands("fp8_w8a8_block:block=32x32", CPU)
    with pytest.raises(IncompatibleError, match="a group of 24"):
        batched_gemm(**arguments | {"quant": "fp8_w8a8_block:block=24x24"})
    with pytest.raises(ShapeError, match="a_scale"):
        batched_gemm(**arguments | {"a_scale": None})


@pytest.mark.parametrize("block", [2, 16])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_are_aligned_by_expert(block: int, dtype: torch.dtype) -> None:
    counts = torch.tensor([3, 0, 4, 9, 1], dtype=dtype)  # 9 exceeds the capacity of 4
    rows, experts, padded = batched_moe_align_block_size(counts, 4, block)
    expected_rows: list[int] = []
    expected_experts: list[int] = []
    for expert, count in enumerate([3, 0, 4, 4, 1]):
        expert_rows = [expert * 4 + c for c in range(count)]
        expert_rows += [20] * (-count % block)
        expected_rows += expert_rows
        expected_experts += [expert] * (len(expert_rows) // block)
    assert int(padded) == len(expected_rows)
    assert rows.tolist() == expected_rows + [20] * (len(rows) - len(expected_rows))
    unused_blocks = len(experts) - len(expected_experts)
    assert experts.tolist() == expected_experts + [-1] * unused_blocks


def test_alignment_refuses_invalid_counts() -> None:
    for counts, capacity, error in (
        (torch.zeros(2, 2).int(), 4, ShapeError),
        (torch.zeros(2), 4, DtypeError),
        (torch.zeros(2).int(), -1, ShapeError),
        (torch.zeros(2).int(), 2.5, ConfigurationError),
        (torch.zeros(2).int(), 1 << 30, CapacityError),
        ([1], 4, DtypeError),
    ):
        with pytest.raises(error):  # before the tensors of the result are allocated
            batched_moe_align_block_size(counts, capacity, 16)  # type: ignore[arg-type]
    rows, _, padded = batched_moe_align_block_size(COUNTS, 0, 16)
    assert (rows.numel(), int(padded)) == (0, 0)
