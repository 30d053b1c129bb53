"""Exchange by pplx-kernels."""
