"""Run layers of any shape and token count on one pairing: kernels and plans by capacity.

A layer is a text here, so that it can be an argument of an operator and survive an export:
`layer_text` writes it, `problem_of` reads it. A pairing is a text too: two parts by name.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache
from sys import modules
from typing import Any, Literal

import torch

from modular_kernel.catalog import load_catalog, make_kernel, this_machine
from modular_kernel.contracts import PermuteExpertsUnpermute, PrepareAndFinalize
from modular_kernel.errors import ConfigurationError
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.plan import Plan
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.types import Problem, dtype_name, parse_dtype

# A kernel serves up to its problem's tokens, a power of two and at least this.
_SMALLEST_CAPACITY = 16
# Buffers of larger calls are allocated by each call: they would hold gigabytes between calls.
LARGEST_PLANNED = 512
_MOST_PLANS = 32
_BY_DEVICE = "default"
_FIELDS = frozenset(
    {"hidden", "intermediate", "experts", "top_k", "dtype", "quant", "activation", "bias"}
)

Part = str | type[PrepareAndFinalize] | type[PermuteExpertsUnpermute]


def layer_text(problem: Problem) -> str:
    """Write down the layer that a problem is, its tokens apart."""
    fields: dict[str, object] = {name: getattr(problem, name) for name in _FIELDS}
    fields |= {"dtype": dtype_name(problem.dtype), "activation": str(problem.act)}
    return json.dumps(fields, sort_keys=True)


@lru_cache(maxsize=1024)
def problem_of(layer: str, tokens: int) -> Problem:
    """Read what `layer_text` wrote, for at most `tokens` tokens; ConfigurationError else."""
    try:
        fields = json.loads(layer)
    except ValueError:
        fields = None
    if not isinstance(fields, dict) or set(fields) != _FIELDS:
        need = f"JSON with {', '.join(sorted(_FIELDS))}"
        raise ConfigurationError("layer", got=layer[:80], need=need)
    return Problem(tokens=tokens, **{**fields, "dtype": parse_dtype(fields["dtype"])})


def capacity_of(tokens: int) -> int:
    """Return the power of two that a call of so many tokens is planned for."""
    return max(_SMALLEST_CAPACITY, 1 << max(tokens - 1, 0).bit_length())


class Pairing:
    """Two parts, the kernels made of them, and the plans of their small calls.

    experts: None means TritonExperts on a GPU and TorchExperts on a CPU. Layers of one shape share
    kernels and plans, one for each power of two of tokens; plans of at most LARGEST_PLANNED tokens
    are kept, for each stream its own, the least recently used going first.
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
        self.kernels: dict[tuple[str, int, torch.device], FusedMoEModularKernel] = {}
        self.plans: OrderedDict[tuple[str, int, torch.device, int], Plan] = OrderedDict()
        self._turn = threading.Lock()
        _PAIRINGS[str(self)] = self

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
        device, capacity = x_TH.device, capacity_of(x_TH.shape[0])
        with _current(device):
            kernel = self._kernel(layer, capacity, device)
            dtype = kernel.prepare_finalize.topk_indices_dtype()
            if dtype not in (None, routing.topk_ids_TK.dtype):
                routing = replace(routing, topk_ids_TK=routing.topk_ids_TK.to(dtype))
            if capacity > LARGEST_PLANNED or not _may_keep_buffers(device):
                return kernel(x_TH, weights, routing)
            plan = self._plan(layer, capacity, device, kernel)
            return plan(x_TH, weights, routing, out=torch.empty_like(x_TH))

    def _kernel(self, layer: str, capacity: int, device: torch.device) -> FusedMoEModularKernel:
        key = (layer, capacity, device)
        kernel = self.kernels.get(key)
        if kernel is None:
            kind: Literal["cuda", "cpu"] = "cuda" if device.type == "cuda" else "cpu"
            experts = self.experts or ("TritonExperts" if kind == "cuda" else "TorchExperts")
            problem, machine = problem_of(layer, capacity), this_machine(device=kind)
            kernel = make_kernel(self.prepare_finalize, experts, problem, machine=machine)
            kernel = self.kernels.setdefault(key, kernel)
        return kernel

    def _plan(
        self, layer: str, capacity: int, device: torch.device, kernel: FusedMoEModularKernel
    ) -> Plan:
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        key = (layer, capacity, device, stream)
        with self._turn:
            plan = self.plans.get(key)
            if plan is None or plan.kernel is not kernel:
                plan = self.plans[key] = kernel.plan()
            self.plans.move_to_end(key)
            while len(self.plans) > _MOST_PLANS:
                self.plans.popitem(last=False)
        return plan


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


def _may_keep_buffers(device: torch.device) -> bool:
    """Whether memory taken now is this process's own, and not the pool of a CUDA graph.

    A capture, and torch.compile's CUDA graphs while they warm up, take it from the graph's pool,
    which is written by every replay.
    """
    if device.type != "cuda":
        return True
    if torch.cuda.is_current_stream_capturing():
        return False
    trees = modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return True
    manager: Callable[..., object] = trees.get_manager
    return manager(device.index or 0, create_if_none_exists=False) is None


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels are launched on the current GPU, which a model spread over several may not set."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
