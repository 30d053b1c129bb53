"""Triton kernels and device functions of the operations.

They import no other module of the package.
"""
