"""Device functions shared by several paths, and the GEMM kernel of the batched format."""
