"""Launch kernels: eagerly, recorded, replayed, with programmatic dependent launch."""
