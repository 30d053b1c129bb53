"""Weights of four bits in the order of products from registers, and these."""

TARGETS = ("sm_90",)  # the only ones that `mk compile` can compile them for
