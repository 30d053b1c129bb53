"""Helpers for nn.Module subclasses: move tensors without casting them, and check a state_dict."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from modular_kernel.errors import StateError
from modular_kernel.tensors import check_loaded


def move_without_cast(fn: Callable[..., torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Move a tensor to the device that `fn` moves to, but do not cast it.

    fn: the function that `nn.Module._apply` gets.
    """
    probe = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
    return fn(tensor) if probe.dtype is tensor.dtype else tensor.to(probe.device)


def is_state_loaded(names: Collection[str], state_dict: Mapping[str, Any], prefix: str) -> bool:
    """Return whether a state_dict has all named tensors, and all of them were loaded when saved.

    A tensor that was saved before it was loaded holds values such as NaN (`check_loaded`).

    prefix: prefix of the module's names in the state_dict.
    """
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
