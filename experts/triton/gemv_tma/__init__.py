"""The gemv_tma path: a few tokens and fp8 weights, in two launches that load weights by TMA
(sm_90).
"""
