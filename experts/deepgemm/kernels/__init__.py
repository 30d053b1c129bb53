"""Kernels that sort rows for DeepGEMM."""
