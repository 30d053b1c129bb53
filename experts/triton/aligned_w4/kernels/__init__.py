"""The grouped GEMM of small M and 4-bit weights."""
