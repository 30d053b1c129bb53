"""Layers and pairings as strings, and the kernels that run them with any number of tokens.

A layer is a string, so that it can be an operator argument and survive an export: `layer_text`
writes it, `problem_of` parses it. A pairing, the two parts of a kernel, is a string too: the names
of both, separated by " x ".
"""

import json
from collections.abc import MutableMapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from operator import index
from typing import Any

import torch

from modular_kernel.catalog import load_catalog
from modular_kernel.contracts import PermuteExpertsUnpermute, PrepareAndFinalize
from modular_kernel.errors import ConfigurationError, IncompatibleError, UnsupportedError
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.operators.kernel_cache import KernelCache, KernelsBySize, default_experts
from modular_kernel.operators.kernel_cache import Pairing as Parts
from modular_kernel.plan import MIN_CAPACITY, plan_capacity
from modular_kernel.spec.problem import DTYPES, Combine, Problem, dtype_name, parse_dtype
from modular_kernel.tensors import ExpertWeights, Routing

_DEFAULT_EXPERTS = "default"
_SUPPORTED_EXPERTS = "where served"
_REQUIRED_FIELDS = frozenset(
    {"hidden", "intermediate", "experts", "top_k", "dtype", "quant", "activation", "bias"}
)
# Written only if different from Problem's defaults.
_OPTIONAL_FIELDS = frozenset(
    {
        "lora",
        "local_experts",
        "expert_map",
        "apply_router_weight_on_input",
        "routed_scaling_factor",
        "combine",
        "fp32_precision",
        "chunk_tokens",
        "deterministic",
        "batch_invariant",
    }
)
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_LOOKUPS = 1 << 12
_CALL_FIELDS = frozenset({"tokens", "ids_dtype"})  # of a call, not of a layer

Part = str | type[PrepareAndFinalize] | type[PermuteExpertsUnpermute]


def layer_text(problem: Problem) -> str:
    """Serialize a problem's layer, without its tokens.

    Raise UnsupportedError for a layer that the operator cannot run: on several ranks, or in place.
    """
    values: dict[str, object] = {name: getattr(problem, name) for name in _REQUIRED_FIELDS}
    values |= {"dtype": dtype_name(problem.dtype), "activation": str(problem.act)}
    for field, default in _DEFAULTS.items():
        value = getattr(problem, field)
        if value == default:
            continue
        if field not in _OPTIONAL_FIELDS:
            need = "a layer on one rank, not in place"
            raise UnsupportedError(f"{field} of an operator", got=value, need=need)
        values[field] = value.name if isinstance(value, Combine) else value
    return json.dumps(values, sort_keys=True)


def layer_text_from_sizes(
    sizes: Sequence[int], dtype: torch.dtype, quant: str, activation: str, **options: object
) -> str:
    """Serialize a layer from its sizes, using operations that torch.compile can trace.

    sizes: hidden, intermediate, experts and top_k.
    options: `bias`, and other Problem fields that `layer_text` writes.
    """
    hidden, intermediate, experts, top_k = sizes
    size_items = [
        f'"hidden": {index(hidden)}',
        f'"intermediate": {index(intermediate)}',
        f'"experts": {index(experts)}',
        f'"top_k": {index(top_k)}',
    ]
    type_items = [
        f'"dtype": "{_DTYPE_NAMES[dtype]}"',
        f'"quant": "{quant}"',
        f'"activation": "{activation}"',
    ]
    option_items = []
    for name, value in options.items():
        if isinstance(value, bool):
            option_items.append(f'"{name}": {"true" if value else "false"}')
        elif isinstance(value, str):
            option_items.append(f'"{name}": "{value}"')
        elif value is not None:
            option_items.append(f'"{name}": {value}')
    return "{" + ", ".join([*size_items, *type_items, *option_items]) + "}"


@lru_cache(maxsize=1024)
def problem_of(layer: str, tokens: int) -> Problem:
    """Return the problem of a layer with at most `tokens` tokens.

    chunk_tokens is dropped if no call of this size reaches it. Raise ConfigurationError if `layer`
    is not a string of `layer_text`.
    """
    try:
        values = json.loads(layer)
    except ValueError:
        values = None
    if not isinstance(values, dict) or set(values) - _OPTIONAL_FIELDS != _REQUIRED_FIELDS:
        need = f"JSON with {', '.join(sorted(_REQUIRED_FIELDS))}"
        raise ConfigurationError("layer", got=layer[:80], need=need)
    values["dtype"] = parse_dtype(values["dtype"])
    if "combine" in values:
        names = {combine.name: combine for combine in Combine}
        if values["combine"] not in names:
            got, need = str(values["combine"])[:80], f"one of {', '.join(names)}"
            raise ConfigurationError("layer: combine", got=got, need=need)
        values["combine"] = names[values["combine"]]
    problem = Problem(tokens=tokens, **values)
    if problem.chunk_tokens is not None and tokens <= problem.chunk_tokens:
        return replace(problem, chunk_tokens=None)
    return problem


class Pairing:
    """A pair of parts, and the kernels made from it.

    Layers of equal shape share kernels, one per power of two of tokens.

    experts: None means TritonExperts on a GPU and TorchExperts on a CPU.
    where_served: whether None means TorchExperts on a GPU, too, for layers that TritonExperts do
        not support.
    """

    def __init__(
        self,
        prepare_finalize: str | type[PrepareAndFinalize],
        experts: str | type[PermuteExpertsUnpermute] | None,
        *,
        where_served: bool = False,
    ) -> None:
        catalog = load_catalog()
        catalog.prepare_finalize(prepare_finalize)
        if experts is not None:
            catalog.experts(experts)
        self.prepare_finalize = prepare_finalize
        self.experts = experts
        self.where_served = where_served and experts is None
        self._kernel_cache = KernelCache()
        # By layer, device, and bit length of the largest token index.
        self._kernels = dict[tuple[str, torch.device, int], KernelsBySize]()
        self._refused_layers = set[tuple[str, torch.device]]()
        _PAIRINGS[str(self)] = self

    @property
    def kernels(self) -> MutableMapping[Any, FusedMoEModularKernel]:
        """The kernels made so far, by parts, problem and device."""
        return self._kernel_cache.kernels

    def __str__(self) -> str:
        default = _SUPPORTED_EXPERTS if self.where_served else _DEFAULT_EXPERTS
        experts = default if self.experts is None else _part_text(self.experts)
        return f"{_part_text(self.prepare_finalize)} x {experts}"

    def run(
        self, layer: str, x_TH: torch.Tensor, weights: ExpertWeights, routing: Routing
    ) -> torch.Tensor:
        """Run a call of `layer`; return a new tensor (T, H) like x, or (T, K, H).

        Raise every InputError of a kernel's call, and IncompatibleError if the pairing cannot run
        the layer.

        routing: ids of int32 or int64; converted if the parts need the other.
        """
        tokens, device = x_TH.shape[0], x_TH.device
        key = layer, device, (tokens - 1).bit_length()
        kernels = self._kernels.get(key)
        if kernels is None:
            problem = problem_of(layer, plan_capacity(tokens))
            kernels = self._kernel_cache.kernels_by_size(
                self._parts(device, problem), problem, device
            )
            if len(self._kernels) >= _MAX_LOOKUPS:
                self._kernels.clear()
            self._kernels[key] = kernels
        return kernels.run(x_TH, weights, routing)

    def check(self, layer: str, device: torch.device) -> None:
        """Raise IncompatibleError if the pairing cannot run the layer on a device."""
        problem = problem_of(layer, MIN_CAPACITY)
        self._kernel_cache.kernel(self._parts(device, problem), problem, device)

    def serves(self, layer: str, device: torch.device) -> bool:
        """Return whether the pairing can run a layer on a device. A negative result is cached."""
        if (layer, device) not in self._refused_layers:
            try:
                self.check(layer, device)
            except IncompatibleError:
                self._refused_layers.add((layer, device))
        return (layer, device) not in self._refused_layers

    def _parts(self, device: torch.device, problem: Problem) -> Parts:
        experts = self.experts
        if experts is None:
            experts = "TritonExperts" if device.type == "cuda" else "TorchExperts"
            if self.where_served:
                experts = default_experts(self.prepare_finalize, problem, device)
        return self.prepare_finalize, experts


_PAIRINGS: dict[str, Pairing] = {}


def pairing_of(text: str) -> Pairing:
    """Return the pairing of a text that `str(pairing)` made, in this process or another one.

    Parts of the catalog are found by name. Other classes must already have been used in a Pairing;
    else UnknownPartError is raised.
    """
    pairing = _PAIRINGS.get(text)
    if pairing is None:
        prepare_finalize, _, experts = text.partition(" x ")
        is_default = experts in (_DEFAULT_EXPERTS, _SUPPORTED_EXPERTS)
        pairing = Pairing(
            prepare_finalize,
            None if is_default else experts,
            where_served=experts == _SUPPORTED_EXPERTS,
        )
    return pairing


_DEFAULTS = {
    field.name: getattr(Problem(1, 1, 1, 1, 1), field.name)
    for field in fields(Problem)
    if field.name not in _REQUIRED_FIELDS | _CALL_FIELDS
}


def _part_text(part: Part) -> str:
    """Return the name of a catalog part, or module:qualname of another class."""
    if isinstance(part, str):
        return part
    if part in {part_entry.cls for part_entry in load_catalog().parts}:
        return part.__name__
    return f"{part.__module__}:{part.__qualname__}"
