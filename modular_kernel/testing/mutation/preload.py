"""Import the modules that all ranks need.

`ranks.pool` passes the name of this module to multiprocessing's fork server, so that ranks are
forked from a process that has imported these modules. Each new rank of mutation testing then starts
in milliseconds instead of seconds.
"""

from importlib import import_module

from modular_kernel.catalog import load_catalog
from modular_kernel.replay.launch.runtime import HAS_INTERPRETER
from modular_kernel.testing.mutation import rank_tasks
from modular_kernel.testing.verify import over_ranks

__all__ = ["over_ranks", "rank_tasks"]

load_catalog()
if HAS_INTERPRETER:  # otherwise, the first launch on each rank takes seconds to import this
    import_module("modular_kernel.interpreter.patch")
