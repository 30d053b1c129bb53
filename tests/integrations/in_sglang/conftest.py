"""Fixtures of tests with SGLang, which `make test-sglang` runs.

If SGLang is not installed, pytest does not collect the tests of this folder.
"""

from importlib.util import find_spec

import pytest

HAS_SGLANG = find_spec("sglang") is not None
collect_ignore_glob = [] if HAS_SGLANG else ["test_*.py"]

if HAS_SGLANG:
    import sglang_runtime  # must come before imports of SGLang, because it enables them on a CPU

    @pytest.fixture(scope="session")
    def runtime() -> None:
        sglang_runtime.start("modular_kernel")

    @pytest.fixture(autouse=True)
    def select_backend(runtime: None) -> None:
        sglang_runtime.select("modular_kernel")
