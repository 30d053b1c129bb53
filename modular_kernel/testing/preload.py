"""What every rank needs, imported once: ranks are forked from a process that imported this."""

from modular_kernel.catalog import load_catalog
from modular_kernel.testing import prove_ranks
from modular_kernel.testing.mutation import rank_runs

__all__ = ["prove_ranks", "rank_runs"]

load_catalog()
