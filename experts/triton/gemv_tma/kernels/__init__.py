"""Matrix-vector kernels of the gemv_tma path, in Gluon, for fp8 weights on sm_90."""

TARGETS = ("sm_90",)  # the targets for which `mk compile` compiles these kernels
