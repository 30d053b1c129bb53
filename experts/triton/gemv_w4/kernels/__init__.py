"""Matrix-vector kernels for 4-bit weights, which are unpacked in registers."""
