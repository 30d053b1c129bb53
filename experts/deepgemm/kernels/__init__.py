"""Kernel that sorts rows for DeepGEMM."""
