"""GPU behavior in Triton's CPU interpreter: narrow dtypes, bounds and race checks."""
