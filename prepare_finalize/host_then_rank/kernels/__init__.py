"""Triton kernels of the two-level exchange."""
