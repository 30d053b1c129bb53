"""The kernel of the grouped GEMM over expert-sorted rows."""
