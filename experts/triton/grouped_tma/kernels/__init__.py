"""The persistent grouped GEMM of the grouped_tma path, in Gluon."""

TARGETS = ("sm_90",)  # the targets for which `mk compile` compiles these kernels
