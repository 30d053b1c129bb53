"""Triton kernels and device functions of the operations; nothing else of ours is imported here."""
