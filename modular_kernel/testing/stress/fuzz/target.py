"""Define `Target`, a kind of call with random input: a Hypothesis strategy and a check.

Most modules of this folder define targets in a tuple TARGETS. `targets` collects them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from typing import Any, Generic, TypeVar

from hypothesis import strategies as st

from modular_kernel.testing.stress.fuzz.outcome import FuzzOutcome

Case = TypeVar("Case")


@dataclass(frozen=True)
class Target(Generic[Case]):
    """One kind of call with random input.

    Attributes:
        name: name of the target.
        frequency: relative frequency among the configurations.
        cases: strategy for the input.
        check: makes the call and classifies its outcome; must be deterministic for a given input.
        launches: whether the target may launch kernels. If so, it also runs with interpreted
            kernels.
        examples: inputs to run first, because they once failed.
    """

    name: str
    frequency: float
    cases: st.SearchStrategy[Case]
    check: Callable[[Case], FuzzOutcome]
    launches: bool = False
    examples: tuple[Case, ...] = ()


def biased_bool(percent_true: int) -> st.SearchStrategy[bool]:
    """Return a strategy for a bool that is True with a probability of `percent_true` in 100."""
    return st.integers(0, 99).map(lambda number: number >= 100 - percent_true)


seeds = st.integers(0, 2**32 - 1)


def import_object(path: str) -> Any:
    """Import the object at "module:name" or "module:class.name".

    This is used for modules that modular_kernel.testing must not import statically.
    """
    module, _, names = path.partition(":")
    return reduce(getattr, names.split("."), import_module(module))
