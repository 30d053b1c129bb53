"""The aligned path for 4-bit weights and few rows of an expert."""
