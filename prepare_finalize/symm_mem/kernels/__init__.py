"""Triton kernels of the PrepareAndFinalize parts: leaves, launched by `prepare_finalize`."""
