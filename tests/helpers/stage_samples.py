"""A small layer, and pools of stages that forget what a test registers."""

from typing import Any

import pytest
import torch

from modular_kernel import runner
from modular_kernel.runner import FusedOpPool, PermuteMethodPool
from modular_kernel.spec.problem import Problem

NO_EP = "MoEPrepareAndFinalizeNoEP"
PROBLEM = Problem(tokens=9, hidden=64, intermediate=32, experts=4, top_k=2, dtype=torch.float32)


def empty_pools() -> Any:
    """The fixture `pools`: nothing is registered, and what a test registers is forgotten."""

    @pytest.fixture(name="pools")
    def pools(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(runner, "FUSED", FusedOpPool())
        monkeypatch.setattr(runner, "PERMUTES", PermuteMethodPool())

    return pools


def registered(register: dict[str, Any]) -> Any:
    """The fixture `stages`: the toy's stages under another name, by kind as `register` has them."""

    @pytest.fixture(name="stages")
    def stages(pools: None) -> None:
        for kind in ("pre-permute", "post-permute", "core"):
            decorator, source, _ = register[kind]
            decorator(source)

    return stages
