"""Device functions that several paths share, and the kernel of the batched format."""
