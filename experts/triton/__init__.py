"""Experts parts written in Triton.

These are TritonExperts with its execution paths, BatchedTritonExperts, and a staged version of
TritonExperts.
"""
