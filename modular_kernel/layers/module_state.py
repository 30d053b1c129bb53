"""Helpers for modules: moving tensors without a cast, and checking what a state_dict loads."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from modular_kernel.errors import StateError
from modular_kernel.tensors import check_loaded


def move_without_cast(fn: Callable[..., torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Move a tensor as `fn` does, without a cast. fn: the function of `nn.Module._apply`."""
    probe = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
    return fn(tensor) if probe.dtype is tensor.dtype else tensor.to(probe.device)


def state_is_loaded(names: Collection[str], state_dict: Mapping[str, Any], prefix: str) -> bool:
    """Return whether a state_dict has all named tensors, and none of them is unloaded itself."""
    tensors = dict[str, torch.Tensor]()
    for name in names:
        tensor = state_dict.get(prefix + name)
        if tensor is not None and type(tensor) in (torch.Tensor, nn.Parameter):
            tensors[name] = tensor
    if len(tensors) < len(names):
        return False
    try:
        check_loaded(tensors)
    except StateError:
        return False
    return True
