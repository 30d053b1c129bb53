"""The grouped_w4 path: grouped GEMMs that unpack 4-bit weights in registers (sm_90)."""
