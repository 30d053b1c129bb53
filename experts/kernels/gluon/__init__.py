"""Gluon kernels: layouts, copies and warps are spelled out. For sm_90."""
