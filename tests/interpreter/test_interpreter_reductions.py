"""Interpreted reductions, scans and rearrangements have the results of a GPU."""

import pytest
import torch
import triton
import triton.language as tl
from interpreter_values import BF16, E4M3, F16, F32, equal_bits, make_generator, randn


@triton.jit
def smaller_magnitude(a, b):
    return tl.where(tl.abs(a) < tl.abs(b), a, b)


@triton.jit
def reduce_kernel(x_ptr, y_ptr, OP: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    rows, cols = tl.arange(0, R), tl.arange(0, C)
    x = tl.load(x_ptr + rows[:, None] * C + cols[None, :])
    if OP == "sum":
        y = tl.sum(x, axis=1)
    elif OP == "max":
        y = tl.max(x, axis=1)
    elif OP == "min":
        y = tl.min(x, axis=1)
    elif OP == "argmax":
        y = tl.argmax(x, axis=1)
    elif OP == "custom":
        y = tl.reduce(x, 1, smaller_magnitude)
    else:
        y = tl.sum(tl.sum(x, axis=0, keep_dims=True)) + tl.zeros((R,), x.dtype)
    tl.store(y_ptr + rows, y.to(y_ptr.dtype.element_ty))


def reduce(x: torch.Tensor, op: str, dtype: torch.dtype) -> torch.Tensor:
    y = torch.empty(x.shape[0], dtype=dtype)
    reduce_kernel[(1,)](x, y, OP=op, R=x.shape[0], C=x.shape[1])
    return y


def test_sums_of_float32_and_integers_equal_torch():
    x = randn(8, 64, seed=21)
    torch.testing.assert_close(reduce(x, "sum", F32), x.sum(1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(reduce(x, "all", F32), x.sum().expand(8), rtol=1e-5, atol=1e-5)
    int8_values = torch.randint(-100, 100, (8, 64), generator=make_generator(4), dtype=torch.int8)
    assert torch.equal(
        reduce(int8_values, "sum", torch.int32), int8_values.sum(1, dtype=torch.int32)
    )
    large = torch.full((2, 4), 2**30, dtype=torch.int32)
    assert reduce(large, "all", torch.int32).tolist() == [0, 0]  # 2**33 wraps


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_sums_of_sixteen_bit_floats_round_as_a_tree(dtype):
    ones = torch.ones(2, 4096, dtype=dtype)
    assert reduce(ones, "sum", dtype).tolist() == [4096.0, 4096.0]
    x = randn(4, 64, seed=22, dtype=dtype)
    expected = x
    while expected.shape[1] > 1:
        half = expected.shape[1] // 2
        expected = expected[:, :half] + expected[:, half:]
    assert equal_bits(reduce(x, "sum", dtype), expected[:, 0].contiguous())


def test_extrema_drop_nan():
    x = randn(4, 16, seed=23, dtype=BF16)
    x[0, 3] = float("nan")
    x[1] = float("nan")
    nan = x[1, 0].float()
    expected_max = torch.stack([x[0].nan_to_num(-9).max().float(), nan, *x[2:].amax(1).float()])
    expected_min = torch.stack([x[0].nan_to_num(9).min().float(), nan, *x[2:].amin(1).float()])
    assert equal_bits(reduce(x, "max", F32), expected_max)
    assert equal_bits(reduce(x, "min", F32), expected_min)
    indices = reduce(x, "argmax", torch.int32).tolist()
    assert indices == [x[0].nan_to_num(-9).argmax(), 0, *x[2:].argmax(1)]


def test_custom_reduction_of_bf16_is_applied():
    x = randn(4, 16, seed=24, dtype=BF16)
    expected = x.gather(1, x.float().abs().argmin(1, keepdim=True))[:, 0]
    assert equal_bits(reduce(x, "custom", BF16), expected)


@triton.jit
def scan_kernel(x_ptr, y_ptr, REVERSE: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    tl.store(y_ptr + offs, tl.cumsum(x, axis=0, reverse=REVERSE).to(y_ptr.dtype.element_ty))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.int32], ids=str)
def test_cumsum_equals_torch(dtype, reverse):
    x = torch.randint(-9, 9, (128,), generator=make_generator(5)).to(dtype)
    y = torch.empty(128, dtype=F32 if dtype == BF16 else dtype)
    scan_kernel[(1,)](x, y, REVERSE=reverse, BLOCK=128)
    converted = x.to(y.dtype)
    expected = converted.flip(0).cumsum(0).flip(0) if reverse else converted.cumsum(0)
    assert equal_bits(y, expected.to(y.dtype))


@triton.jit
def histogram_kernel(x_ptr, y_ptr, n, BINS: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0)
    tl.store(y_ptr + tl.arange(0, BINS), tl.histogram(x, BINS, mask=offs < n))


def test_histogram_ignores_values_out_of_range():
    x = torch.randint(0, 8, (1024,), generator=make_generator(6)).to(torch.int32)
    x[300:310], x[310:320] = 8, -1
    y = torch.empty(8, dtype=torch.int32)
    histogram_kernel[(1,)](x, y, 1000, BINS=8, BLOCK=1024)
    inside = x[:1000].long()
    assert y.tolist() == torch.bincount(inside[(inside >= 0) & (inside < 8)], minlength=8).tolist()


@triton.jit
def rearrange_kernel(x_ptr, index_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.gather(tl.load(x_ptr + offs), tl.load(index_ptr + offs), axis=0)
    low, high = tl.split(tl.reshape(x, (BLOCK // 2, 2)))
    both = tl.join(high, low)  # swaps neighbors
    tl.store(y_ptr + offs, tl.reshape(tl.trans(tl.trans(both)), (BLOCK,)))


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_gather_split_join_and_transpose_rearrange(dtype):
    x = randn(64, seed=25).to(dtype)
    index = torch.randperm(64, generator=make_generator(7)).to(torch.int32)
    y = torch.empty_like(x)
    rearrange_kernel[(1,)](x, index, y, BLOCK=64)
    expected = x.view(torch.uint8).reshape(64, -1)[index.long()].reshape(32, 2, -1).flip(1)
    assert torch.equal(y.view(torch.uint8).reshape(64, -1), expected.reshape(64, -1))


@triton.jit
def bitcast_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    bits = tl.load(x_ptr + offs).to(tl.uint16, bitcast=True)
    tl.store(y_ptr + offs, (bits ^ 0x8000).to(tl.bfloat16, bitcast=True) * 1.0)


def test_bitcast_of_bf16_changes_the_sign():
    x = randn(64, seed=26, dtype=BF16)
    y = torch.empty_like(x)
    bitcast_kernel[(1,)](x, y, BLOCK=64)
    assert equal_bits(y, -x)
