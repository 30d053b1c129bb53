"""Installs GPU numerics in Triton's interpreter for all tests of this folder."""

import pytest

from modular_kernel.interpreter import patch as interpreter


@pytest.fixture(autouse=True, scope="session")
def _install_interpreter() -> None:
    assert interpreter.is_active(), "TRITON_INTERPRET=1 must be set before triton is imported"
    interpreter.install()
    interpreter.install()  # The second call must have no effect.
