"""Compile every Triton kernel without a GPU, and check its resources."""
