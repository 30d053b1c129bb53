"""A small layer, and fixtures that replace the pools of runner stages during a test."""

from typing import Any

import pytest
import torch

from modular_kernel import runner
from modular_kernel.runner import FusedOpPool, PermuteMethodPool
from modular_kernel.spec.problem import Problem

NO_EP = "MoEPrepareAndFinalizeNoEP"
PROBLEM = Problem(tokens=9, hidden=64, intermediate=32, experts=4, top_k=2, dtype=torch.float32)


def make_pools_fixture() -> Any:
    """Return the fixture `pools`, which replaces the pools of stages by empty ones for a test."""

    @pytest.fixture(name="pools")
    def pools(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(runner, "FUSED", FusedOpPool())
        monkeypatch.setattr(runner, "PERMUTES", PermuteMethodPool())

    return pools


def make_stages_fixture(stages_by_kind: dict[str, Any]) -> Any:
    """Return the fixture `stages`, which registers stages in empty pools for a test.

    stages_by_kind: maps "pre-permute", "post-permute" and "core" to tuples of three items: the
        decorator that registers a stage, the function of the stage, and an item that is not used.
    """

    @pytest.fixture(name="stages")
    def stages(pools: None) -> None:
        for kind in ("pre-permute", "post-permute", "core"):
            decorator, function, _ = stages_by_kind[kind]
            decorator(function)

    return stages
