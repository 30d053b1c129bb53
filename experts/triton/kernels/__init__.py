"""Device functions that several paths share, and the GEMM kernel of the batched format."""
