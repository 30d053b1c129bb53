"""Triton kernels over symmetric memory, launched by `prepare_finalize`."""
