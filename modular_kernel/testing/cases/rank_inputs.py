"""Inputs of a case over ranks: made for the whole world, of which each rank takes its part.

Every rank makes the same whole from the same seed, so nothing has to be sent: its tokens are some
rows of it, its weights those of the experts in its slots.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.cases.inputs import Inputs, Place, with_gaps
from modular_kernel.validate import ADAPTER_TENSORS

_OF_ALL_EXPERTS = ("a1_scale", "a2_scale")


def part_of(
    whole: Inputs, tokens: slice, problem: Problem, place: Place, *, strided: bool
) -> Inputs:
    """Return what one rank passes: `tokens` of the whole world's, and the weights that it holds.

    problem: the rank's. whole, strided: as `make_inputs` made it, and was told. Each tensor is a
    copy in `place`, laid out as the whole's.
    """
    rank = problem.parallel.rank
    x_TH, routing = whole.x_TH[tokens], whole.routing
    gaps = strided and not problem.inplace
    of_all = () if problem.scheme.scales_by_expert else _OF_ALL_EXPERTS
    weights = _rows(whole.weights, problem.placement.slots[rank], of_all)
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


def _rows(
    weights: ExpertWeights, experts: Sequence[int], of_all: Sequence[str]
) -> dict[str, torch.Tensor | None]:
    """Every tensor of the weights, of these experts alone. of_all: what they share."""
    index = torch.tensor(experts)
    tensors = {field.name: getattr(weights, field.name) for field in fields(weights)}
    return {
        name: t if t is None or name in of_all else _of_experts(name, t, index)
        for name, t in tensors.items()
    }


def _of_experts(name: str, values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the rank's part; experts of adapters come second, 1 where they share one."""
    if name not in ADAPTER_TENSORS:
        return _take(values, index)
    return values if values.shape[1] == 1 else values[:, index]


def _take(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """values[index], transposed if `values` is."""
    if values.dim() == 3 and values.stride(-1) != 1:
        return values.mT[index].mT
    return values[index]


def _laid_out(values: torch.Tensor, place: Place) -> torch.Tensor:
    if values.dim() == 3 and values.stride(-1) != 1:
        return place(values.mT).mT
    return place(values)
