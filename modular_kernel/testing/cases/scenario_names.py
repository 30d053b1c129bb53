"""Names of the fault scenarios over ranks, and the parts that support them.

`verify.scenarios` defines what happens in them.
"""

from typing import Any

from modular_kernel.contracts import PrepareAndFinalize
from modular_kernel.spec.problem import Machine

SCENARIOS = ("misunderstood", "broken-off", "late", "stays-out", "finished-by-turns")
# Scenarios that managers detect even if ranks exchange no call numbers before the rows.
_SCENARIOS_WITHOUT_COUNTERS = ("misunderstood", "late", "stays-out")


def supported_scenarios(part: type[PrepareAndFinalize], machine: Machine) -> tuple[str, ...]:
    """Return the fault scenarios that a part supports: none on GPUs or with third-party libraries.

    For parts without scenarios, the fault matrix only checks that all ranks exit in time.
    """
    if machine.device != "cpu" or manager_class(part) is None:
        return ()
    if part.requires.packages not in ((), ("triton",)):
        return ()
    return tuple(
        name for name in SCENARIOS if counts_calls(part) or name in _SCENARIOS_WITHOUT_COUNTERS
    )


def counts_calls(part: type[PrepareAndFinalize]) -> bool:
    """Return whether ranks exchange layer and call numbers before anything else."""
    return hasattr(manager_class(part), "next_layer")


def shares_memory(part: type[PrepareAndFinalize]) -> bool:
    """Return whether ranks use shared memory; they then compare problems at construction."""
    return hasattr(manager_class(part), "heap")


def prefers_near_copies(part: type[PrepareAndFinalize]) -> bool:
    """Return whether (token, expert) pairs must go to the nearest copy of the expert.

    False without a manager, or if the class itself defines `prefer_local_copies`. A part that
    inherits the value is tested too.
    """
    return manager_class(part) is not None and "prefer_local_copies" not in vars(part)


def manager_class(part: type[PrepareAndFinalize]) -> Any:
    """Return the class that makes a manager from a process group; None if the part has none."""
    return getattr(part, "manager_class", None)
