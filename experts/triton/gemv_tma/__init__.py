"""A few tokens and fp8 weights that come by TMA, in two launches (sm_90)."""
