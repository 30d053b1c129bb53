"""Kernel of the grouped GEMM over segments of expert-sorted rows."""
