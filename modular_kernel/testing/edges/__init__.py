"""Find the edges of compatibility rules: an accepted problem and a similar refused problem.

The rules (`modular_kernel.compatibility`) decide whether an exchange class and an experts class can
run a problem on a machine.
"""

from modular_kernel.testing.edges.edges import edges_of

__all__ = ["edges_of"]
