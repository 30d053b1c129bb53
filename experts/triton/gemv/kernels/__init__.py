"""Matrix-vector kernels of the gemv path, without tensor cores."""
