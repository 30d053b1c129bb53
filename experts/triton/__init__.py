"""Experts written in Triton, which compute the two expert GEMMs of a fused MoE layer.

`TritonExperts` (standard.py) takes tokens in the standard format, (T, H). It has several
implementations, called paths, each in a subfolder, and selects one for each call.
`BatchedTritonExperts` (batched.py) takes the batched format, (num_experts, capacity, H).
"""
