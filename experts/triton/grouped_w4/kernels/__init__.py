"""Kernels of the grouped_w4 path: one reorders 4-bit weights, the other multiplies by them."""

TARGETS = ("sm_90",)  # the targets for which `mk compile` compiles these kernels
