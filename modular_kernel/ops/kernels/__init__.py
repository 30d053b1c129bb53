"""Triton kernels and device functions of the operations; they import no other modules of ours."""
