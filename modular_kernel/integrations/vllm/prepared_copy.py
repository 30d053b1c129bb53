"""The prepared copy of one layer's 4-bit weights, at addresses that do not change."""

from dataclasses import replace

import torch

from modular_kernel.contracts import PermuteExpertsUnpermute
from modular_kernel.quant import prepared
from modular_kernel.quant.auto_prepare import allocate_and_prepare, write_prepared
from modular_kernel.tensors import ExpertWeights
from modular_kernel.workspace import BufferSpec

# Devices for which a warning about too little memory has been logged.
_DEVICES_WARNED_OF: set[torch.device] = set()


class PreparedCopy:
    """Tensors derived from a layer's weights, which are updated after each load.

    When vLLM reloads a checkpoint, it copies the new weights to the memory of the first weights,
    which CUDA graphs read. The graphs also read this copy, so the copy keeps its memory.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._was_refused = False
        self._layout = ""
        self._sources: list[torch.Tensor] = []
        self._versions: list[int] = []

    def write(self, weights: ExpertWeights, experts: PermuteExpertsUnpermute) -> None:
        """Derive the copy from the weights. The first call allocates it, if memory allows.

        A later call does not allocate the copy, because vLLM has then reserved memory for its KV
        cache, and CUDA graphs do not read the copy.

        weights: weights that passed the checks of the kernel.
        experts: the experts that read the copy. If they do not prepare weights, nothing is done.
        """
        specs = dict(experts.prepared_specs())
        if not specs:
            return
        self._layout = prepared.make_layout_key(type(experts), experts.problem)
        if self._fits(specs, weights.w1.device):
            write_prepared(weights, self.tensors, self._layout, experts.prepare)
        elif not self._was_refused:
            self._allocate(weights, specs, experts)

    def attach(self, weights: ExpertWeights) -> ExpertWeights:
        """Return the weights with the copy, which must have been derived from these weights."""
        if not self.tensors:
            return weights
        prepared.record_sources(weights, self.tensors, self._layout)
        prepared.mark_complete(self.tensors)
        self._sources = prepared.list_sources(weights, self.tensors)
        self._versions = [*map(prepared.get_version, self._sources)]
        return replace(weights, **self.tensors)

    def is_outdated(self) -> bool:
        """Return whether torch has tracked a write to the weights since `attach`."""
        return self._versions != [*map(prepared.get_version, self._sources)]

    def _allocate(
        self,
        weights: ExpertWeights,
        specs: dict[str, BufferSpec],
        experts: PermuteExpertsUnpermute,
    ) -> None:
        """Allocate and write the copy. If memory is insufficient, warn once for each device."""
        device = weights.w1.device
        tensors = allocate_and_prepare(
            weights, specs, self._layout, experts.prepare, warn=device not in _DEVICES_WARNED_OF
        )
        if tensors is None:
            _DEVICES_WARNED_OF.add(device)
        self._was_refused = tensors is None
        self.tensors = tensors or {}

    def _fits(self, specs: dict[str, BufferSpec], device: torch.device) -> bool:
        current = {name: (t.shape, t.dtype, t.device) for name, t in self.tensors.items()}
        return current == {name: (s.shape, s.dtype, device) for name, s in specs.items()}
