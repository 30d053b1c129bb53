"""The persistent grouped GEMM in Gluon: layouts, copies and warps are spelled out. For sm_90."""

TARGETS = ("sm_90",)  # the only ones that `mk compile` can compile them for
