"""Kernels that tile 4-bit weights, and that multiply by them from registers."""

TARGETS = ("sm_90",)  # the only target that `mk compile` compiles these kernels for
