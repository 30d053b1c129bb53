"""Matrix-vector kernels of the gemv_w4 path, which unpack 4-bit weights in registers."""
