"""Make Triton's CPU interpreter behave as a GPU would: narrow dtypes, bounds, races."""
