"""Triton kernels and device functions of the operations in `modular_kernel.ops`.

They import no other module of the package. The host function of the same name in
`modular_kernel.ops` launches each kernel, and has a torch reference for it.
"""
