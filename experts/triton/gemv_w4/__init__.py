"""A few tokens and 4-bit weights, in two launches."""
