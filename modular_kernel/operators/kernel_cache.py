"""LRU cache of kernels by pairing, problem and device, shared by layers of equal shape.

    cache = KernelCache()
    y_TH = cache.run((NO_EP, "TorchExperts"), problem, x_TH, weights, routing)

A call of T tokens runs on the kernel whose number of tokens is the next power of two, at least 16.
A pairing consists of the two parts of a kernel, by name or class.
"""

import threading
import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, lru_cache
from itertools import count
from typing import Any, Literal

import torch

from modular_kernel.catalog import check, load_catalog, make_kernel, this_machine
from modular_kernel.contracts import PermuteExpertsUnpermute, PrepareAndFinalize
from modular_kernel.errors import ConfigurationError, StateError
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.plan import plan_capacity
from modular_kernel.replay.recording import is_capturing
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.utils import forks

NO_EP = "MoEPrepareAndFinalizeNoEP"

PrepareFinalize = str | type[PrepareAndFinalize]
Experts = str | type[PermuteExpertsUnpermute]
Pairing = tuple[PrepareFinalize, Experts]
_Key = tuple[Pairing, Problem, torch.device]


@lru_cache(maxsize=1 << 12)
def _replace_tokens(problem: Problem, tokens: int) -> Problem:
    """Return `problem` with another number of tokens.

    The result is cached, so that dict lookups with it compare identities instead of fields.
    """
    return problem.with_tokens(tokens)


@cache
def detect_machine(kind: Literal["cuda", "cpu"]) -> Machine:
    """Return a description of this machine, with its GPU ("cuda") or without it ("cpu")."""
    return this_machine(device=kind)


def list_default_experts(problem: Problem, device_type: str) -> tuple[str, ...]:
    """Return the experts parts that a layer uses by default, in order of preference.

    A layer uses the first that supports it. With fp8 weights in blocks, DeepGEMM's GEMMs for many
    rows per expert took 0.86 to 0.95 times as long as Triton's on an H200 (2026-12-01).
    """
    if device_type != "cuda":
        return ("TorchExperts",)
    if problem.scheme.name == "fp8_w8a8_block":
        return ("TritonOrDeepGemmExperts", "TritonExperts", "TorchExperts")
    return ("TritonExperts", "TorchExperts")


def select_default_experts(
    prepare: PrepareFinalize, problem: Problem, device: torch.device, *, required: bool = False
) -> str:
    """Return the first of `list_default_experts` that supports `problem` on this device.

    A part that supports the problem is skipped if the library that it calls cannot be loaded. On a
    CPU, return "TorchExperts" for all problems.

    required: whether to return "TritonExperts" instead of "TorchExperts" on a GPU. The kernel
        cannot be made then, and its error says why TritonExperts does not support the problem.
    """
    *preferred, last = list_default_experts(problem, device.type)
    for name in preferred:
        if check(prepare, name, problem, detect_machine("cuda")).ok and can_load_library(name):
            return name
    return preferred[-1] if required and preferred else last


def can_load_library(experts: str) -> bool:
    """Return whether the library of an experts part can be loaded. This imports the library."""
    try:
        load_catalog().experts(experts).load_library()
    except ConfigurationError:
        return False
    return True


def describe_pairing(
    pairing: tuple[PrepareFinalize, Experts | None], problem: Problem, device: torch.device
) -> str:
    """Return the names of both parts. If the experts are None, these are the default experts."""
    prepare, experts = pairing
    if experts is not None:
        experts_text = _get_name(experts)
    elif device.type == "meta":
        experts_text = "experts not chosen yet (parameters are on the meta device)"
    else:
        default = select_default_experts(prepare, problem, device)
        experts_text = f"{_get_name(default)} (default on {device.type})"
    return f"{_get_name(prepare)}, {experts_text}"


def _get_name(part: PrepareFinalize | Experts) -> str:
    return part if isinstance(part, str) else part.__name__


class KernelsBySize:
    """Kernels of one pairing and layer on one device, by number of tokens (powers of two).

    This class finds the kernel of a call without hashing a problem. It holds weak references to
    kernels of the cache. A kernel that the cache has evicted is made again.
    """

    def __init__(
        self, cache: "KernelCache", pairing: Pairing, problem: Problem, device: torch.device
    ) -> None:
        self.problem = problem
        self._cache, self._pairing, self._device = cache, pairing, device
        self._index: int | None = device.index if device.type == "cuda" else None
        # Bit length of (number of tokens - 1) -> (kernel, required dtype of ids).
        self._kernels: dict[int, tuple[weakref.ref[FusedMoEModularKernel], torch.dtype | None]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "KernelsBySize":
        """Return the same object, because kernels can be shared by all copies of a layer."""
        return self

    def kernels(self) -> list[FusedMoEModularKernel]:
        """Return the kernels of past calls that the cache has not evicted."""
        kernels = (reference() for reference, _ in tuple(self._kernels.values()))
        return [kernel for kernel in kernels if kernel is not None]

    def run(
        self,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        counts: list[int] | None = None,
    ) -> torch.Tensor:
        """Run a call (`KernelCache.run`).

        counts: [number of calls, number of tokens], which this call increments.
        """
        index = self._index
        if index is not None and torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                return self.run(x_TH, weights, routing, counts)
        tokens = x_TH.shape[0]
        if counts is not None:
            counts[0] += 1
            counts[1] += tokens
        entry = self._kernels.get((tokens - 1).bit_length())
        kernel = None if entry is None else entry[0]()
        if entry is None or kernel is None:
            problem = _replace_tokens(self.problem, plan_capacity(tokens))
            kernel = self._cache.kernel(self._pairing, problem, self._device)
            dtype = kernel.prepare_finalize.topk_indices_dtype() or kernel.problem.ids_dtype
            self._kernels[(tokens - 1).bit_length()] = weakref.ref(kernel), dtype
        else:
            dtype, cache = entry[1], self._cache
            cache._last_use[id(kernel)] = cache._next_use()  # `record_use`, inlined for speed
        if dtype is not None and routing.topk_ids_TK.dtype is not dtype:
            routing = _convert_ids_to(dtype, routing)
        return kernel(x_TH, weights, routing)


class KernelCache:
    """LRU cache of kernels and their plans, by pairing, problem and device.

    max_kernels: maximum number of kernels.
    """

    def __init__(self, *, max_kernels: int = 256) -> None:
        self.kernels: dict[_Key, FusedMoEModularKernel] = {}
        self._max_kernels = max_kernels
        self._next_use = count().__next__  # atomic
        self._last_use: dict[int, int] = {}  # by id of the kernel
        self._lock = threading.RLock()
        forks.on_fork(self)

    def after_fork(self) -> None:
        """Reset the lock in a forked child, because a thread of the parent may have held it."""
        forks.reset_lock(self._lock)

    def kernel(
        self, pairing: Pairing, problem: Problem, device: torch.device
    ) -> FusedMoEModularKernel:
        """Return the kernel for this problem, including its number of tokens. Make it if needed.

        Raises IncompatibleError if the pairing cannot run the problem, and StateError if a kernel
        would have to be made during CUDA graph capture.
        """
        key = (pairing, problem, device)
        with self._lock:
            kernel = self.kernels.get(key)
            if kernel is None:
                if is_capturing(device):  # making a kernel may compile and load code
                    got, need = "a call during CUDA graph capture", "warm_up, or an earlier call"
                    raise StateError("a kernel of a new size", got=got, need=need)
                kind: Literal["cuda", "cpu"] = "cuda" if device.type == "cuda" else "cpu"
                kernel = make_kernel(*pairing, problem, machine=detect_machine(kind))
                kernel.count_invalid_ids_on(device)
                self.kernels[key] = kernel
            self.record_use(kernel)
            while len(self.kernels) > self._max_kernels:
                oldest = min(self.kernels, key=lambda key: self._last_use[id(self.kernels[key])])
                del self._last_use[id(self.kernels.pop(oldest))]
        return kernel

    def record_use(self, kernel: FusedMoEModularKernel) -> None:
        """Record a use of a kernel, so that the least recently used kernels are evicted first."""
        self._last_use[id(kernel)] = self._next_use()

    def kernels_by_size(
        self, pairing: Pairing, problem: Problem, device: torch.device
    ) -> KernelsBySize:
        """Return an object that makes the kernels of one layer on one device on first use."""
        return KernelsBySize(self, pairing, problem, device)

    def run(
        self,
        pairing: Pairing,
        problem: Problem,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
    ) -> torch.Tensor:
        """Run a call of `problem`, with any number of tokens. Return a new tensor.

        Raises the InputErrors of a kernel's call, and IncompatibleError if the pairing cannot run
        the problem.
        """
        return KernelsBySize(self, pairing, problem, x_TH.device).run(x_TH, weights, routing)

    def warm_up(self, pairing: Pairing, problem: Problem, device: torch.device) -> None:
        """Make the kernel and the plan for calls of `problem.tokens` tokens.

        Later calls allocate only their outputs. Calls of more than 2,048 tokens also allocate their
        workspace (`modular_kernel.plan`).
        """
        problem = _replace_tokens(problem, plan_capacity(problem.tokens))
        with current_device(device):
            self.kernel(pairing, problem, device).reserve_workspace(problem.tokens, device)


def convert_ids(kernel: FusedMoEModularKernel, routing: Routing) -> Routing:
    """Return the routing with ids of the dtype that the kernel requires."""
    dtype = kernel.prepare_finalize.topk_indices_dtype() or kernel.problem.ids_dtype
    return _convert_ids_to(dtype, routing)


def _convert_ids_to(dtype: torch.dtype | None, routing: Routing) -> Routing:
    ids_TK = routing.topk_ids_TK
    if dtype in (None, ids_TK.dtype) or ids_TK.dtype not in (torch.int32, torch.int64):
        return routing
    return replace(routing, topk_ids_TK=ids_TK.to(dtype))


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context manager that makes `device` the current GPU. For a CPU, it does nothing."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
