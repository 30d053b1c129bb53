"""Junk in place of one argument of a public callable: a typed error, or a call that takes it."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from junk_recipes import JUNK_RECIPES
from public_calls import Call, leaves
from public_recipes import RECIPES

from modular_kernel.errors import ModularKernelError

ALL: dict[str, Callable[[], Call]] = {**JUNK_RECIPES, **RECIPES}
JUNK: dict[str, Callable[[], object]] = {
    "None": lambda: None,
    "True": lambda: True,
    "0": lambda: 0,
    "-1": lambda: -1,
    "2**70": lambda: 2**70,
    "1.5": lambda: 1.5,
    "nan": lambda: float("nan"),
    "1e300": lambda: 1e300,
    "text": lambda: "evil",
    "empty text": lambda: "",
    "bytes": lambda: b"evil",
    "list": lambda: [1],
    "empty list": list,
    "list of texts": lambda: ["a", "b"],
    "tuple": lambda: (1, 2),
    "tuple of Nones": lambda: (None, None),
    "dict": lambda: {"a": 1},
    "set": lambda: {1},
    "object": object,
    "class": lambda: int,
    "function": lambda: len,
    "dtype": lambda: torch.float64,
    "device": lambda: torch.device("cpu"),
    "module": lambda: torch,
    "nn.Module": torch.nn.Identity,
    "no dimensions": lambda: torch.tensor(1.0),
    "no values": lambda: torch.empty(0),
    "bools": lambda: torch.zeros(2, 2, dtype=torch.bool),
    "complex": lambda: torch.zeros(2, 2, dtype=torch.complex64),
    "doubles": lambda: torch.zeros(2, 3, 4, dtype=torch.float64),
    "integers": lambda: torch.zeros(2, 3, dtype=torch.int64),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.zeros(2, 2, device="meta"),
    "five dimensions": lambda: torch.zeros(1, 1, 1, 1, 1),
}


@cache
def paths_of(name: str) -> tuple[str, ...]:
    """Each argument, and each value inside the records and sequences among them."""
    call = ALL[name]()
    inside = [path for path, _ in leaves(call.arguments)]
    return tuple(
        path for path in dict.fromkeys([*call.arguments, *inside]) if path != call.receiver
    )


def spoiled(name: str, at: int, junk: str) -> None:
    """Make a call with junk in one place; raise what is no error of ours."""
    call, paths = ALL[name](), paths_of(name)
    try:
        with torch.no_grad():
            call(paths[at % len(paths)], JUNK[junk]())
    except ModularKernelError:
        pass


@pytest.mark.parametrize("name", JUNK_RECIPES)
def test_a_good_call_is_one(name: str) -> None:
    """Or one that would be, were there a file."""
    try:
        JUNK_RECIPES[name]()()
    except ModularKernelError as error:
        assert "nothing/here" in str(error) or name in (
            "AdapterPool.evict",
            "ExpertLoader.expert_weights",
        )


@settings(
    max_examples=400,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    database=None,
)
@given(
    name=st.sampled_from(sorted(ALL)),
    at=st.integers(0, 40),
    junk=st.sampled_from(sorted(JUNK)),
)
def test_junk_is_refused_in_words(name: str, at: int, junk: str) -> None:
    spoiled(name, at, junk)
