"""Kernels that dequantize weights and select the tiles of some experts."""
