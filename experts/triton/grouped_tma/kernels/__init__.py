"""Kernels of the grouped_tma path: a persistent grouped GEMM in Gluon, and a LoRA shrink kernel."""

TARGETS = ("sm_90",)  # the targets for which `mk compile` compiles these kernels
