"""The grouped GEMM of few rows and 4-bit weights."""
