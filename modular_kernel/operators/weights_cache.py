"""ExpertWeights made from the tensors of a call, kept between calls."""

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from modular_kernel.tensors import ExpertWeights

# Used with map(), in every call: a third faster than a loop.
_pointer, _size, _stride = torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride
_dtype, _version = attrgetter("dtype"), attrgetter("_version")


@dataclass(frozen=True)
class _Entry:
    """Weights and what identifies them.

    first: first tensor of the call.
    key: of the caller.
    facts: see `_facts`.
    tracked: whether no tensor is an inference tensor, which has no version counter.
    """

    first: "weakref.ref[torch.Tensor]"
    key: Hashable
    facts: list[Hashable]
    tracked: bool
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
            entry is not None
            and entry.first() is first
            and entry.key == key
            and entry.facts == _facts(tensors, tracked=entry.tracked)
        ):
            return entry.weights
        return None

    def add(
        self, tensors: Sequence[torch.Tensor], key: Hashable, weights: ExpertWeights
    ) -> ExpertWeights:
        """Add weights that were made from detached aliases of these tensors, and return them."""
        first, entries = tensors[0], self._entries
        number = id(first)
        tracked = not any(tensor.is_inference() for tensor in tensors)
        alive = weakref.ref(first, lambda _: entries.pop(number, None))
        entries[number] = _Entry(alive, key, _facts(tensors, tracked=tracked), tracked, weights)
        return weights


def _facts(tensors: Sequence[torch.Tensor], *, tracked: bool) -> list[Hashable]:
    """Return the identity, layout, dtype and version of all tensors."""
    layout = *map(_pointer, tensors), *map(_size, tensors), *map(_stride, tensors)
    facts = [*map(id, tensors), *layout, *map(_dtype, tensors)]
    if tracked:
        return [*facts, *map(_version, tensors)]
    return [*facts, *(0 if tensor.is_inference() else tensor._version for tensor in tensors)]
