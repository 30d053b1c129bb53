"""Detection of calls that need gradients, and transformers' grouped_mm as a fallback."""

from collections.abc import Sequence

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from modular_kernel.integrations.transformers.modules import FIELDS, is_quantized

Call = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def needs_gradients(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether a call must compute gradients of x, router weights or expert weights.

    tensors: the module's tensors as the call reads them. They may not be in `parameters()`, because
    an adapter can compute an attribute.
    """
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def runs_grouped_mm(module: torch.nn.Module) -> bool:
    """Return whether `grouped_mm` can run a module, that is, whether its weights are not packed."""
    return not hasattr(module, FIELDS) and not is_quantized(module)


def grouped_mm(module: torch.nn.Module, call: Call) -> torch.Tensor:
    """Run a call of unquantized experts with transformers' grouped matmul."""
    output: torch.Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, *call)
    return output
