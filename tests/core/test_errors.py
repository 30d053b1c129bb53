"""Errors keep their type, message and fields when they are sent to another process."""

import pickle

import pytest

from modular_kernel import errors

GOT_AND_NEED = {"got": (1, "x"), "need": "y"}
ERRORS = [
    *(
        error_type("w", **GOT_AND_NEED)
        for error_type in vars(errors).values()
        if isinstance(error_type, type) and issubclass(error_type, errors.InputError)
    ),
    errors.CommunicationError("w", **GOT_AND_NEED, rank=1, phase="dispatch", step=3, peers=(0, 2)),
    errors.IncompatibleError("A x B", ["one", "two"]),
    errors.CorruptionError("overrun"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_pickle_round_trip(error: errors.ModularKernelError) -> None:
    unpickled = pickle.loads(pickle.dumps(error))
    assert type(unpickled) is type(error)
    assert str(unpickled) == str(error)
    assert vars(unpickled) == vars(error)
