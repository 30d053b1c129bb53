"""Kernel that prepares the ragged matmul of triton_kernels."""
