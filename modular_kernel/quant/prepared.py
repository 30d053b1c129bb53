"""Weights as kernels read them, made once when a layer is loaded: which tensors, and of what.

    weights = kernel.prepare_weights(weights)   # beside w1 and w2, which other calls still read

What was made remembers for whom, and the memory and the version of what it was made of and of
itself, so that a call after any of these was written is refused. A copy of it knows nothing, and is
refused too.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from modular_kernel.errors import (
    ConfigurationError,
    DeviceError,
    DtypeError,
    LayoutError,
    ShapeError,
    WeightsError,
)
from modular_kernel.replay import modes
from modular_kernel.replay.recording import storage_of
from modular_kernel.spec.problem import Problem, dtype_name
from modular_kernel.tensors import ExpertWeights
from modular_kernel.workspace import BufferSpec

# Fields of ExpertWeights, and of which others they are made.
MADE_OF = {
    "w1_tiles": ("w1", "w1_scale"),
    "w1_tile_scales": ("w1", "w1_scale", "w1_zero_point"),
    "w2_tiles": ("w2", "w2_scale"),
    "w2_tile_scales": ("w2", "w2_scale", "w2_zero_point"),
}
_AGAIN = "what kernel.prepare_weights returns, made anew after weights were written or copied"


class _Source(NamedTuple):
    """A tensor that something was made of: where it lay, and how often it had been written to."""

    place: tuple[object, ...]
    storage: StorageWeakRef  # while it lives, no other has its memory

    def holds(self, tensor: torch.Tensor) -> bool:
        gone: bool = self.storage.expired()  # type: ignore[no-untyped-call]
        return self.place == _place(tensor) and not gone


class _Made(NamedTuple):
    """What a prepared tensor was made for and of, and its own state once it was written."""

    reader: str
    sources: tuple[_Source, ...]
    own: _Source | None = None

    def holds(self, weights: ExpertWeights, name: str) -> bool:
        now = _tensors(weights, MADE_OF[name])
        known = self.sources
        return len(now) == len(known) and all(map(_Source.holds, known, now))


_made: Any = WeakIdKeyDictionary()  # _Made by tensor


def reader(experts: type, problem: Problem) -> str:
    """Return what decides in which order experts want weights: whose `prepare`, how weights lie.

    Tensors of the same shapes can be in different orders.
    """
    owner = next(each for each in experts.__mro__ if "prepare" in vars(each))
    act = problem.act
    rows = "up first" if act.up_first else "gate first" if act.gated else "of one kind"
    rows = "alternating" if act.interleaved else rows
    return f"{owner.__name__} of {problem.scheme}, rows {rows}"


def allocated(
    weights: ExpertWeights, specs: Mapping[str, BufferSpec], reader: str
) -> dict[str, torch.Tensor]:
    """Return a tensor of each spec beside the weights; it remembers what it is to be made of.

    ConfigurationError where a part declares what is no field in MADE_OF.
    """
    made = {}
    if unknown := sorted(specs.keys() - MADE_OF.keys()):
        need = f"some of {', '.join(MADE_OF)}"
        raise ConfigurationError("prepared_specs", got=", ".join(unknown), need=need)
    with modes.kept():
        for name, spec in specs.items():
            made[name] = torch.empty(spec.shape, dtype=spec.dtype, device=weights.w1.device)
            sources = (_Source(_place(t), storage_of(t)) for t in _tensors(weights, MADE_OF[name]))
            _made[made[name]] = _Made(reader, tuple(sources))
    return made


def finish(made: Mapping[str, torch.Tensor]) -> None:
    """Note that the tensors of `allocated` hold what they were made for: a later write is refused.

    Writes that torch does not count are not seen: to `.data`, and by kernels that are launched
    beside torch.
    """
    for tensor in made.values():
        _made[tensor] = _made[tensor]._replace(own=_Source(_place(tensor), storage_of(tensor)))


def plain(weights: ExpertWeights) -> ExpertWeights:
    """Return the weights without anything that was prepared."""
    if any(getattr(weights, name) is not None for name in MADE_OF):
        nothing: dict[str, Any] = dict.fromkeys(MADE_OF)
        return replace(weights, **nothing)
    return weights


def check_prepared(
    weights: ExpertWeights, specs: Mapping[str, BufferSpec], device: torch.device, reader: str
) -> None:
    """Check what was prepared, if anything was: all of `specs`, as they say, and of these weights.

    specs, reader: of the kernel's experts. What they do not read must still be some kernel's, of
    these weights.
    WeightsError, ShapeError, DtypeError, DeviceError, LayoutError.
    """
    given = {name: t for name in MADE_OF if (t := getattr(weights, name)) is not None}
    for name, tensor in given.items():
        known = _made.get(tensor)
        if known is None:
            got = "a tensor that no kernel prepared in this process"
            raise WeightsError(name, got=got, need=f"None, or {_AGAIN}")
        if not known.holds(weights, name):
            raise WeightsError(name, got="made of other values of the weights", need=_AGAIN)
        if known.own is None or not known.own.holds(tensor):
            raise WeightsError(name, got="written to since it was prepared", need=_AGAIN)
    for name, spec in specs.items() if given else ():
        tensor = given.get(name)
        if tensor is None:
            raise WeightsError(name, got="None", need=f"{spec.shape}, beside {', '.join(given)}")
        _check_as(name, tensor, spec, device)
        if (made_for := _made[tensor].reader) != reader:
            raise WeightsError(name, got=f"made for {made_for}", need=f"{_AGAIN}, for {reader}")


def _check_as(name: str, tensor: torch.Tensor, spec: BufferSpec, device: torch.device) -> None:
    if tuple(tensor.shape) != spec.shape:
        raise ShapeError(name, got=tuple(tensor.shape), need=spec.shape)
    if tensor.dtype is not spec.dtype:
        raise DtypeError(name, got=dtype_name(tensor.dtype), need=dtype_name(spec.dtype))
    if tensor.device != device:
        raise DeviceError(name, got=tensor.device, need=f"{device}, where x is")
    if not tensor.is_contiguous():
        raise LayoutError(name, got=f"strides {tensor.stride()}", need="contiguous")


def sources(weights: ExpertWeights) -> list[torch.Tensor]:
    """Return the tensors that something prepared is made of, each once."""
    names = {of for name, of in MADE_OF.items() if getattr(weights, name) is not None}
    return _tensors(weights, sorted({name for of in names for name in of}))


def made(weights: ExpertWeights) -> list[torch.Tensor]:
    """Return the tensors that were prepared."""
    return _tensors(weights, MADE_OF)


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), _version(tensor), tensor.shape, tensor.stride(), tensor.dtype


def _tensors(weights: ExpertWeights, names: Iterable[str]) -> list[torch.Tensor]:
    found = (getattr(weights, name) for name in names)
    return [tensor for tensor in found if tensor is not None]


def _version(tensor: torch.Tensor) -> int:
    """Return how often torch has written to it; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version
