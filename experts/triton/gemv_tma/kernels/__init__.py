"""Matrix-vector kernels of the gemv_tma path, in Gluon."""

TARGETS = ("sm_90",)  # the only target that `mk compile` compiles these kernels for
