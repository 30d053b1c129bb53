"""The interpreter computes the numbers that a GPU computes.

Most of these tests fail without `install()`. The others cover operations that Triton's own
interpreter computes correctly.
"""

import operator

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from interpreter_values import BF16, E4M3, E5M2, F16, F32, equal_bits, randn, random_bits

# --------------------------------------------------------------------------- conversions


@triton.jit
def cast_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs).to(y_ptr.dtype.element_ty))


@triton.jit
def truncate_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(x_ptr + offs).to(y_ptr.dtype.element_ty, fp_downcast_rounding="rtz")
    tl.store(y_ptr + offs, y)


def cast(x: torch.Tensor, dtype: torch.dtype, kernel: object = cast_kernel) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=dtype)
    block = min(x.numel(), 4096)
    kernel[(x.numel() // block,)](x, y, BLOCK=block)
    return y


def convert_with_saturation(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert with saturation, as a GPU does. torch converts large values to infinity or NaN."""
    largest = torch.finfo(dtype).max
    return x.float().clamp(-largest, largest).to(dtype)


def make_edge_values(dtype: torch.dtype) -> torch.Tensor:
    """Return 8192 float32 values, which include ties of `dtype`, overflow, infinity and NaN."""
    exact = random_bits(1024, dtype, seed=1).float()
    step = (exact.abs() * torch.finfo(dtype).eps / 2).nan_to_num(0, 0, 0)
    ties = torch.cat([exact + step, exact - step])
    near_ties = torch.cat([torch.nextafter(ties, ties + 1), torch.nextafter(ties, ties - 1)])
    random_floats = random_bits(1000, F32)
    largest = torch.finfo(dtype).max
    edges = [0.0, -0.0, 1e-45, float("inf"), float("nan"), largest, largest * 1.03, largest * 1.07]
    special = torch.tensor(edges + [-edge for edge in edges] + [3.3e38, -3.3e38] * 4)
    values = torch.cat([exact, ties, near_ties, random_floats, special, randn(24, seed=2)])
    return values[:8192].contiguous() if len(values) >= 8192 else values.repeat(2)[:8192]


@pytest.mark.parametrize("dtype", [BF16, F16, E4M3, E5M2], ids=str)
def test_float32_rounds_to_nearest_even(dtype):
    x = make_edge_values(dtype)
    expected = x.to(dtype) if dtype in (BF16, F16) else convert_with_saturation(x, dtype)
    assert equal_bits(cast(x, dtype), expected)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("source", [BF16, F16], ids=str)
def test_sixteen_bit_floats_round_to_fp8(source, dtype):
    x = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(source)
    assert equal_bits(cast(x, dtype), convert_with_saturation(x, dtype))


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("source", [E4M3, E5M2], ids=str)
def test_all_fp8_codes_widen_exactly(source, dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(source)
    assert equal_bits(cast(codes, dtype), codes.to(dtype))


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_all_bf16_codes_convert(dtype):
    codes = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(BF16)
    assert equal_bits(cast(codes, dtype), codes.to(dtype))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_conversion_can_round_toward_zero(dtype):
    x = torch.cat([randn(2048, seed=3), randn(2048, seed=4) * 1e-6])
    nearest = x.to(dtype)
    previous = (nearest.view(torch.int16) - 1).view(dtype)
    expected = torch.where(nearest.float().abs() > x.abs(), previous, nearest)
    assert equal_bits(cast(x, dtype, truncate_kernel), expected)


def test_integers_round_to_bf16():
    x = torch.cat([torch.arange(-1024, 1024), 2 ** torch.arange(31) + 1, torch.tensor([-7])])
    x = torch.nn.functional.pad(x, (0, 4096 - len(x))).to(torch.int32)
    assert equal_bits(cast(x, BF16), x.to(BF16))


@pytest.mark.parametrize("source", [F32, BF16], ids=str)
def test_floats_truncate_to_integers(source):
    x = (randn(1024, seed=5) * 60).to(source)
    for dtype in (torch.int8, torch.int32, torch.int64):
        expected = x.double().clamp(-128, 127).to(dtype) if dtype == torch.int8 else x.to(dtype)
        representable = x.float().abs() < 127
        assert torch.equal(cast(x, dtype)[representable], expected[representable])


def test_floats_beyond_an_integer_type_saturate():
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([1e10, -1e10, inf, nan, 2.0**31, -(2.0**31), -0.9, 3])
    high, low = 2**31 - 1, -(2**31)
    assert cast(x, torch.int32).tolist() == [high, low, high, 0, high, low, 0, 3]
    assert cast(x, torch.uint8).tolist() == [255, 0, 255, 0, 255, 0, 0, 3]
    beyond_int64 = torch.tensor([1e20, -1e20, 2.0**63, -(2.0**63)])
    assert cast(beyond_int64, torch.int64).tolist() == [2**63 - 1, -(2**63)] * 2


# ------------------------------------------------------------------- elementwise arithmetic


@triton.jit
def binary_kernel(x_ptr, y_ptr, z_ptr, OP: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + offs), tl.load(y_ptr + offs)
    if OP == "add":
        z = x + y
    elif OP == "sub":
        z = x - y
    elif OP == "mul":
        z = x * y
    elif OP == "min":
        z = tl.minimum(x, y)
    elif OP == "max":
        z = tl.maximum(x, y)
    elif OP == "where":
        z = tl.where(x < y, x, y * 2.5)
    elif OP == "neg_abs":
        z = tl.abs(x) - tl.abs(y)
    else:
        z = (x > y).to(z_ptr.dtype.element_ty)
    tl.store(z_ptr + offs, z)


ELEMENTWISE = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    # Converting to float64 makes NaN quiet. On a CPU, fmin can return a signaling NaN.
    "min": lambda x, y: torch.fmin(x.double(), y.double()).to(x.dtype),
    "max": lambda x, y: torch.fmax(x.double(), y.double()).to(x.dtype),
    "where": lambda x, y: torch.where(x < y, x, y * 2.5),
    "neg_abs": lambda x, y: x.abs() - y.abs(),
    "greater": lambda x, y: (x > y).to(x.dtype),
}


@pytest.mark.parametrize("op", ELEMENTWISE)
def test_bf16_operations_round_once(op):
    x, y = random_bits(2048, BF16, seed=6), randn(2048, seed=7, dtype=BF16)
    x[1024:] = randn(1024, seed=8, dtype=BF16)
    z = torch.empty_like(x)
    binary_kernel[(1,)](x, y, z, OP=op, BLOCK=2048)
    assert equal_bits(z, ELEMENTWISE[op](x, y))


@triton.jit
def chain_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    tl.store(y_ptr + offs, ((x * 3.0 + 1.0) * x - 0.1).to(y_ptr.dtype.element_ty))


def test_each_operation_of_a_bf16_expression_rounds():
    x = randn(1024, seed=9, dtype=BF16)
    y = torch.empty_like(x)
    chain_kernel[(1,)](x, y, BLOCK=1024)
    assert equal_bits(y, (x * 3.0 + 1.0) * x - 0.1)


@triton.jit
def scale_kernel(x_ptr, y_ptr, scale, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs) * scale)


def test_a_float_argument_is_float32_and_promotes():
    x = randn(256, seed=10, dtype=BF16)
    y = torch.empty(256)
    scale_kernel[(1,)](x, y, 1.0 / 3.0, BLOCK=256)
    assert equal_bits(y, x.float() * torch.tensor(1.0 / 3.0))


@triton.jit
def double_kernel(y_ptr, n, flag):
    if flag:
        tl.store(y_ptr, n + n)


def test_integer_and_bool_arguments_have_their_compiled_width():
    y = torch.zeros(1, dtype=torch.int64)
    double_kernel[(1,)](y, 3_000_000_000, False)
    assert y.item() == 0
    double_kernel[(1,)](y, 3_000_000_000, True)
    assert y.item() == 6_000_000_000


@triton.jit
def fma_kernel(x_ptr, y_ptr, z_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    out = tl.fma(tl.load(x_ptr + offs), tl.load(y_ptr + offs), tl.load(z_ptr + offs))
    tl.store(out_ptr + offs, out)


def test_fma_rounds_once():
    x, y = (randn(1024, seed=s) for s in (11, 12))
    z = -(x * y) + torch.tensor([0.0, 2.0**-70, -(2.0**-40), 1e-30]).repeat(256)
    out = torch.empty_like(x)
    fma_kernel[(1,)](x, y, z, out, BLOCK=1024)
    exact_x, exact_y, exact_z = (v.numpy().astype(np.longdouble) for v in (x, y, z))
    expected = torch.from_numpy((exact_x * exact_y + exact_z).astype(np.float32))
    assert equal_bits(out, expected)
    # The sum is above a tie of float32, by less than float64 can represent.
    x, y, z = (torch.tensor([v]) for v in (1 + 2.0**-12, 1 + 2.0**-12, 2.0**-60))
    out = torch.empty(1)
    fma_kernel[(1,)](x, y, z, out, BLOCK=1)
    assert out.item() == 1 + 2.0**-11 + 2.0**-23


@triton.jit
def math_kernel(x_ptr, y_ptr, OP: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    if OP == "erf":
        y = tl.erf(x)
    elif OP == "rsqrt":
        y = tl.rsqrt(tl.abs(x))
    elif OP == "exp":
        y = tl.exp(x)
    elif OP == "sigmoid":
        y = tl.sigmoid(x)
    else:
        y = tl.clamp(x, -1.0, 1.0)
    tl.store(y_ptr + offs, y)


MATH = {
    "erf": torch.erf,
    "rsqrt": lambda x: x.abs().rsqrt(),
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "clamp": lambda x: x.clamp(-1, 1),
}


@pytest.mark.parametrize("op", MATH)
def test_float32_functions_equal_those_of_torch(op):
    x = randn(1024, seed=13)
    y = torch.empty_like(x)
    math_kernel[(1,)](x, y, OP=op, BLOCK=1024)
    torch.testing.assert_close(y, MATH[op](x), rtol=3e-7, atol=1e-38)


def test_minimum_maximum_and_clamp_drop_nan():
    x, y = torch.tensor([float("nan"), 1.0]), torch.tensor([2.0, float("nan")])
    z = torch.empty(2)
    for op in ("min", "max"):
        binary_kernel[(1,)](x, y, z, OP=op, BLOCK=2)
        assert z.tolist() == [2.0, 1.0]
    math_kernel[(1,)](x, z, OP="clamp", BLOCK=2)
    assert z.tolist() == [-1.0, 1.0]


@triton.jit
def integer_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    shift = tl.load(x_ptr + BLOCK + offs).to(tl.uint32)
    shifted = x >> shift
    tl.store(y_ptr + offs, shifted)
    # `>>` must not change the type of `shift`, which is unsigned.
    tl.store(y_ptr + BLOCK + offs, (~shift >> 1).to(tl.int32))
    flag = x > 0
    tl.store(y_ptr + 2 * BLOCK + offs, (flag + flag).to(tl.int32) * 10 + (~flag).to(tl.int32))


def test_shifts_inversions_and_one_bit_sums_wrap():
    values, shifts = torch.tensor([-9, 40, -1, 7]), torch.tensor([1, 3, 31, 0])
    x = torch.cat([values, shifts]).to(torch.int32)
    y = torch.empty(12, dtype=torch.int32)
    integer_kernel[(1,)](x, y, BLOCK=4)
    assert y[:4].tolist() == (values >> shifts).tolist()
    assert y[4:8].tolist() == [(2**32 - 1 - s) >> 1 for s in shifts.tolist()]
    # In one bit, 1 + 1 is 0.
    assert y[8:].tolist() == [int(v <= 0) for v in values.tolist()]
