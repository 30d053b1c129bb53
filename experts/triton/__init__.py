"""Experts written in Triton: they compute the two expert GEMMs of a fused MoE layer.

`TritonExperts` (contiguous.py) takes contiguous tokens (T, H), and runs each call on one of several
execution paths, the subfolders of this package. `BatchedTritonExperts` (batched.py) takes the
batched format (num_experts, capacity, H). aligned/staged.py registers the same computation as
separate stages.
"""
