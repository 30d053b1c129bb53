"""The persistent grouped GEMM of the grouped_tma path, in Gluon: layouts and warp roles are
explicit.
"""

TARGETS = ("sm_90",)  # the only target that `mk compile` compiles these kernels for
