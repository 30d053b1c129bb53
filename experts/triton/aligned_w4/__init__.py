"""The aligned path for 4-bit weights and few rows per expert."""
