"""Errors keep their type, message and fields when they are sent to another process."""

import pickle

import pytest

from modular_kernel import errors

WORDS = {"got": (1, "x"), "need": "y"}
RAISED = [
    *(
        cls("w", **WORDS)
        for cls in vars(errors).values()
        if isinstance(cls, type) and issubclass(cls, errors.InputError)
    ),
    errors.CommunicationError("w", **WORDS, rank=1, phase="dispatch", step=3, peers=(0, 2)),
    errors.IncompatibleError("A x B", ["one", "two"]),
    errors.CorruptionError("overrun"),
]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_pickle_round_trip(error: errors.ModularKernelError) -> None:
    unpickled = pickle.loads(pickle.dumps(error))
    assert type(unpickled) is type(error)
    assert str(unpickled) == str(error)
    assert vars(unpickled) == vars(error)
