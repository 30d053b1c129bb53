"""Exchange component ('part') over the all-to-all of pplx-kernels."""
