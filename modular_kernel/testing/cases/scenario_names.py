"""Names of the fault scenarios across ranks, and which parts support them.

`verify.scenarios` implements the scenarios.
"""

import inspect
from typing import Any

from modular_kernel.contracts import PrepareAndFinalize
from modular_kernel.spec.problem import Machine

SCENARIOS = (
    "misunderstood",  # rank 1 makes calls that are inconsistent with those of the other ranks
    "broken-off",  # the experts of rank 1 raise an error
    "late",  # rank 1 is late: within the timeout, then beyond it
    "stays-out",  # rank 1 does not construct its part with the others
    "finished-by-turns",  # rank 1 finishes two calls in reverse order
)
# Scenarios that are detected even if ranks do not exchange call numbers.
_SCENARIOS_WITHOUT_COUNTERS = ("misunderstood", "late", "stays-out")


def supported_scenarios(part: type[PrepareAndFinalize], machine: Machine) -> tuple[str, ...]:
    """Return the names of the fault scenarios that a part supports.

    Returns () on GPUs and for parts that use third-party libraries. For these,
    `stress.fault_matrix` only checks that all ranks exit in time.
    """
    if machine.device != "cpu" or find_manager_class(part) is None:
        return ()
    if part.requires.packages not in ((), ("triton",)):
        return ()
    return tuple(
        name
        for name in SCENARIOS
        if exchanges_call_numbers(part) or name in _SCENARIOS_WITHOUT_COUNTERS
    )


def exchanges_call_numbers(part: type[PrepareAndFinalize]) -> bool:
    """Return whether the ranks exchange layer and call numbers at the start of each call."""
    return hasattr(find_manager_class(part), "next_layer")


def shares_memory(part: type[PrepareAndFinalize]) -> bool:
    """Return whether the ranks use shared memory, and thus compare problems at construction."""
    return hasattr(find_manager_class(part), "allocate_heap")


def prefers_near_copies(part: type[PrepareAndFinalize]) -> bool:
    """Return whether (token, expert) pairs must go to the nearest copy of the expert.

    This holds for parts that have a manager and inherit `prefer_local_copies`.
    """
    return find_manager_class(part) is not None and "prefer_local_copies" not in vars(part)


def can_skip_host_handshakes(part: type[PrepareAndFinalize]) -> bool:
    """Return whether the part's manager takes `checked`, as `TorchGroup` does."""
    manager_class = find_manager_class(part)
    return manager_class is not None and "checked" in inspect.signature(manager_class).parameters


def is_builtin(cls: type) -> bool:
    """Return whether a class belongs to `prepare_finalize`, and not to a third-party package.

    Only for these classes may checks rely on attributes, messages and threads.
    """
    return cls.__module__.partition(".")[0] == "prepare_finalize"


def find_manager_class(part: type[PrepareAndFinalize]) -> Any:
    """Return the class of the manager that owns a part's communicator, or None."""
    return getattr(part, "manager_class", None)
