"""Matrix-vector products with 4-bit weights, unpacked in registers."""
