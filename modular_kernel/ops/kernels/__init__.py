"""Triton kernels and device functions of the operations in `modular_kernel.ops`.

The modules here import no other module of the package. The modules in `modular_kernel.ops` launch
the kernels and have torch references for them.
"""
