"""The grouped GEMM of 4-bit weights in registers."""
