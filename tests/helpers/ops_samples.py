"""What the tests of operations share: where they run, and a kernel and its torch twin in turn."""

from types import ModuleType
from typing import Any

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def kernel_and_twin(tried: ModuleType, *others: ModuleType) -> Any:
    """The fixture `path`: every test runs Triton kernels, and once more the torch twins beside
    them. tried, others: the modules that have them."""

    @pytest.fixture(name="path", params=["kernel", "twin"])
    def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
        if request.param == "twin":
            for module in (tried, *others):
                monkeypatch.setattr(module, "use_triton", lambda tensor: False)
        else:
            assert tried.use_triton(torch.empty(0, device=DEVICE)), "no GPU and no interpreter"
        return request.param

    return path


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal, float32 before it is `dtype`, on DEVICE."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def odd_address(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, one value further than an allocation begins."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    memory[1:].view(tensor.shape).copy_(tensor)
    return memory[1:].view(tensor.shape)
