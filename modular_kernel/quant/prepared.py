"""Prepared weights: copies of 4-bit weights in a tiled layout, which some kernels read faster.

    weights = kernel.prepare_weights(weights)   # adds tensors; w1 and w2 are unchanged

A prepared tensor must match its source tensors. This module keeps a record of each prepared tensor:
its layout, and the memory and version of the tensor and of its sources. A call raises WeightsError
if one of these tensors was written after the preparation, or if a prepared tensor has no record,
for example because it is a copy.
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
from modular_kernel.replay.recording import make_weak_storage_ref
from modular_kernel.spec.problem import Problem, dtype_name
from modular_kernel.tensors import ExpertWeights
from modular_kernel.workspace import BufferSpec

# Prepared field of ExpertWeights -> the fields that it is derived from.
SOURCE_FIELDS = {
    "w1_tiles": ("w1", "w1_scale"),
    "w1_tile_scales": ("w1", "w1_scale", "w1_zero_point"),
    "w2_tiles": ("w2", "w2_scale"),
    "w2_tile_scales": ("w2", "w2_scale", "w2_zero_point"),
}
_PREPARE_AGAIN = (
    "the result of kernel.prepare_weights, prepared again after weights were written or copied"
)


class _TensorState(NamedTuple):
    """Storage, address, layout and version counter of a tensor, to detect changes of its values.

    The address alone is not sufficient, because it can be reused after a storage is resized to 0.
    """

    memory_key: tuple[object, ...]
    storage_ref: StorageWeakRef

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> "_TensorState":
        return cls(_make_memory_key(tensor), make_weak_storage_ref(tensor))

    def matches(self, tensor: torch.Tensor) -> bool:
        is_expired: bool = self.storage_ref.expired()  # type: ignore[no-untyped-call]
        return self.memory_key == _make_memory_key(tensor) and not is_expired


class _Record(NamedTuple):
    """Record of a prepared tensor.

    layout_key: see `make_layout_key`.
    sources: states of the source tensors when the tensor was derived from them.
    state: state of the tensor itself after it was written; None before.
    """

    layout_key: str
    sources: tuple[_TensorState, ...]
    state: _TensorState | None = None

    def matches_sources(self, weights: ExpertWeights, name: str) -> bool:
        """Return whether the sources of the prepared field `name` are unchanged in `weights`."""
        tensors = _list_tensors(weights, SOURCE_FIELDS[name])
        if len(tensors) != len(self.sources):
            return False
        return all(map(_TensorState.matches, self.sources, tensors))


_records: Any = WeakIdKeyDictionary()  # tensor -> _Record


def make_layout_key(experts: type, problem: Problem) -> str:
    """Return a string that identifies the layout of the tensors that `experts` prepare.

    It consists of the name of the class that defines `prepare`, the scheme, and the order of the
    rows.
    """
    preparing_class = next(cls for cls in experts.__mro__ if "prepare" in vars(cls))
    act = problem.act
    row_order = "up first" if act.up_first else "gate first" if act.gated else "ungated"
    row_order = "interleaved" if act.interleaved else row_order
    return f"{preparing_class.__name__} of {problem.scheme}, rows {row_order}"


def allocate_prepared(
    weights: ExpertWeights, specs: Mapping[str, BufferSpec], expected_layout: str
) -> dict[str, torch.Tensor]:
    """Allocate a tensor for each spec, on the device of the weights, and record its sources.

    Raise ConfigurationError if a part declares a field that is not in SOURCE_FIELDS.

    expected_layout: see `make_layout_key`.
    """
    tensors = {}
    if unknown := sorted(specs.keys() - SOURCE_FIELDS.keys()):
        need = f"some of {', '.join(SOURCE_FIELDS)}"
        raise ConfigurationError("prepared_specs", got=", ".join(unknown), need=need)
    with modes.disable_inference_mode():
        for name, spec in specs.items():
            tensors[name] = torch.empty(spec.shape, dtype=spec.dtype, device=weights.w1.device)
    record_sources(weights, tensors, expected_layout)
    return tensors


def record_sources(
    weights: ExpertWeights, tensors: Mapping[str, torch.Tensor], layout: str
) -> None:
    """Record the sources of prepared tensors before the tensors are written.

    tensors: the prepared tensors, by field.
    layout: see `make_layout_key`.
    """
    for name, tensor in tensors.items():
        sources = map(_TensorState.from_tensor, _list_tensors(weights, SOURCE_FIELDS[name]))
        _records[tensor] = _Record(layout, tuple(sources))


def mark_complete(tensors: Mapping[str, torch.Tensor]) -> None:
    """Record that prepared tensors have been written. Calls refuse tensors with later writes.

    Writes that torch does not track are not detected, such as writes to `.data` and writes by
    kernels that were launched outside torch.
    """
    for tensor in tensors.values():
        _records[tensor] = _records[tensor]._replace(state=_TensorState.from_tensor(tensor))


def remove_prepared(weights: ExpertWeights) -> ExpertWeights:
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
    """Check that prepared tensors, if there are any, are complete and match their sources.

    Prepared tensors that the kernel does not read are also checked. Raises WeightsError,
    ShapeError, DtypeError, DeviceError or LayoutError if a check fails.

    specs: `prepared_specs` of the kernel's experts.
    device: the device of x.
    expected_layout: `make_layout_key` of the kernel's experts.
    """
    prepared_tensors = {
        name: t for name in SOURCE_FIELDS if (t := getattr(weights, name)) is not None
    }
    for name, tensor in prepared_tensors.items():
        record = _records.get(tensor)
        if record is None:
            got = "a tensor that no kernel prepared in this process"
            raise WeightsError(name, got=got, need=f"None, or {_PREPARE_AGAIN}")
        if not record.matches_sources(weights, name):
            raise WeightsError(
                name,
                got="derived from other weights, or before they were written",
                need=_PREPARE_AGAIN,
            )
        if record.state is None or not record.state.matches(tensor):
            raise WeightsError(name, got="written to since it was prepared", need=_PREPARE_AGAIN)
    for name, spec in specs.items() if prepared_tensors else ():
        tensor = prepared_tensors.get(name)
        if tensor is None:
            raise WeightsError(
                name, got="None", need=f"{spec.shape}, in addition to {', '.join(prepared_tensors)}"
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
    """Return whether prepared tensors are complete and match the current values of the weights."""
    for name, tensor in tensors.items():
        record = _records.get(tensor)
        if record is None or record.state is None:
            return False
        if not (record.matches_sources(weights, name) and record.state.matches(tensor)):
            return False
    return True


def list_sources(weights: ExpertWeights, names: Iterable[str]) -> list[torch.Tensor]:
    """Return the tensors that the prepared fields `names` are derived from, without duplicates."""
    source_names = {source for name in names for source in SOURCE_FIELDS[name]}
    return _list_tensors(weights, sorted(source_names))


def list_source_tensors(weights: ExpertWeights) -> list[torch.Tensor]:
    """Return the sources of the prepared tensors in `weights`, without duplicates."""
    return list_sources(weights, [n for n in SOURCE_FIELDS if getattr(weights, n) is not None])


def list_prepared_tensors(weights: ExpertWeights) -> list[torch.Tensor]:
    return _list_tensors(weights, SOURCE_FIELDS)


def _make_memory_key(tensor: torch.Tensor) -> tuple[object, ...]:
    storage = tensor.untyped_storage()._cdata
    layout = tensor.shape, tensor.stride(), tensor.dtype
    return storage, tensor.data_ptr(), get_version(tensor), *layout


def _list_tensors(weights: ExpertWeights, names: Iterable[str]) -> list[torch.Tensor]:
    tensors = (getattr(weights, name) for name in names)
    return [tensor for tensor in tensors if tensor is not None]


def get_version(tensor: torch.Tensor) -> int:
    """Return torch's version counter of a tensor; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else tensor._version
