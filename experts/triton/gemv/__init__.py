"""A few tokens without an alignment, in two launches of matrix-vector products."""
