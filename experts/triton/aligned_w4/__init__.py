"""The aligned path for 4-bit weights and small M (few rows per expert)."""
