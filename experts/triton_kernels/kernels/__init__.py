"""Kernels that prepare the ragged matmul of triton_kernels."""
