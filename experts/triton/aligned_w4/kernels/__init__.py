"""The grouped GEMM kernel of the aligned path for 4-bit weights."""
