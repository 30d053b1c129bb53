"""Kernels of the dequantized path: dequantize weights, and select the tiles of some experts."""
