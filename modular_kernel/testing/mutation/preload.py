"""What every rank needs, imported once: ranks are forked from a process that imported this."""

from importlib import import_module

from modular_kernel.catalog import load_catalog
from modular_kernel.replay.launch.runtime import HAS_INTERPRETER
from modular_kernel.testing.mutation import rank_tasks
from modular_kernel.testing.verify import over_ranks

__all__ = ["over_ranks", "rank_tasks"]

load_catalog()
if HAS_INTERPRETER:  # with triton, seconds that each rank's first launch would take
    import_module("modular_kernel.interpreter.patch")
