"""The aligned_w4 path: the aligned path with a kernel for 4-bit weights and few rows per expert."""
