"""The dequantized path: 4- or 8-bit weights are converted to bf16 before the grouped GEMMs."""
