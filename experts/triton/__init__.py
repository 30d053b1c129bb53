"""Experts written in Triton: TritonExperts with its execution paths, and two more parts."""
