"""4-bit weights go from their words to the tensor cores through registers alone."""
