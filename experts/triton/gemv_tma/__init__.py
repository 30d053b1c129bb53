"""The gemv_tma path: a few tokens and fp8 weights, in two launches that use TMA (sm_90)."""
