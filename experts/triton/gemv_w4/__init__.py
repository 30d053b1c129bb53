"""The gemv path for 4-bit weights: a few tokens, in two launches."""
