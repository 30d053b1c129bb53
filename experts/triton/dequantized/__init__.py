"""The dequantized path, which converts 4- or 8-bit weights to bf16 before the grouped GEMMs."""
