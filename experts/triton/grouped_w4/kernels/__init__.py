"""Kernels that tile 4-bit weights, and GEMM kernels that unpack them in registers."""

TARGETS = ("sm_90",)  # the targets for which `mk compile` compiles these kernels
