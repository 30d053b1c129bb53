"""Edges of the compatibility rules: the nearest accepted and the nearest refused problem."""

from modular_kernel.testing.edges.edges import edges_of

__all__ = ["edges_of"]
