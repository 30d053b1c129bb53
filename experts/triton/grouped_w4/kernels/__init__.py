"""Kernels that tile 4-bit weights and multiply them from registers."""

TARGETS = ("sm_90",)  # `mk compile` supports no other target
