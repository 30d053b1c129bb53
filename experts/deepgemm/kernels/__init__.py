"""Kernels around DeepGEMM's products."""
