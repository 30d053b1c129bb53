"""Tests that need SGLang. `make test-sglang` runs them, and they are not collected if SGLang is not
installed.
"""

from importlib.util import find_spec

import pytest

HAS_SGLANG = find_spec("sglang") is not None
collect_ignore_glob = [] if HAS_SGLANG else ["test_*.py"]

if HAS_SGLANG:
    import sglang_runtime  # this import must be first, because it makes SGLang importable on a CPU

    @pytest.fixture(scope="session")
    def runtime() -> None:
        sglang_runtime.start("modular_kernel")

    @pytest.fixture(autouse=True)
    def select_backend(runtime: None) -> None:
        sglang_runtime.select("modular_kernel")
