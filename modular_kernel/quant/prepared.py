"""Prepared weights: derived tensors in the layout that kernels read, made once at load time.

    weights = kernel.prepare_weights(weights)   # in addition to w1 and w2, which other calls read

For each prepared tensor, a record stores its layout, and the memory and version of the tensor and
of its sources. A call is refused after any of them was written to. A copy of a prepared tensor has
no such record, so a call with a copy is also refused.
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

# Prepared fields of ExpertWeights, and the fields that each is derived from.
SOURCE_FIELDS = {
    "w1_tiles": ("w1", "w1_scale"),
    "w1_tile_scales": ("w1", "w1_scale", "w1_zero_point"),
    "w2_tiles": ("w2", "w2_scale"),
    "w2_tile_scales": ("w2", "w2_scale", "w2_zero_point"),
}
_PREPARE_AGAIN = (
    "the result of kernel.prepare_weights, prepared again after weights were written or copied"
)


class _Source(NamedTuple):
    """Identity of a tensor's content: its storage, address, layout and version counter.

    The address alone is not sufficient: after a storage is resized to 0, another one can have its
    address.
    """

    memory_key: tuple[object, ...]
    storage: StorageWeakRef

    def matches(self, tensor: torch.Tensor) -> bool:
        expired: bool = self.storage.expired()  # type: ignore[no-untyped-call]
        return self.memory_key == _memory_key(tensor) and not expired


class _Record(NamedTuple):
    """Record of a prepared tensor.

    layout_key: see the function `layout_key`.
    source_tensors: what the tensor is derived from.
    state: its own identity once it is complete; None before.
    """

    layout_key: str
    source_tensors: tuple[_Source, ...]
    state: _Source | None = None

    def matches(self, weights: ExpertWeights, name: str) -> bool:
        current = _tensors(weights, SOURCE_FIELDS[name])
        recorded = self.source_tensors
        return len(current) == len(recorded) and all(map(_Source.matches, recorded, current))


_records: Any = WeakIdKeyDictionary()  # tensor -> _Record


def layout_key(experts: type, problem: Problem) -> str:
    """Return a text that identifies the layout of the tensors that `experts` prepare.

    It names the class that prepares, the scheme and the row order. Tensors of equal shape can
    differ in layout, so shapes alone do not identify it.
    """
    owner = next(cls for cls in experts.__mro__ if "prepare" in vars(cls))
    act = problem.act
    rows = "up first" if act.up_first else "gate first" if act.gated else "ungated"
    rows = "interleaved" if act.interleaved else rows
    return f"{owner.__name__} of {problem.scheme}, rows {rows}"


def allocate_prepared(
    weights: ExpertWeights, specs: Mapping[str, BufferSpec], expected_layout: str
) -> dict[str, torch.Tensor]:
    """Allocate a tensor for each spec, on the weights' device, and record its sources.

    Raise ConfigurationError if a part declares a field that is not in SOURCE_FIELDS.

    expected_layout: from `layout_key`.
    """
    tensors = {}
    if unknown := sorted(specs.keys() - SOURCE_FIELDS.keys()):
        need = f"some of {', '.join(SOURCE_FIELDS)}"
        raise ConfigurationError("prepared_specs", got=", ".join(unknown), need=need)
    with modes.outside_inference_mode():
        for name, spec in specs.items():
            tensors[name] = torch.empty(spec.shape, dtype=spec.dtype, device=weights.w1.device)
    record_sources(weights, tensors, expected_layout)
    return tensors


def record_sources(
    weights: ExpertWeights, tensors: Mapping[str, torch.Tensor], layout: str
) -> None:
    """Record that prepared tensors, about to be written, are derived from these weights."""
    for name, tensor in tensors.items():
        sources = (
            _Source(_memory_key(t), storage_of(t)) for t in _tensors(weights, SOURCE_FIELDS[name])
        )
        _records[tensor] = _Record(layout, tuple(sources))


def mark_complete(tensors: Mapping[str, torch.Tensor]) -> None:
    """Record that tensors of `allocate_prepared` are complete; later writes to them are refused.

    Writes that torch does not track are not detected: those to `.data`, and those by kernels
    launched outside torch.
    """
    for tensor in tensors.values():
        _records[tensor] = _records[tensor]._replace(
            state=_Source(_memory_key(tensor), storage_of(tensor))
        )


def without_prepared(weights: ExpertWeights) -> ExpertWeights:
    """Return the weights without prepared tensors."""
    if any(getattr(weights, name) is not None for name in SOURCE_FIELDS):
        cleared: dict[str, Any] = dict.fromkeys(SOURCE_FIELDS)
        return replace(weights, **cleared)
    return weights


def check_prepared(
    weights: ExpertWeights,
    specs: Mapping[str, BufferSpec],
    device: torch.device,
    expected_layout: str,
) -> None:
    """Check the prepared tensors, if there are any: present, valid, and derived from these weights.

    Tensors that the kernel does not read must be valid, too. Raise WeightsError, ShapeError,
    DtypeError, DeviceError or LayoutError if a check fails.

    specs, expected_layout: of the kernel's experts.
    device: where x is.
    """
    present = {name: t for name in SOURCE_FIELDS if (t := getattr(weights, name)) is not None}
    for name, tensor in present.items():
        record = _records.get(tensor)
        if record is None:
            got = "a tensor that no kernel prepared in this process"
            raise WeightsError(name, got=got, need=f"None, or {_PREPARE_AGAIN}")
        if not record.matches(weights, name):
            raise WeightsError(
                name,
                got="derived from other weights, or before they were written",
                need=_PREPARE_AGAIN,
            )
        if record.state is None or not record.state.matches(tensor):
            raise WeightsError(name, got="written to since it was prepared", need=_PREPARE_AGAIN)
    for name, spec in specs.items() if present else ():
        tensor = present.get(name)
        if tensor is None:
            raise WeightsError(
                name, got="None", need=f"{spec.shape}, in addition to {', '.join(present)}"
            )
        _check_spec(name, tensor, spec, device)
        if (layout := _records[tensor].layout_key) != expected_layout:
            raise WeightsError(
                name, got=f"prepared for {layout}", need=f"{_PREPARE_AGAIN}, for {expected_layout}"
            )


def _check_spec(name: str, tensor: torch.Tensor, spec: BufferSpec, device: torch.device) -> None:
    if tuple(tensor.shape) != spec.shape:
        raise ShapeError(name, got=tuple(tensor.shape), need=spec.shape)
    if tensor.dtype is not spec.dtype:
        raise DtypeError(name, got=dtype_name(tensor.dtype), need=dtype_name(spec.dtype))
    if tensor.device != device:
        raise DeviceError(name, got=tensor.device, need=f"{device}, where x is")
    if not tensor.is_contiguous():
        raise LayoutError(name, got=f"strides {tensor.stride()}", need="contiguous")


def is_current(weights: ExpertWeights, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return whether complete prepared tensors were derived from the weights' current values."""
    for name, tensor in tensors.items():
        record = _records.get(tensor)
        if record is None or record.state is None:
            return False
        if not (record.matches(weights, name) and record.state.matches(tensor)):
            return False
    return True


def sources_of(weights: ExpertWeights, names: Iterable[str]) -> list[torch.Tensor]:
    """Return the tensors that the prepared fields `names` are derived from, without duplicates."""
    return _tensors(weights, sorted({source for name in names for source in SOURCE_FIELDS[name]}))


def source_tensors(weights: ExpertWeights) -> list[torch.Tensor]:
    """Return the tensors that prepared tensors are derived from, without duplicates."""
    return sources_of(weights, [n for n in SOURCE_FIELDS if getattr(weights, n) is not None])


def prepared_tensors(weights: ExpertWeights) -> list[torch.Tensor]:
    """Return the prepared tensors."""
    return _tensors(weights, SOURCE_FIELDS)


def _memory_key(tensor: torch.Tensor) -> tuple[object, ...]:
    storage = tensor.untyped_storage()._cdata
    layout = tensor.shape, tensor.stride(), tensor.dtype
    return storage, tensor.data_ptr(), _version(tensor), *layout


def _tensors(weights: ExpertWeights, names: Iterable[str]) -> list[torch.Tensor]:
    tensors = (getattr(weights, name) for name in names)
    return [tensor for tensor in tensors if tensor is not None]


def _version(tensor: torch.Tensor) -> int:
    """Return torch's version counter of a tensor; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else tensor._version
