"""The gemv path: matrix-vector products for a few tokens, in two launches without sorting pairs."""
