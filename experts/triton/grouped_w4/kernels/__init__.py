"""Kernels of the grouped_w4 path, which reorder 4-bit weights and multiply by them."""

TARGETS = ("sm_90",)  # the targets for which `mk compile` compiles these kernels
