"""Detects calls that need gradients, and runs transformers' grouped_mm, which computes them."""

from collections.abc import Sequence

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from modular_kernel.integrations.transformers.modules import FIELDS_ATTRIBUTE, is_quantized

Call = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # x, expert ids and router weights


def needs_gradients(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether a call must compute gradients of x, router weights or expert weights.

    tensors: x, the router weights, and the module's tensors. They include tensors that an adapter
        computes, which are not in `parameters()`.
    """
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def supports_grouped_mm(module: torch.nn.Module) -> bool:
    """Return whether `grouped_mm` can run a module. It cannot read packed or quantized weights."""
    return not hasattr(module, FIELDS_ATTRIBUTE) and not is_quantized(module)


def run_grouped_mm(module: torch.nn.Module, call: Call) -> torch.Tensor:
    """Run a call of unquantized experts with transformers' grouped_mm."""
    output: torch.Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, *call)
    return output
