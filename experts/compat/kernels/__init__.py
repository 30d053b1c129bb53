"""Kernels that permute and activate rows in expert order."""
