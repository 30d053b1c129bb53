"""Triton kernels of the symmetric-memory exchange, which access the memory of other ranks."""
