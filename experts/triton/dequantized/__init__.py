"""Weights of 4 or 8 bits become bf16 first, then the persistent grouped GEMMs multiply them."""
