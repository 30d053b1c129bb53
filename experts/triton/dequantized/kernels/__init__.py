"""Kernels that dequantize weights and that select the tiles of some experts."""
