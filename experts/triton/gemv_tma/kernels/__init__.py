"""Matrix-vector kernels in Gluon, with explicit layouts, copies and warp roles, for sm_90."""

TARGETS = ("sm_90",)  # `mk compile` supports no other target
