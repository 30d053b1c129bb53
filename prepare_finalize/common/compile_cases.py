"""Problems and meta tensors with which `mk compile` compiles the kernels of exchange components."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from modular_kernel.spec.problem import Parallel, Problem

META = torch.device("meta")
_BASE = Problem(64, 7168, 2048, experts=8, top_k=8, parallel=Parallel(2, rank=1))
_CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"tokens": 4096, "parallel": Parallel(4, rank=3)},
    {"quant": "fp8_w8a8_block"},
    {"quant": "fp8_w8a8_channel", "tokens": 1024},
    {"quant": "int8_w8a8_block:block=96x96", "hidden": 2880},
)


def problems_with(changes: Sequence[Mapping[str, Any]]) -> tuple[Problem, ...]:
    """Return problems that cover all launch shapes and kinds of scales, and one for each change.

    changes: changed fields of the base problem, one mapping per additional problem.
    """
    return tuple(replace(_BASE, **change) for change in (*_CHANGES, *changes))


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Return a meta tensor."""
    return torch.empty(shape, dtype=dtype, device=META)
