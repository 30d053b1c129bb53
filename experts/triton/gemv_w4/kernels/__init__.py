"""Matrix-vector kernels with 4-bit weights, unpacked in registers."""
