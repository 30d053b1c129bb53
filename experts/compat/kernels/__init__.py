"""Kernels that move or activate rows in expert order."""
