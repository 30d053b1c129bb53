"""The grouped GEMM over aligned pairs."""
