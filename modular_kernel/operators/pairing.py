"""Layers and pairings as strings, which operators take as arguments.

A string can be saved in an exported program. The string of a layer is the JSON of its problem
without the number of tokens (`serialize_layer`, `parse_layer`). The string of a pairing is the
names of the two parts of a kernel, separated by " x " (`Pairing`, `find_pairing`).
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
from modular_kernel.operators.kernel_cache import KernelCache, KernelsBySize, select_default_experts
from modular_kernel.operators.kernel_cache import Pairing as Parts
from modular_kernel.plan import MIN_CAPACITY, plan_capacity
from modular_kernel.spec.problem import DTYPES, Combine, Problem, dtype_name, parse_dtype
from modular_kernel.tensors import ExpertWeights, Routing

# Text of experts=None in the string of a pairing.
_DEFAULT_EXPERTS = "default"
_SUPPORTED_EXPERTS = "where served"  # with fall_back_to_torch
_REQUIRED_FIELDS = frozenset(
    {"hidden", "intermediate", "experts", "top_k", "dtype", "quant", "activation", "bias"}
)
# Serialized only if they differ from the defaults of Problem.
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
_CALL_FIELDS = frozenset({"tokens", "ids_dtype"})  # not serialized: they differ between calls

Part = str | type[PrepareAndFinalize] | type[PermuteExpertsUnpermute]


def serialize_layer(problem: Problem) -> str:
    """Serialize a problem without its number of tokens.

    Raises UnsupportedError for a problem over several ranks or in place, which operators cannot
    run.
    """
    values: dict[str, object] = {name: getattr(problem, name) for name in _REQUIRED_FIELDS}
    values |= {"dtype": dtype_name(problem.dtype), "activation": str(problem.act)}
    for field, default in _FIELD_DEFAULTS.items():
        value = getattr(problem, field)
        if value == default:
            continue
        if field not in _OPTIONAL_FIELDS:
            need = "a layer on one rank, not in place"
            raise UnsupportedError(f"{field} of an operator", got=value, need=need)
        values[field] = value.name if isinstance(value, Combine) else value
    return json.dumps(values, sort_keys=True)


def serialize_layer_from_sizes(
    sizes: Sequence[int], dtype: torch.dtype, quant: str, activation: str, **options: object
) -> str:
    """Serialize a layer from its sizes, with operations that torch.compile can trace.

    sizes: hidden, intermediate, experts and top_k.
    options: `bias`, and other fields of Problem that `serialize_layer` writes.
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
def parse_layer(layer: str, tokens: int) -> Problem:
    """Return the problem of a serialized layer with `tokens` tokens.

    The field chunk_tokens is None if it is not smaller than `tokens`, so that equal problems share
    a kernel. Raises ConfigurationError if `layer` is not a result of `serialize_layer`.
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
    """A pair of parts, and the kernels that were made from them.

    Layers of equal shape share kernels, with one kernel for each power of two of tokens.

    experts: None selects the default experts of the layer (`select_default_experts`).
    fall_back_to_torch: if `experts` is None, also select TorchExperts on a GPU for layers that
        TritonExperts does not support.
    """

    def __init__(
        self,
        prepare_finalize: str | type[PrepareAndFinalize],
        experts: str | type[PermuteExpertsUnpermute] | None,
        *,
        fall_back_to_torch: bool = False,
    ) -> None:
        catalog = load_catalog()
        catalog.prepare_finalize(prepare_finalize)
        if experts is not None:
            catalog.experts(experts)
        self.prepare_finalize = prepare_finalize
        self.experts = experts
        self.fall_back_to_torch = fall_back_to_torch and experts is None
        self._kernel_cache = KernelCache()
        # By layer, device, and bit length of (number of tokens - 1).
        self._kernels = dict[tuple[str, torch.device, int], KernelsBySize]()
        self._refused_layers = set[tuple[str, torch.device]]()
        _PAIRINGS[str(self)] = self

    @property
    def kernels(self) -> MutableMapping[Any, FusedMoEModularKernel]:
        """The kernels that were made, by parts, problem and device."""
        return self._kernel_cache.kernels

    def __str__(self) -> str:
        default = _SUPPORTED_EXPERTS if self.fall_back_to_torch else _DEFAULT_EXPERTS
        experts = default if self.experts is None else _format_part(self.experts)
        return f"{_format_part(self.prepare_finalize)} x {experts}"

    def run(
        self, layer: str, x_TH: torch.Tensor, weights: ExpertWeights, routing: Routing
    ) -> torch.Tensor:
        """Run a call of a serialized layer. Return a new tensor, (T, H) or (T, K, H).

        routing: its ids are converted to the dtype that the parts need, int32 or int64.

        Raises the InputErrors of a kernel's call, and IncompatibleError if the pairing cannot run
        the layer.
        """
        tokens, device = x_TH.shape[0], x_TH.device
        key = layer, device, (tokens - 1).bit_length()
        kernels = self._kernels.get(key)
        if kernels is None:
            problem = parse_layer(layer, plan_capacity(tokens))
            kernels = self._kernel_cache.kernels_by_size(
                self._select_parts(device, problem), problem, device
            )
            if len(self._kernels) >= _MAX_LOOKUPS:
                self._kernels.clear()
            self._kernels[key] = kernels
        return kernels.run(x_TH, weights, routing)

    def check(self, layer: str, device: torch.device) -> None:
        """Raise IncompatibleError if the pairing cannot run a serialized layer on a device."""
        problem = parse_layer(layer, MIN_CAPACITY)
        self._kernel_cache.kernel(self._select_parts(device, problem), problem, device)

    def can_run(self, layer: str, device: torch.device) -> bool:
        """Return whether the pairing can run a serialized layer on a device."""
        if (layer, device) not in self._refused_layers:
            try:
                self.check(layer, device)
            except IncompatibleError:
                self._refused_layers.add((layer, device))
        return (layer, device) not in self._refused_layers

    def _select_parts(self, device: torch.device, problem: Problem) -> Parts:
        experts = self.experts
        if experts is None:
            experts = select_default_experts(
                self.prepare_finalize, problem, device, required=not self.fall_back_to_torch
            )
        return self.prepare_finalize, experts


_PAIRINGS: dict[str, Pairing] = {}


def find_pairing(text: str) -> Pairing:
    """Return the pairing for which `str(pairing)` is `text`, in this or in another process.

    Parts of the catalog are found by name. Raises UnknownPartError for other classes, unless this
    process has made a Pairing with them.
    """
    pairing = _PAIRINGS.get(text)
    if pairing is None:
        prepare_finalize, _, experts = text.partition(" x ")
        is_default = experts in (_DEFAULT_EXPERTS, _SUPPORTED_EXPERTS)
        pairing = Pairing(
            prepare_finalize,
            None if is_default else experts,
            fall_back_to_torch=experts == _SUPPORTED_EXPERTS,
        )
    return pairing


_FIELD_DEFAULTS = {
    field.name: getattr(Problem(1, 1, 1, 1, 1), field.name)
    for field in fields(Problem)
    if field.name not in _REQUIRED_FIELDS | _CALL_FIELDS
}


def _format_part(part: Part) -> str:
    """Return the name of a part of the catalog, or "module:qualname" for any other class."""
    if isinstance(part, str):
        return part
    if part in {part_entry.cls for part_entry in load_catalog().parts}:
        return part.__name__
    return f"{part.__module__}:{part.__qualname__}"
