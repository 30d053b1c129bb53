"""Inputs of a case with several ranks: each rank makes the inputs of all ranks and selects its own.

All ranks use the same seed, so no communication is needed. A rank selects its rows of x and the
weights of the experts in its slots.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.cases.inputs import FencedCopier, Inputs, copy_with_gaps
from modular_kernel.validate import ADAPTER_TENSORS

_SHARED_BY_EXPERTS = ("a1_scale", "a2_scale")


def inputs_of_rank(
    global_inputs: Inputs, tokens: slice, problem: Problem, fence: FencedCopier, *, strided: bool
) -> Inputs:
    """Return one rank's inputs: the rows `tokens` and the weights of its experts.

    Each tensor is copied into fenced memory and keeps its layout.

    global_inputs: the result of `make_inputs` for the tokens and experts of all ranks.
    tokens: the rows of this rank.
    problem: the problem of this rank.
    fence: copies a tensor into fenced memory of this rank's device.
    strided: the value that was passed to `make_inputs`.
    """
    rank = problem.parallel.rank
    x_TH, routing = global_inputs.x_TH[tokens], global_inputs.routing
    has_gaps = strided and not problem.inplace
    shared = () if problem.scheme.scales_by_expert else _SHARED_BY_EXPERTS
    weights = _select_experts(global_inputs.weights, problem.placement.slots[rank], shared)
    copies: dict[str, Any] = {
        name: None if tensor is None else _copy_with_layout(tensor, fence)
        for name, tensor in weights.items()
    }
    if problem.expert_map:
        copies["expert_map"] = fence(problem.placement.expert_map(rank))
    return Inputs(
        copy_with_gaps(x_TH, fence) if has_gaps else fence(x_TH),
        ExpertWeights(**copies),
        Routing(
            fence(routing.topk_weights_TK[tokens]),
            fence(routing.topk_ids_TK[tokens]),
            routing.adapters_T if routing.slots_T is None else fence(routing.slots_T[tokens]),
        ),
    )


def _select_experts(
    weights: ExpertWeights, experts: Sequence[int], shared: Sequence[str]
) -> dict[str, torch.Tensor | None]:
    """Return every tensor of the weights by name, restricted to `experts`.

    shared: names of the tensors that have no expert dimension.
    """
    index = torch.tensor(experts)
    tensors = {field.name: getattr(weights, field.name) for field in fields(weights)}
    return {
        name: t if t is None or name in shared else _select(name, t, index)
        for name, t in tensors.items()
    }


def _select(name: str, values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Restrict `values`, the field `name` of ExpertWeights, to the experts in `index`.

    The expert dimension of adapters is the second one. Its size is 1 if experts share a matrix.
    """
    if name not in ADAPTER_TENSORS:
        return _index_experts(values, index)
    return values if values.shape[1] == 1 else values[:, index]


def _index_experts(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return values[index], in the same memory layout."""
    if values.dim() == 3 and values.stride(-1) != 1:
        return values.mT[index].mT
    return values[index]


def _copy_with_layout(values: torch.Tensor, fence: FencedCopier) -> torch.Tensor:
    if values.dim() == 3 and values.stride(-1) != 1:
        return fence(values.mT).mT
    return fence(values)
