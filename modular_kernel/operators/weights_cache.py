"""ExpertWeights made from the tensors of a call, kept between calls."""

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from modular_kernel.tensors import ExpertWeights, FixedWeights

# Of a tensor: id, pointer, shape, stride, dtype and version. The version is None for inference
# tensors, which have no counter.
_Facts = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype, int | None]


@dataclass(frozen=True)
class _Entry:
    """Weights and what identifies them.

    first: first tensor of the call.
    key: of the caller.
    facts: of each tensor.
    """

    first: "weakref.ref[torch.Tensor]"
    key: Hashable
    facts: tuple[_Facts, ...]
    weights: ExpertWeights


class WeightsCache:
    """ExpertWeights by the first tensor of a call, as long as that object is alive.

    An entry is not found if a tensor is another object, or was moved, reshaped or written to.
    Writes that torch does not track, to `.data` and to inference tensors, are not noticed. An entry
    must hold aliases of the tensors, not the tensors, so that it is freed with the first one.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def find(self, tensors: Sequence[torch.Tensor], key: Hashable) -> ExpertWeights | None:
        """Return the weights for these tensors, at least one, and `key`; None if there are none."""
        first = tensors[0]
        entry = self._entries.get(id(first))
        if (
            entry is None
            or entry.first() is not first
            or entry.key != key
            or len(tensors) != len(entry.facts)
        ):
            return None
        for tensor, (number, pointer, shape, stride, dtype, version) in zip(
            tensors, entry.facts, strict=True
        ):
            if (
                id(tensor) != number
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
        """Add weights that were made from detached aliases of these tensors, and return them.

        The aliases must not be held elsewhere.
        """
        weights = FixedWeights(**vars(weights))
        first, entries = tensors[0], self._entries
        number = id(first)
        facts = tuple(map(_facts, tensors))
        alive = weakref.ref(first, lambda _: entries.pop(number, None))
        entries[number] = _Entry(alive, key, facts, weights)
        return weights


def _facts(tensor: torch.Tensor) -> _Facts:
    version = None if tensor.is_inference() else tensor._version
    place = id(tensor), tensor.data_ptr(), tensor.shape, tensor.stride()
    return *place, tensor.dtype, version
