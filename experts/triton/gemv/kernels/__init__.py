"""Matrix-vector kernels of the gemv path, for a few tokens and unquantized or 8-bit weights."""
