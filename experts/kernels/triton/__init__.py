"""Kernel files: leaves that import triton or cutlass and device functions of modular_kernel.ops."""
