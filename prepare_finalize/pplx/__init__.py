"""Part over the all-to-all of pplx-kernels."""
