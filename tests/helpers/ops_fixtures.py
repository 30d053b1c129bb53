"""Fixtures and inputs for tests of operations."""

from types import ModuleType
from typing import Any

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_path_fixture(module: ModuleType, *others: ModuleType) -> Any:
    """Return the fixture `path`, which runs each test with Triton kernels and in plain torch.

    module, others: the modules whose `use_triton` selects between them.
    """

    @pytest.fixture(name="path", params=["kernel", "torch"])
    def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
        if request.param == "torch":
            for patched_module in (module, *others):
                monkeypatch.setattr(patched_module, "use_triton", lambda tensor: False)
        else:
            assert module.use_triton(torch.empty(0, device=DEVICE)), "no GPU and no interpreter"
        return request.param

    return path


def random_normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Draw normal values in float32 and convert them to `dtype` on DEVICE."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def odd_address(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that starts one element after the start of its allocation."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    memory[1:].view(tensor.shape).copy_(tensor)
    return memory[1:].view(tensor.shape)
