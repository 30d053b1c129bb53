"""Kernels of exchanges with fixed capacity update the digest of the call order behind a barrier."""

import re
from typing import Any

import pytest
from triton.runtime.jit import JITFunction

from modular_kernel.spec.problem import Parallel, Problem
from modular_kernel.testing.compile.report import record_compiles
from prepare_finalize.collectives.compile_cases import launch_all

_DIGEST_LOAD_AND_STORE = re.compile(
    r"ld\.global\.b64 \{ (%rd\d+) \}, (\[ %rd\d+ \+ 0 \]);"  # the digest of the order
    r"(?P<between>(?:(?!ld\.global).)*?)mad\.lo\.s64 \t%rd\d+, \1, 1000003"
    r"(?P<before_store>.*?)st\.global\.b64 (?:\2)",
    re.S,
)


@pytest.mark.parametrize("has_single_block", [False, True])
def test_barrier_separates_loads_and_stores_of_the_call_order(
    has_single_block: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All warps must load the old digest of the call order before any warp stores the new one."""
    ptx_sources: list[str] = []
    run = JITFunction.run

    def run_and_record(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiled = run(self, *args, **kwargs)
        if self.fn.__name__ == "fill_blocks_kernel":
            ptx_sources.append(compiled.asm["ptx"])
        return compiled

    monkeypatch.setattr(JITFunction, "run", run_and_record)
    problem = Problem(64, 256, 128, experts=16, top_k=2, parallel=Parallel(16))
    with record_compiles("sm_90"):
        launch_all(problem, has_single_block=has_single_block)
    assert len(ptx_sources) == 3
    for ptx in ptx_sources:
        match = _DIGEST_LOAD_AND_STORE.search(ptx)
        assert match is not None
        assert "bar.sync" in match["between"] + match["before_store"]
