"""The TMA-pipelined gemv path: a few tokens and fp8 weights, in two launches (sm_90)."""
