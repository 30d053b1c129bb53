"""ExpertWeights made from the tensors of a call, kept between calls."""

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from modular_kernel.tensors import ExpertWeights

MakeWeights = Callable[[list[torch.Tensor | None]], ExpertWeights]

# Used with map(), in every call: a third faster than a loop.
_pointer, _size, _stride = torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride
_dtype = attrgetter("dtype")


@dataclass(frozen=True)
class _Entry:
    """Weights and what identifies them.

    first: first tensor of the call.
    key: of the caller.
    facts: see `_facts`.
    """

    first: "weakref.ref[torch.Tensor]"
    key: Hashable
    facts: list[Hashable]
    weights: ExpertWeights


class WeightsCache:
    """ExpertWeights by the first tensor of a call, as long as that object is alive.

    An entry is replaced if a tensor is another object, or was moved, reshaped or written to. Writes
    that torch does not track, to `.data` and to inference tensors, are not noticed. An entry holds
    aliases of the tensors, not the tensors, so that it is freed with the first one.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def get(
        self, tensors: Sequence[torch.Tensor | None], key: Hashable, make: MakeWeights
    ) -> ExpertWeights:
        """Return the weights for these tensors and `key`; call `make` unless they are cached.

        tensors: the first is not None.
        make: called with detached aliases of the tensors.
        """
        first = tensors[0]
        entry = self._entries.get(id(first))
        facts = _facts(tensors)
        if (
            entry is not None
            and entry.first() is first
            and entry.facts == facts
            and entry.key == key
        ):
            return entry.weights
        assert first is not None
        weights = make([None if t is None else t.detach() for t in tensors])
        number, entries = id(first), self._entries
        alive = weakref.ref(first, lambda _: entries.pop(number, None))
        entries[number] = _Entry(alive, key, facts, weights)
        return weights


def _facts(tensors: Sequence[torch.Tensor | None]) -> list[Hashable]:
    """Return the identity, layout, dtype and version of all tensors."""
    present = [tensor for tensor in tensors if tensor is not None]
    versions = [0 if tensor.is_inference() else tensor._version for tensor in present]
    layout = *map(_pointer, present), *map(_size, present), *map(_stride, present)
    return [*map(id, tensors), *layout, *map(_dtype, present), *versions]
