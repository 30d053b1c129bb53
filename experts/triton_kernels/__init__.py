"""Experts over triton_kernels' ragged product (matmul_ogs)."""

from experts.triton_kernels.part import TritonKernelsExperts

__all__ = ["TritonKernelsExperts"]
