"""Experts parts written in Triton: TritonExperts and its execution paths, BatchedTritonExperts, and
a staged version of TritonExperts.
"""
