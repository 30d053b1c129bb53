"""The nearest problem that a rule passes, and the nearest that it refuses."""

from modular_kernel.testing.edges.edges import edges_of

__all__ = ["edges_of"]
