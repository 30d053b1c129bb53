"""EPMoE's grouped GEMM over segments of rows, also with transposed and fp8 weights."""

import pytest
import torch
from ep_moe_steps import DEVICE, FP8, nan_tensor, random_normal

from experts.compat.ep_moe import grouped_gemm_triton
from modular_kernel.errors import ConfigurationError, DtypeError, InputError, ShapeError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_gemm_equals_float64(dtype: torch.dtype) -> None:
    """Segments have zero, one or many rows, and experts in any order. Other rows are unchanged."""
    a, b = random_normal(211, 72, dtype=dtype), random_normal(5, 40, 72, seed=1, dtype=dtype)
    c = nan_tensor(211, 40, dtype=dtype)
    seg_indptr = torch.tensor([3, 3, 4, 4, 150, 190], device=DEVICE)
    weight_indices = torch.tensor([1, 4, 0, 2, 2], device=DEVICE)
    assert grouped_gemm_triton(a, b, c, 5, True, seg_indptr, weight_indices) is c
    expected = nan_tensor(211, 40).double()
    for i, expert in enumerate(weight_indices.tolist()):
        rows = slice(int(seg_indptr[i]), int(seg_indptr[i + 1]))
        expected[rows] = a[rows].double() @ b[expert].double().T
    assert torch.equal(c.isnan(), expected.isnan())
    error = (c[3:190].double() - expected[3:190]).abs()
    rtol = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-20
    assert bool((error <= rtol * expected[3:190].abs() + 1e-5).all())


def test_grouped_gemm_supports_transposed_weights() -> None:
    a, b = random_normal(30, 72), random_normal(2, 72, 40, seed=1).transpose(1, 2)
    seg_indptr = torch.tensor([0, 17, 30], device=DEVICE)
    c = grouped_gemm_triton(a, b, nan_tensor(30, 40), 2, True, seg_indptr)
    assert torch.allclose(c[:17], a[:17] @ b[0].T, atol=1e-4)
    assert torch.allclose(c[17:], a[17:] @ b[1].T, atol=1e-4)


@pytest.mark.parametrize("block_shape", [None, [32, 64]])
def test_grouped_gemm_of_fp8_equals_float64(block_shape: list[int] | None) -> None:
    """Scales are per segment of a and expert of b, or per block, of which the last are partial."""
    a, b = random_normal(33, 96).to(FP8), random_normal(4, 40, 96, seed=1).to(FP8)
    seg_indptr = torch.tensor([0, 5, 5, 33], device=DEVICE)
    weight_indices = torch.tensor([3, 0, 1], device=DEVICE)
    generator = torch.Generator().manual_seed(5)
    shapes = ((3,), (4,)) if block_shape is None else ((33, 2), (4, 2, 2))
    scale_a, scale_b = ((torch.rand(s, generator=generator) + 0.5).to(DEVICE) for s in shapes)
    c = nan_tensor(33, 40, dtype=torch.bfloat16)
    grouped_gemm_triton(
        a, b, c, 3, True, seg_indptr, weight_indices, True, scale_a, scale_b, block_shape
    )
    if block_shape is None:
        a_scales = scale_a.repeat_interleave(seg_indptr.diff())[:, None]
        b_scales = scale_b[:, None, None]
    else:
        a_scales = scale_a.repeat_interleave(64, 1)[:, :96]
        b_scales = scale_b.repeat_interleave(32, 1)[:, :40].repeat_interleave(64, 2)[..., :96]
    a, b = a.double() * a_scales, b.double() * b_scales
    expected = torch.cat([a[:5] @ b[3].T, a[5:] @ b[1].T])
    sum_of_magnitudes = torch.cat([a[:5].abs() @ b[3].T.abs(), a[5:].abs() @ b[1].T.abs()])
    # Before the sum, tensor cores truncate fp8 products about 13 bits below the largest product.
    truncation = 2.0**-13 if DEVICE.type == "cuda" else 0.0
    bound = 2.0**-8 * expected.abs() + truncation * sum_of_magnitudes + 1e-4
    assert bool(((c.double() - expected).abs() <= bound).all())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weight_column_major": False}, ConfigurationError, "weight_column_major: got False"),
        ({"b": (40, 72)}, ShapeError, r"b: got \(40, 72\), need 3 dimensions"),
        ({"a": (30, 71)}, ShapeError, r"b: got \(2, 40, 72\)"),
        ({"c": (30, 41)}, ShapeError, r"c: got \(30, 41\), need \(30, 40\)"),
        ({"batch_size": 3}, ShapeError, r"seg_indptr: got \(3,\), need \(4,\)"),
        ({"weight_indices": [0, 1, 1]}, ShapeError, "weight_indices"),
        ({"block_shape": [32, 32]}, ConfigurationError, "need None unless use_fp8_w8a8=True"),
        ({"use_fp8_w8a8": True}, DtypeError, "a: got float32, need float8_e4m3fn"),
        ({"fp8": True}, ConfigurationError, "scale_a: got None"),
        ({"fp8": True, "scale_a": (30,)}, ShapeError, r"scale_a: got \(30,\), need \(2,\)"),
        ({"fp8": True, "scale_a": (2,), "scale_b": (3,)}, ShapeError, "scale_b"),
        ({"fp8": True, "block_shape": [32, 48]}, ConfigurationError, "a multiple of 32"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_with_the_reason(
    change: dict[str, object], error: type[InputError], message: str
) -> None:
    options: dict[str, object] = {"batch_size": 2, "weight_column_major": True}
    shapes = {"a": (30, 72), "b": (2, 40, 72), "c": (30, 40)}
    for name, value in change.items():
        if name in ("scale_a", "scale_b"):
            options[name] = torch.ones(value, device=DEVICE)
        elif name in shapes:
            shapes[name] = value
        elif name == "weight_indices":
            options[name] = torch.tensor(value, device=DEVICE)
        elif name != "fp8":
            options[name] = value
    options |= {name: random_normal(*shape) for name, shape in shapes.items()}
    if "fp8" in change:
        options |= {name: options[name].to(FP8) for name in ("a", "b")}
        options |= {"use_fp8_w8a8": True, "c": options["c"].to(torch.bfloat16)}
    seg_indptr = torch.tensor([0, 17, 30], device=DEVICE)
    with pytest.raises(error, match=message):
        grouped_gemm_triton(seg_indptr=seg_indptr, **options)
