"""Kernel of the aligned path."""
