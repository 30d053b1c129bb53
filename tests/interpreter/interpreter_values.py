"""Seeded values and bit patterns for tests of the interpreter, and bitwise comparison."""

import torch

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed)).to(dtype)


def random_bits(n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return values of random bits, which include denormals, infinities and NaN."""
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (n * size,), generator=generator(seed), dtype=torch.uint8)
    return raw.view(dtype)


def equal_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether the bits are equal. All NaNs are considered equal."""
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    if not expected.dtype.is_floating_point:
        return torch.equal(actual, expected)
    nan = expected.float().isnan()
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.element_size()]
    equal = actual.view(bits) == expected.view(bits)
    return bool((torch.where(nan, actual.float().isnan(), equal)).all())
