"""Seeded values and bit patterns for tests of the interpreter, and bitwise comparison."""

import torch

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def make_generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(*shape, generator=make_generator(seed)).to(dtype)


def random_bits(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return values with random bits, which include denormals, infinities and NaN."""
    size = torch.empty((), dtype=dtype).element_size()
    random_bytes = torch.randint(
        0, 256, (count * size,), generator=make_generator(seed), dtype=torch.uint8
    )
    return random_bytes.view(dtype)


def equal_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether two tensors have equal bits. All NaNs are considered equal."""
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    if not expected.dtype.is_floating_point:
        return torch.equal(actual, expected)
    is_nan = expected.float().isnan()
    bits_dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[
        expected.element_size()
    ]
    is_equal = actual.view(bits_dtype) == expected.view(bits_dtype)
    return bool((torch.where(is_nan, actual.float().isnan(), is_equal)).all())
