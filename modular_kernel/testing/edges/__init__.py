"""Find the edges of the compatibility rules: similar problems, one accepted and one refused."""

from modular_kernel.testing.edges.edges import edges_of

__all__ = ["edges_of"]
