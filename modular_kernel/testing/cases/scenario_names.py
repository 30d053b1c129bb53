"""Names of scenes in which ranks do not mean the same call, and which parts play them.

What happens in them is in `verify.scenes`.
"""

from typing import Any

from modular_kernel.contracts import PrepareAndFinalize
from modular_kernel.spec.problem import Machine

SCENES = ("misunderstood", "broken-off", "late", "stays-out", "finished-by-turns")
# Where nothing is told before rows are sent, these are noticed by it.
_WITHOUT_COUNTS = ("misunderstood", "late", "stays-out")


def has_scenes(part: type[PrepareAndFinalize], machine: Machine) -> tuple[str, ...]:
    """Names of the scenes that are played with a part; of a library's none, nor on a GPU.

    There the matrix of faults is what tells whether ranks end in time.
    """
    if machine.device != "cpu" or manager_class(part) is None:
        return ()
    if part.requires.packages not in ((), ("triton",)):
        return ()
    return tuple(name for name in SCENES if counts_calls(part) or name in _WITHOUT_COUNTS)


def counts_calls(part: type[PrepareAndFinalize]) -> bool:
    """Whether ranks tell each other layer and call before they exchange anything."""
    return hasattr(manager_class(part), "next_layer")


def shares_memory(part: type[PrepareAndFinalize]) -> bool:
    """Whether ranks share memory as they make the part, and agree on it then."""
    return hasattr(manager_class(part), "heap")


def goes_near(part: type[PrepareAndFinalize]) -> bool:
    """Whether a pair goes to its expert's nearest copy: unless the part itself says that it must
    not. What the part inherits is not asked, because that is what is put to the proof.
    """
    return manager_class(part) is not None and "near_first" not in vars(part)


def manager_class(part: type[PrepareAndFinalize]) -> Any:
    """Return what makes a manager of a process group for a part; None where it has none."""
    return getattr(part, "manager_class", None)
