"""The persistent grouped GEMM of the grouped_tma path, in Gluon."""

TARGETS = ("sm_90",)  # the only target that `mk compile` compiles these kernels for
