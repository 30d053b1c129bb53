"""Cache of the ExpertWeights that operators make from the tensors of a call."""

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from modular_kernel.tensors import ExpertWeights, FixedWeights

# State of a tensor: id, address, shape, stride, dtype and version. Inference tensors have no
# version counter; their version is None.
_TensorState = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype, int | None]


@dataclass(frozen=True)
class _Entry:
    """Weights, and the tensors and the key for which they are valid.

    first: the first tensor of the call.
    states: the state of each tensor of the call.
    """

    first: "weakref.ref[torch.Tensor]"
    key: Hashable
    states: tuple[_TensorState, ...]
    weights: ExpertWeights


class WeightsCache:
    """Cache of ExpertWeights by the first tensor of a call.

    An entry is invalid if a tensor of the call was replaced, moved, reshaped or written. Writes
    that torch does not track, to `.data` and to inference tensors, are not detected. An entry is
    dropped when the first tensor is deleted. Its weights must therefore be detached aliases of the
    tensors, because references would keep the first tensor alive.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def find(self, tensors: Sequence[torch.Tensor], key: Hashable) -> ExpertWeights | None:
        """Return the weights for these tensors (at least one) and `key`, or None."""
        first = tensors[0]
        entry = self._entries.get(id(first))
        if (
            entry is None
            or entry.first() is not first
            or entry.key != key
            or len(tensors) != len(entry.states)
        ):
            return None
        for tensor, (tensor_id, pointer, shape, stride, dtype, version) in zip(
            tensors, entry.states, strict=True
        ):
            if (
                id(tensor) != tensor_id
                or tensor.data_ptr() != pointer
                or tensor.shape != shape
                or tensor.stride() != stride
                or tensor.dtype is not dtype
                or (version is not None and tensor._version != version)
            ):
                return None
        return entry.weights

    def add(
        self, tensors: Sequence[torch.Tensor], key: Hashable, weights: ExpertWeights
    ) -> ExpertWeights:
        """Add weights that were made from detached aliases of `tensors`, and return them.

        No other code may reference the aliases, because they are not checked again
        (`FixedWeights`).
        """
        weights = FixedWeights(**vars(weights))
        first, entries = tensors[0], self._entries
        tensor_id = id(first)
        states = tuple(map(_get_state, tensors))
        first_ref = weakref.ref(first, lambda _: entries.pop(tensor_id, None))
        entries[tensor_id] = _Entry(first_ref, key, states, weights)
        return weights


def _get_state(tensor: torch.Tensor) -> _TensorState:
    version = None if tensor.is_inference() else tensor._version
    memory = id(tensor), tensor.data_ptr(), tensor.shape, tensor.stride()
    return *memory, tensor.dtype, version
