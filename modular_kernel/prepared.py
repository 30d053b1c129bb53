"""Weights as kernels read them, made once when a layer is loaded: which tensors, and of what.

    weights = kernel.prepare_weights(weights)   # beside w1 and w2, which other calls still read

What was made remembers the memory and the version of what it was made of, so that a call after
either was written is refused.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from modular_kernel import modes
from modular_kernel.errors import DeviceError, DtypeError, LayoutError, ShapeError, WeightsError
from modular_kernel.tensors import ExpertWeights
from modular_kernel.types import dtype_name
from modular_kernel.workspace import BufferSpec

# Fields of ExpertWeights, and of which others they are made.
MADE_OF = {
    "w1_tiles": ("w1", "w1_scale"),
    "w1_tile_scales": ("w1", "w1_scale"),
    "w2_tiles": ("w2", "w2_scale"),
    "w2_tile_scales": ("w2", "w2_scale"),
}
_AGAIN = "what kernel.prepare_weights returns, made anew after weights were written"
_sources: Any = WeakIdKeyDictionary()  # of what was made, (pointer, version) of its sources


def allocated(weights: ExpertWeights, specs: Mapping[str, BufferSpec]) -> dict[str, torch.Tensor]:
    """Return a tensor of each spec beside the weights; it remembers what it is to be made of."""
    made = {}
    with modes.kept():
        for name, spec in specs.items():
            made[name] = torch.empty(spec.shape, dtype=spec.dtype, device=weights.w1.device)
            _sources[made[name]] = _places(weights, name)
    return made


def plain(weights: ExpertWeights) -> ExpertWeights:
    """Return the weights without anything that was prepared."""
    if any(getattr(weights, name) is not None for name in MADE_OF):
        nothing: dict[str, Any] = dict.fromkeys(MADE_OF)
        return replace(weights, **nothing)
    return weights


def check_prepared(
    weights: ExpertWeights, specs: Mapping[str, BufferSpec], device: torch.device
) -> None:
    """Check what was prepared, if anything was: all of `specs`, as they say, and of these weights.

    specs: of the kernel's experts. What they do not read must still be some kernel's, of these
    weights.
    WeightsError, ShapeError, DtypeError, DeviceError, LayoutError.
    """
    given = {name: t for name in MADE_OF if (t := getattr(weights, name)) is not None}
    for name, tensor in given.items():
        known = _sources.get(tensor)
        if known is None:
            got = "a tensor that no kernel prepared in this process"
            raise WeightsError(name, got=got, need=f"None, or {_AGAIN}")
        if known != _places(weights, name):
            raise WeightsError(name, got="made of other values of the weights", need=_AGAIN)
    for name, spec in specs.items() if given else ():
        tensor = given.get(name)
        if tensor is None:
            raise WeightsError(name, got="None", need=f"{spec.shape}, beside {', '.join(given)}")
        if tuple(tensor.shape) != spec.shape:
            raise ShapeError(name, got=tuple(tensor.shape), need=spec.shape)
        if tensor.dtype is not spec.dtype:
            raise DtypeError(name, got=dtype_name(tensor.dtype), need=dtype_name(spec.dtype))
        if tensor.device != device:
            raise DeviceError(name, got=tensor.device, need=f"{device}, where x is")
        if not tensor.is_contiguous():
            raise LayoutError(name, got=f"strides {tensor.stride()}", need="contiguous")


def versions(weights: ExpertWeights) -> tuple[tuple[torch.Tensor, int], ...]:
    """Return the tensors that something prepared is made of, each with its version now.

    Inference tensors have none.
    """
    names = {of for name, of in MADE_OF.items() if getattr(weights, name) is not None}
    tensors = _tensors(weights, sorted({name for of in names for name in of}))
    return tuple((t, t._version) for t in tensors if not t.is_inference())


def _places(weights: ExpertWeights, name: str) -> tuple[tuple[int, int], ...]:
    return tuple((t.data_ptr(), _version(t)) for t in _tensors(weights, MADE_OF[name]))


def _tensors(weights: ExpertWeights, names: Iterable[str]) -> list[torch.Tensor]:
    found = (getattr(weights, name) for name in names)
    return [tensor for tensor in found if tensor is not None]


def _version(tensor: torch.Tensor) -> int:
    """Return how often torch has written to it; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version
