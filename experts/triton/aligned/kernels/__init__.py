"""The grouped GEMM kernel of the aligned path."""
