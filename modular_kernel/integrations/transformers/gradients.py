"""Calls that need gradients, which kernels do not compute."""

from collections.abc import Sequence

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

Call = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def gradients_are_needed(tensors: Sequence[torch.Tensor]) -> bool:
    """Tell whether a call may be differentiated: by x, router weights, or weights as they are read.

    Attributes are asked, not `parameters()`: an adapter may compute what an attribute gives.
    """
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def grouped_mm(module: torch.nn.Module, call: Call) -> torch.Tensor:
    """Run a call of unquantized experts by transformers' own grouped matmuls."""
    found: torch.Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, *call)
    return found
