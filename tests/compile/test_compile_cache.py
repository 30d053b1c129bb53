"""Compiled kernels are cached for each target and each version of Triton."""

import triton
import triton.language as tl
from triton.runtime import cache

from modular_kernel.testing.compile.report import record_compiles


@triton.jit
def twice_kernel(x_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(x_ptr + offsets, tl.load(x_ptr + offsets) * 2)


def test_compiled_kernels_are_cached_per_target() -> None:
    """The second launch for sm_80 uses the kernel that the first launch compiled."""
    import torch

    caches = []
    for target in ("sm_80", "sm_90", "sm_80"):
        with record_compiles(target) as records:
            twice_kernel[(1,)](torch.empty(64, device="meta"), BLOCK=64)
        (record,) = records
        assert record.target == target
        caches.append(twice_kernel.device_caches[f"compile-only {target}"][0])
    assert caches[0] is caches[2]
    kernels = [next(iter(cached_kernels.values())) for cached_kernels in caches[:2]]
    assert [kernel.metadata.target.arch for kernel in kernels] == [80, 90]
    assert kernels[0].hash != kernels[1].hash


def test_disk_cache_key_contains_the_triton_version() -> None:
    assert triton.__version__ in cache.triton_key()
