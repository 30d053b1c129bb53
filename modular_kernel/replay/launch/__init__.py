"""Kernel launches: eager, recorded, replayed, and with programmatic dependent launch."""
