"""Dispatch and combine with pplx-kernels."""
