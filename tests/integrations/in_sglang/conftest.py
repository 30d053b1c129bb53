"""Tests that run with SGLang installed, by `make test-sglang`; otherwise none is collected."""

from importlib.util import find_spec

import pytest

HAS_SGLANG = find_spec("sglang") is not None
collect_ignore_glob = [] if HAS_SGLANG else ["test_*.py"]

if HAS_SGLANG:
    import sglang_runtime  # first: it makes SGLang importable on a CPU

    @pytest.fixture(scope="session")
    def runtime() -> None:
        sglang_runtime.start("modular_kernel")

    @pytest.fixture(autouse=True)
    def selected(runtime: None) -> None:
        sglang_runtime.select("modular_kernel")
