"""Find the edges of compatibility rules: pairs of an accepted problem and a similar refused one."""

from modular_kernel.testing.edges.edges import edges_of

__all__ = ["edges_of"]
