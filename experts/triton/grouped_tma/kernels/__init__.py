"""The persistent grouped GEMM in Gluon, with explicit layouts and warp roles, for sm_90."""

TARGETS = ("sm_90",)  # `mk compile` supports no other target
