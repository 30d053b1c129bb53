"""Runs one layer's experts in a workspace that vLLM provides.

Before each call, vLLM requests the size of the workspace. It then passes memory of at least this
size, which all layers share. The address of the memory does not change in CUDA graphs.
"""

from dataclasses import replace
from functools import lru_cache

import torch

from modular_kernel import validate
from modular_kernel.catalog import load_catalog, make_kernel
from modular_kernel.contracts import PermuteExpertsUnpermute
from modular_kernel.integrations.runner_dispatched import check_rows
from modular_kernel.integrations.vllm.prepared_copy import PreparedCopy
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.operators.kernel_cache import NO_EP
from modular_kernel.plan import plan_capacity
from modular_kernel.replay import modes
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.tensors import BatchedShape, BatchedTokens, ExpertWeights, Routing
from modular_kernel.workspace import BufferSpec, Workspace, workspace_bytes


class StandardCalls:
    """Runs calls with tokens and their routing, from x (T, H) to the layer's output (T, H).

    problem: the problem of the layer. Each call replaces its `tokens` and `top_k`.
    part: name of the experts part.
    machine: the machine that vLLM runs on.
    """

    def __init__(self, problem: Problem, part: str, machine: Machine) -> None:
        self.problem, self.part, self.machine = problem, part, machine
        self._kernels: dict[tuple[int, int], FusedMoEModularKernel] = {}

    def get_kernel(self, tokens: int, top_k: int) -> FusedMoEModularKernel:
        """Return the kernel for calls with this number of tokens and this K."""
        key = plan_capacity(tokens), top_k
        kernel = self._kernels.get(key)
        if kernel is None:
            problem = replace(self.problem, tokens=key[0], top_k=top_k)
            kernel = _make_kernel(problem, self.part, self.machine, _get_device(self.machine))
            self._kernels[key] = kernel
        return kernel

    def workspace_bytes(self, tokens: int, top_k: int) -> int:
        """Return the size of the workspace that a call needs, in bytes."""
        return workspace_bytes(self.get_kernel(tokens, top_k).workspace_specs(tokens))

    def prepare(self, weights: ExpertWeights, copy: PreparedCopy) -> None:
        """Write a prepared copy of the weights, if the experts part reads one.

        Raises an InputError if a weight does not match.
        """
        problem = self.problem
        kernel = self.get_kernel(problem.tokens, problem.top_k)
        device = weights.w1.device
        no_tokens = torch.empty(0, problem.hidden, dtype=problem.dtype, device=device)
        validate.check_weights(weights, no_tokens, kernel.problem)
        copy.write(weights, kernel.experts)

    @modes.disable_tracing
    def __call__(
        self,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        *,
        memory: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write the layer's output to `out`.

        memory: uint8, at least `workspace_bytes` long.

        Raises an InputError before anything is launched if a tensor does not match.
        """
        tokens, top_k = routing.topk_ids_TK.shape
        kernel = self.get_kernel(tokens, top_k)
        weights = kernel.check(x_TH, weights, routing, out)
        workspace = Workspace(kernel.workspace_specs(tokens), x_TH.device, memory=memory)
        kernel.start_checked(x_TH, weights, routing, out, workspace, at_once=True).finish()


class BatchedCalls:
    """Runs calls with rows grouped by expert, from x (e, C, H) to unweighted rows (e, C, H)."""

    def __init__(self, problem: Problem, part: str) -> None:
        self.problem, self.part = problem, part
        self._experts = _make_batched_experts(problem, part)
        self._checked_weights: ExpertWeights | None = None

    def _get_buffer_specs(self, experts: int, capacity: int) -> dict[str, BufferSpec]:
        return self._experts.workspace_shapes(BatchedShape(experts, capacity)).buffers()

    def prepare(self, weights: ExpertWeights, copy: PreparedCopy) -> None:
        """Do nothing, because parts for rows grouped by expert do not prepare weights."""

    def workspace_bytes(self, experts: int, capacity: int) -> int:
        """Return the size of the workspace of a call with `capacity` rows per expert, in bytes."""
        return workspace_bytes(self._get_buffer_specs(experts, capacity))

    @modes.disable_tracing
    @modes.disable_autocast
    def __call__(
        self,
        tokens: BatchedTokens,
        weights: ExpertWeights,
        *,
        memory: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write the experts' rows to `out`.

        memory: uint8, at least `workspace_bytes` long.

        Raises an InputError if rows, their scales or a weight do not match.
        """
        x_eCH = tokens.x_eCH
        check_rows(x_eCH, tokens.scale, self.problem)
        if weights is not self._checked_weights:
            validate.check_weights(weights, x_eCH, self.problem)
            self._checked_weights = weights
        workspace = Workspace(self._get_buffer_specs(*x_eCH.shape[:2]), x_eCH.device, memory=memory)
        self._experts.apply(tokens, weights=weights, workspace=workspace, output=out)


def _get_device(machine: Machine) -> torch.device:
    if machine.device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


@lru_cache(maxsize=256)
def _make_kernel(
    problem: Problem, part: str, machine: Machine, device: torch.device
) -> FusedMoEModularKernel:
    """Create the kernel for a device. Layers of the same sizes share a kernel.

    The kernel does not prepare weights automatically, because torch does not track how vLLM writes
    weights. Instead, a `PreparedCopy` is written after vLLM has loaded weights.
    """
    kernel = make_kernel(NO_EP, part, problem, machine=machine, auto_prepare=False)
    kernel.count_invalid_ids_on(device)  # allocates, so it must not run during graph capture
    return kernel


@lru_cache(maxsize=256)
def _make_batched_experts(problem: Problem, part: str) -> PermuteExpertsUnpermute:
    return load_catalog().experts(part)(problem)
