"""Kernels and plans by capacity: layers of one shape share them, whatever their calls' tokens.

    planned = Planned()
    y_TH = planned.run((NO_EP, "TorchExperts"), problem, x_TH, weights, routing)

A call of T tokens runs on the kernel of the next power of two. Small calls have plans, whose
buffers are allocated once; buffers of large ones are allocated by each call, because they would
hold gigabytes between calls.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, lru_cache
from sys import modules
from typing import Any, Literal

import torch

from modular_kernel import forks
from modular_kernel.catalog import check, make_kernel, this_machine
from modular_kernel.contracts import PermuteExpertsUnpermute, PrepareAndFinalize
from modular_kernel.errors import StateError
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.plan import Plan
from modular_kernel.replay import capturing
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.types import Machine, Problem

SMALLEST_CAPACITY = 16
# At 1024 tokens Qwen3-30B's layer takes an H200 0.35 ms; a call without a plan its host 0.3 to 1.1.
LARGEST_PLANNED = 2048
NO_EP = "MoEPrepareAndFinalizeNoEP"

PrepareFinalize = str | type[PrepareAndFinalize]
Experts = str | type[PermuteExpertsUnpermute]
Pairing = tuple[PrepareFinalize, Experts]
_Key = tuple[Pairing, Problem, torch.device]


def capacity_of(tokens: int) -> int:
    """Return the power of two that serves a call of so many tokens."""
    return max(SMALLEST_CAPACITY, 1 << max(tokens - 1, 0).bit_length())


@lru_cache(maxsize=1 << 12)
def _of_tokens(problem: Problem, tokens: int) -> Problem:
    """Return one object for equal problems: what is looked up by it is found by identity."""
    return problem.with_tokens(tokens)


@cache
def machine_of(kind: Literal["cuda", "cpu"]) -> Machine:
    """Describe this machine, or its CPU."""
    return this_machine(device=kind)


def usual_experts(prepare: PrepareFinalize, problem: Problem, device: torch.device) -> Experts:
    """Return TritonExperts on a GPU that they serve `problem` on, else TorchExperts."""
    if device.type != "cuda":
        return "TorchExperts"
    served = check(prepare, "TritonExperts", problem, machine_of("cuda")).ok
    return "TritonExperts" if served else "TorchExperts"


def pairing_told(
    pairing: tuple[PrepareFinalize, Experts | None], problem: Problem, device: torch.device
) -> str:
    """Name both parts; experts that are None as `usual_experts` chooses them, with the device."""
    prepare, experts = pairing
    if experts is not None:
        told = _name(experts)
    elif device.type == "meta":
        told = "experts not chosen yet (by device, and parameters are on meta)"
    else:
        told = f"{_name(usual_experts(prepare, problem, device))} (default on {device.type})"
    return f"{_name(prepare)}, {told}"


def _name(part: PrepareFinalize | Experts) -> str:
    return part if isinstance(part, str) else part.__name__


class Planned:
    """Kernels of pairings, problems and devices, and plans of their small calls.

    Plans of at most LARGEST_PLANNED tokens are kept, for each stream its own; the least recently
    used go first. most_kernels, most_plans: how many are kept.
    """

    def __init__(self, *, most_kernels: int = 256, most_plans: int = 32) -> None:
        self.kernels: OrderedDict[_Key, FusedMoEModularKernel] = OrderedDict()
        self.plans: OrderedDict[tuple[_Key, int], Plan] = OrderedDict()
        self._most_kernels, self._most_plans = most_kernels, most_plans
        self._turn = threading.RLock()
        forks.on_fork(self)

    def after_fork(self) -> None:
        """In a forked child, unlock what a thread that is not there had locked."""
        forks.renew(self._turn)

    def kernel(
        self, pairing: Pairing, problem: Problem, device: torch.device
    ) -> FusedMoEModularKernel:
        """Return the kernel of just this problem; IncompatibleError if the pairing is refused.

        StateError if there is none yet, and a CUDA graph is being captured.
        """
        key = (pairing, problem, device)
        with self._turn:
            kernel = self.kernels.get(key)
            if kernel is None:
                if capturing(device):  # kernels are compiled and loaded as they are made
                    got, need = "a CUDA graph being captured", "warm_up, or a call, before it"
                    raise StateError("a kernel of a new size", got=got, need=need)
                kind: Literal["cuda", "cpu"] = "cuda" if device.type == "cuda" else "cpu"
                kernel = make_kernel(*pairing, problem, machine=machine_of(kind))
                kernel.count_invalid_ids_on(device)
                self.kernels[key] = kernel
            _keep(self.kernels, key, self._most_kernels)
        return kernel

    def run(
        self,
        pairing: Pairing,
        problem: Problem,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
    ) -> torch.Tensor:
        """Run a call of `problem`, whatever its tokens; returns a new tensor.

        Every InputError of a kernel's call, and IncompatibleError if the pairing is refused.
        """
        device, capacity = x_TH.device, capacity_of(x_TH.shape[0])
        problem = _of_tokens(problem, capacity)
        with current(device):
            kernel = self.kernel(pairing, problem, device)
            routing = with_ids_of(kernel, routing)
            if capacity > LARGEST_PLANNED or not _may_keep_buffers(device):
                return kernel(x_TH, weights, routing)
            plan = self._plan((pairing, problem, device), kernel)
            shape = (x_TH.shape[0], *problem.output_shape[1:])
            out = torch.empty(shape, dtype=x_TH.dtype, device=device)
            return plan(x_TH, weights, routing, out=out)

    def warm_up(self, pairing: Pairing, problem: Problem, device: torch.device) -> None:
        """Make the plan of problem.tokens, so that calls of as many allocate their output alone."""
        problem = problem.with_tokens(capacity_of(problem.tokens))
        with current(device):
            kernel = self.kernel(pairing, problem, device)
            if problem.tokens <= LARGEST_PLANNED and _may_keep_buffers(device):
                self._plan((pairing, problem, device), kernel)

    def _plan(self, key: _Key, kernel: FusedMoEModularKernel) -> Plan:
        device = key[-1]
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        with self._turn:
            plan = self.plans.get((key, stream))
            if plan is None or plan.kernel is not kernel:
                plan = self.plans[key, stream] = kernel.plan()
            _keep(self.plans, (key, stream), self._most_plans)
        return plan


def with_ids_of(kernel: FusedMoEModularKernel, routing: Routing) -> Routing:
    """Return the routing with ids of the dtype that the kernel's parts want."""
    dtype = kernel.prepare_finalize.topk_indices_dtype() or kernel.problem.ids_dtype
    ids_TK = routing.topk_ids_TK
    if dtype in (None, ids_TK.dtype) or ids_TK.dtype not in (torch.int32, torch.int64):
        return routing
    return replace(routing, topk_ids_TK=ids_TK.to(dtype))


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels are launched on the current GPU, which a model spread over several may not set."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _keep(found: OrderedDict[Any, Any], key: object, most: int) -> None:
    """Count a use of `key`, and drop what was not used for the longest time."""
    found.move_to_end(key)
    while len(found) > most:
        found.popitem(last=False)


def _may_keep_buffers(device: torch.device) -> bool:
    """Whether memory taken now is this process's own, and not the pool of a CUDA graph.

    A capture, and torch.compile's CUDA graphs while they warm up, take it from the graph's pool,
    which is written by every replay.
    """
    if device.type != "cuda":
        return True
    if capturing(device):
        return False
    trees = modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return True
    manager: Callable[..., object] = trees.get_manager
    return manager(device.index or 0, create_if_none_exists=False) is None
