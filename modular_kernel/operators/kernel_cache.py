"""Cache of kernels by capacity, shared by layers of equal shape at any token count.

    planned = Planned()
    y_TH = planned.run((NO_EP, "TorchExperts"), problem, x_TH, weights, routing)

A call of T tokens runs on the kernel for the next power of two.
"""

import threading
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, Literal

import torch

from modular_kernel.catalog import check, make_kernel, this_machine
from modular_kernel.contracts import PermuteExpertsUnpermute, PrepareAndFinalize
from modular_kernel.errors import StateError
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.plan import plan_capacity
from modular_kernel.replay.recording import capturing
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.utils import forks

NO_EP = "MoEPrepareAndFinalizeNoEP"

PrepareFinalize = str | type[PrepareAndFinalize]
Experts = str | type[PermuteExpertsUnpermute]
Pairing = tuple[PrepareFinalize, Experts]
_Key = tuple[Pairing, Problem, torch.device]


@lru_cache(maxsize=1 << 12)
def _with_tokens(problem: Problem, tokens: int) -> Problem:
    """Return one object for equal problems, so that lookups by it compare by identity."""
    return problem.with_tokens(tokens)


@cache
def machine_of(kind: Literal["cuda", "cpu"]) -> Machine:
    """Describe this machine with its GPU ("cuda") or CPU only ("cpu")."""
    return this_machine(device=kind)


def default_experts(prepare: PrepareFinalize, problem: Problem, device: torch.device) -> Experts:
    """Return TritonExperts if they support `problem` on this GPU, else TorchExperts."""
    if device.type != "cuda":
        return "TorchExperts"
    supported = check(prepare, "TritonExperts", problem, machine_of("cuda")).ok
    return "TritonExperts" if supported else "TorchExperts"


def describe_pairing(
    pairing: tuple[PrepareFinalize, Experts | None], problem: Problem, device: torch.device
) -> str:
    """Describe both parts; experts=None means `default_experts` of the device."""
    prepare, experts = pairing
    if experts is not None:
        experts_text = _name(experts)
    elif device.type == "meta":
        experts_text = "experts not chosen yet (by device, and parameters are on meta)"
    else:
        experts_text = (
            f"{_name(default_experts(prepare, problem, device))} (default on {device.type})"
        )
    return f"{_name(prepare)}, {experts_text}"


def _name(part: PrepareFinalize | Experts) -> str:
    return part if isinstance(part, str) else part.__name__


class KernelCache:
    """LRU cache of kernels by pairing, problem and device, with at most `max_kernels` entries.

    Evicting a kernel also drops the plans of its calls.
    """

    def __init__(self, *, max_kernels: int = 256) -> None:
        self.kernels: OrderedDict[_Key, FusedMoEModularKernel] = OrderedDict()
        self._most_kernels = max_kernels
        self._turn = threading.RLock()
        forks.on_fork(self)

    def after_fork(self) -> None:
        """In a forked child, release locks held by threads that no longer exist."""
        forks.reset_lock(self._turn)

    def kernel(
        self, pairing: Pairing, problem: Problem, device: torch.device
    ) -> FusedMoEModularKernel:
        """Return the kernel for exactly this problem; IncompatibleError if refused.

        Raises StateError if a kernel would have to be made during CUDA graph capture.
        """
        key = (pairing, problem, device)
        with self._turn:
            kernel = self.kernels.get(key)
            if kernel is None:
                if capturing(device):  # making a kernel compiles and loads code
                    got, need = "a CUDA graph being captured", "warm_up, or a call, before it"
                    raise StateError("a kernel of a new size", got=got, need=need)
                kind: Literal["cuda", "cpu"] = "cuda" if device.type == "cuda" else "cpu"
                kernel = make_kernel(*pairing, problem, machine=machine_of(kind))
                kernel.count_invalid_ids_on(device)
                self.kernels[key] = kernel
            self.kernels.move_to_end(key)
            while len(self.kernels) > self._most_kernels:
                self.kernels.popitem(last=False)
        return kernel

    def run(
        self,
        pairing: Pairing,
        problem: Problem,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
    ) -> torch.Tensor:
        """Run a call of `problem` with any token count; return a new tensor.

        Raises every InputError of a kernel's call, and IncompatibleError if the pairing is refused.
        """
        device = x_TH.device
        problem = _with_tokens(problem, plan_capacity(x_TH.shape[0]))
        with current_device(device):
            kernel = self.kernel(pairing, problem, device)
            return kernel(x_TH, weights, convert_ids(kernel, routing))

    def warm_up(self, pairing: Pairing, problem: Problem, device: torch.device) -> None:
        """Make the kernel and plan for problem.tokens, so that such calls only allocate outputs.

        Calls that allocate their own workspace are not prepared (see `modular_kernel.plan`).
        """
        problem = _with_tokens(problem, plan_capacity(problem.tokens))
        with current_device(device):
            self.kernel(pairing, problem, device).reserve_workspace(problem.tokens, device)


def convert_ids(kernel: FusedMoEModularKernel, routing: Routing) -> Routing:
    """Return the routing with ids of the dtype that the kernel requires."""
    dtype = kernel.prepare_finalize.topk_indices_dtype() or kernel.problem.ids_dtype
    ids_TK = routing.topk_ids_TK
    if dtype in (None, ids_TK.dtype) or ids_TK.dtype not in (torch.int32, torch.int64):
        return routing
    return replace(routing, topk_ids_TK=ids_TK.to(dtype))


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` the current GPU, where kernels are launched; a no-op for the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
