"""GPU behavior in Triton's CPU interpreter: numerics, narrow dtypes, bounds and race checks."""
