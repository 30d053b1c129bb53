"""Run layers of any shape and token count on one pairing: kernels by capacity.

A layer is a text here, so that it can be an argument of an operator and survive an export:
`layer_text` writes it, `problem_of` reads it. A pairing is a text too: two parts by name.
"""

import json
from collections.abc import MutableMapping
from functools import lru_cache
from typing import Any

import torch

from modular_kernel.call_plans import SMALLEST_CAPACITY, capacity_of
from modular_kernel.catalog import load_catalog
from modular_kernel.contracts import PermuteExpertsUnpermute, PrepareAndFinalize
from modular_kernel.errors import ConfigurationError, IncompatibleError
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.planned import Pairing as Parts
from modular_kernel.planned import Planned
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.types import Problem, dtype_name, parse_dtype

_BY_DEVICE = "default"
_FIELDS = frozenset(
    {"hidden", "intermediate", "experts", "top_k", "dtype", "quant", "activation", "bias"}
)
_OPTIONAL = frozenset({"lora"})  # written where there are adapters

Part = str | type[PrepareAndFinalize] | type[PermuteExpertsUnpermute]


def layer_text(problem: Problem) -> str:
    """Write down the layer that a problem is, its tokens apart."""
    fields: dict[str, object] = {name: getattr(problem, name) for name in _FIELDS}
    fields |= {"dtype": dtype_name(problem.dtype), "activation": str(problem.act)}
    if problem.adapters is not None:
        fields["lora"] = problem.lora
    return json.dumps(fields, sort_keys=True)


@lru_cache(maxsize=1024)
def problem_of(layer: str, tokens: int) -> Problem:
    """Read what `layer_text` wrote, for at most `tokens` tokens; ConfigurationError else."""
    try:
        fields = json.loads(layer)
    except ValueError:
        fields = None
    if not isinstance(fields, dict) or set(fields) - _OPTIONAL != _FIELDS:
        need = f"JSON with {', '.join(sorted(_FIELDS))}"
        raise ConfigurationError("layer", got=layer[:80], need=need)
    return Problem(tokens=tokens, **{**fields, "dtype": parse_dtype(fields["dtype"])})


class Pairing:
    """Two parts, and the kernels made of them.

    experts: None means TritonExperts on a GPU and TorchExperts on a CPU. Layers of one shape share
    kernels, one for each power of two of tokens.
    """

    def __init__(
        self,
        prepare_finalize: str | type[PrepareAndFinalize],
        experts: str | type[PermuteExpertsUnpermute] | None,
    ) -> None:
        catalog = load_catalog()
        catalog.prepare_finalize(prepare_finalize)
        if experts is not None:
            catalog.experts(experts)
        self.prepare_finalize = prepare_finalize
        self.experts = experts
        self._planned = Planned()
        self._refused = set[tuple[str, torch.device]]()
        _PAIRINGS[str(self)] = self

    @property
    def kernels(self) -> MutableMapping[Any, FusedMoEModularKernel]:
        """The kernels made so far, by parts, problem and device."""
        return self._planned.kernels

    def __str__(self) -> str:
        experts = _BY_DEVICE if self.experts is None else _part_text(self.experts)
        return f"{_part_text(self.prepare_finalize)} x {experts}"

    def run(
        self, layer: str, x_TH: torch.Tensor, weights: ExpertWeights, routing: Routing
    ) -> torch.Tensor:
        """Run a call of `layer`; returns a new (T, H) tensor like x.

        routing: ids of either dtype, whichever the parts want.
        Every InputError of a kernel's call, and IncompatibleError if the pairing is refused.
        """
        problem = problem_of(layer, capacity_of(x_TH.shape[0]))
        return self._planned.run(self._parts(x_TH.device), problem, x_TH, weights, routing)

    def check(self, layer: str, device: torch.device) -> None:
        """Raise the IncompatibleError of a layer that the pairing does not run on a device."""
        problem = problem_of(layer, SMALLEST_CAPACITY)
        self._planned.kernel(self._parts(device), problem, device)

    def serves(self, layer: str, device: torch.device) -> bool:
        """Tell whether the pairing runs a layer on a device; what is refused is remembered."""
        if (layer, device) not in self._refused:
            try:
                self.check(layer, device)
            except IncompatibleError:
                self._refused.add((layer, device))
        return (layer, device) not in self._refused

    def _parts(self, device: torch.device) -> Parts:
        usual = "TritonExperts" if device.type == "cuda" else "TorchExperts"
        return self.prepare_finalize, self.experts or usual


_PAIRINGS: dict[str, Pairing] = {}


def pairing_of(text: str) -> Pairing:
    """Return the pairing that `str()` wrote, in this process or another one.

    There, parts of the catalogue are found by their names; any other class has to have been made a
    Pairing: UnknownPartError else.
    """
    found = _PAIRINGS.get(text)
    if found is None:
        prepare_finalize, _, experts = text.partition(" x ")
        found = Pairing(prepare_finalize, None if experts == _BY_DEVICE else experts)
    return found


def _part_text(part: Part) -> str:
    """Name a part of the catalogue, and any other class by where it was defined."""
    if isinstance(part, str):
        return part
    if part in {known.cls for known in load_catalog().parts}:
        return part.__name__
    return f"{part.__module__}:{part.__qualname__}"
