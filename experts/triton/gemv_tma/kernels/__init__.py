"""Matrix-vector kernels of the gemv_tma path, in Gluon: layouts, copies and warp roles are
explicit.
"""

TARGETS = ("sm_90",)  # the only target that `mk compile` compiles these kernels for
