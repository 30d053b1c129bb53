"""The dequantized path: convert 4- or 8-bit weights to bf16, then run the grouped GEMMs of
grouped_tma.
"""
