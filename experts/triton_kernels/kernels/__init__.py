"""Kernels around triton_kernels' product."""
