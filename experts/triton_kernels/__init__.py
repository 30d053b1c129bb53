"""Experts part that uses the ragged matmul of triton_kernels (matmul_ogs)."""

from experts.triton_kernels.part import TritonKernelsExperts

__all__ = ["TritonKernelsExperts"]
