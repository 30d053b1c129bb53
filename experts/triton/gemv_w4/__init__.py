"""The gemv_w4 path: a few tokens and 4-bit weights, in two launches without sorting pairs."""
