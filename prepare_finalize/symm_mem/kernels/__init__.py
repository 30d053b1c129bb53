"""Triton kernels that access the memory of other ranks."""
