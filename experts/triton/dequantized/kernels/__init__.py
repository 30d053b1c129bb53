"""Weights of 4 or 8 bits as bf16, and the tiles of some experts."""
