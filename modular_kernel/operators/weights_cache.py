"""ExpertWeights made from the tensors of a call, kept between calls."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from modular_kernel.tensors import ExpertWeights

MakeWeights = Callable[[list[torch.Tensor | None]], ExpertWeights]


@dataclass(frozen=True)
class _Entry:
    """Weights, and what they were made from: a key, and the identity of each tensor."""

    key: Hashable
    identity: tuple[object, ...]
    weights: ExpertWeights


class WeightsCache:
    """ExpertWeights by the first tensor of a call, as long as that object is alive.

    An entry is replaced if a tensor is another object, or was moved, reshaped or written to. Writes
    that torch does not track, to `.data` and to inference tensors, are not noticed. An entry holds
    aliases of the tensors, not the tensors, so that it is freed with the first one.
    """

    def __init__(self) -> None:
        self._entries: Any = WeakIdKeyDictionary()

    def get(
        self, tensors: Sequence[torch.Tensor | None], key: Hashable, make: MakeWeights
    ) -> ExpertWeights:
        """Return the weights that `make` returned for these tensors and `key`, or call it.

        tensors: the first is not None. make: called with detached aliases of them.
        """
        identity = tuple(map(_identity, tensors))
        entry = self._entries.get(tensors[0])
        if entry is None or entry.identity != identity or entry.key != key:
            weights = make([None if t is None else t.detach() for t in tensors])
            entry = self._entries[tensors[0]] = _Entry(key, identity, weights)
        weights_of_entry: ExpertWeights = entry.weights
        return weights_of_entry


def _identity(tensor: torch.Tensor | None) -> object:
    if tensor is None:
        return None
    version = 0 if tensor.is_inference() else tensor._version
    return (
        id(tensor),
        tensor.data_ptr(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        version,
    )
