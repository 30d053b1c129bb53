"""Inputs of a case over ranks: made for all ranks, of which each rank takes its share.

Every rank makes the same inputs from the same seed, so nothing has to be sent. Its tokens are some
rows of x, its weights those of the experts in its slots.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.cases.inputs import FencedMemory, Inputs, with_gaps
from modular_kernel.validate import ADAPTER_TENSORS

_OF_ALL_EXPERTS = ("a1_scale", "a2_scale")


def inputs_of_rank(
    whole: Inputs, tokens: slice, problem: Problem, place: FencedMemory, *, strided: bool
) -> Inputs:
    """Return one rank's inputs: the rows `tokens` and the weights of its experts.

    problem: the rank's. whole, strided: the result of `make_inputs` and its argument. Each tensor
    is a copy in `place` with the layout of the whole.
    """
    rank = problem.parallel.rank
    x_TH, routing = whole.x_TH[tokens], whole.routing
    gaps = strided and not problem.inplace
    of_all = () if problem.scheme.scales_by_expert else _OF_ALL_EXPERTS
    weights = _select_experts(whole.weights, problem.placement.slots[rank], of_all)
    placed: dict[str, Any] = {
        name: None if tensor is None else _laid_out(tensor, place)
        for name, tensor in weights.items()
    }
    if problem.expert_map:
        placed["expert_map"] = place(problem.placement.expert_map(rank))
    return Inputs(
        with_gaps(x_TH, place) if gaps else place(x_TH),
        ExpertWeights(**placed),
        Routing(
            place(routing.topk_weights_TK[tokens]),
            place(routing.topk_ids_TK[tokens]),
            routing.adapters_T if routing.slots_T is None else place(routing.slots_T[tokens]),
        ),
    )


def _select_experts(
    weights: ExpertWeights, experts: Sequence[int], of_all: Sequence[str]
) -> dict[str, torch.Tensor | None]:
    """Return every tensor of the weights, restricted to these experts.

    of_all: names of the tensors that all experts share.
    """
    index = torch.tensor(experts)
    tensors = {field.name: getattr(weights, field.name) for field in fields(weights)}
    return {
        name: t if t is None or name in of_all else _select(name, t, index)
        for name, t in tensors.items()
    }


def _select(name: str, values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the rank's part of a tensor.

    The expert dimension of adapters is the second, of size 1 where experts share one matrix.
    """
    if name not in ADAPTER_TENSORS:
        return _index(values, index)
    return values if values.shape[1] == 1 else values[:, index]


def _index(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return values[index] in the memory layout of `values`, which may be transposed."""
    if values.dim() == 3 and values.stride(-1) != 1:
        return values.mT[index].mT
    return values[index]


def _laid_out(values: torch.Tensor, place: FencedMemory) -> torch.Tensor:
    if values.dim() == 3 and values.stride(-1) != 1:
        return place(values.mT).mT
    return place(values)
