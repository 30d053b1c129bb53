"""Kernel of the aligned path for 4-bit weights and small M."""
