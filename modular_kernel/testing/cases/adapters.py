"""Adapters of a case: the slots that its tokens use, and the matrices of the slots.

Slots differ in scaling and in rank, which ranges from the problem's rank down to 1. Unused slots
are filled with NaN, because nothing may read them. The standard deviation is about 1 for the
layer's output and about 0.5 for the contribution of an adapter, so that a wrong or missing adapter
is detected.
"""

from typing import Literal

import torch

from modular_kernel.spec.problem import Problem

# Assignments of adapter slots to the tokens of a call.
SLOT_PATTERNS = (
    "mixed",  # a random slot or -1 for each token; with three or more slots, the last is unused
    "sequences",  # runs of five tokens with the same slot, the first run without an adapter
    "nobody",  # -1 for every token
    "without",  # the call passes adapters_T="none"
)
_RUN_LENGTH = 5
_ADAPTER_STD = 0.5


def draw_slots(
    problem: Problem, pattern: str, generator: torch.Generator
) -> torch.Tensor | Literal["none"] | None:
    """Draw `adapters_T` of a routing: (T,) int32, "none" or None.

    None means that the problem has no adapters. "none" means that the call does not use its
    adapters.
    """
    spec, tokens = problem.adapters, problem.tokens
    if spec is None:
        return None
    if pattern == "without":
        return "none"
    if pattern == "nobody":
        return torch.full((tokens,), -1, dtype=torch.int32)
    num_used = spec.adapters - (spec.adapters > 2)
    if pattern == "sequences":
        runs = torch.arange(tokens) // _RUN_LENGTH
        return (runs % (num_used + 1) - 1).to(torch.int32)
    slots_T = torch.randint(-1, num_used, (tokens,), generator=generator)
    if tokens:
        slots_T[0] = num_used - 1  # at least one token has an adapter
    return slots_T.to(torch.int32)


def choose_rank(slot: int, rank: int) -> int:
    """Return the rank of a slot's adapter: `rank`, 2/3 of it, and 1, cyclically by slot."""
    return max(1, (rank, rank * 2 // 3, 1)[slot % 3])


def make_adapters(
    problem: Problem,
    slots_T: torch.Tensor | str | None,
    generator: torch.Generator,
    *,
    with_gaps: bool,
) -> dict[str, torch.Tensor]:
    """Draw the matrices of every slot, keyed by their names in ExpertWeights.

    Returns {} if the problem has no adapters.

    slots_T: the result of `draw_slots`. Slots that do not occur in it get NaN matrices.
    with_gaps: whether to leave gaps, filled with NaN, between the rows of the matrices.
    """
    spec = problem.adapters
    if spec is None:
        return {}
    shapes = spec.shapes(problem.e, problem.w1_rows, problem.hidden, problem.intermediate)
    matrices = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    used_slots = set(slots_T.tolist()) if isinstance(slots_T, torch.Tensor) else set()
    a13, b13, a2, b2 = (matrices[name] for name in shapes)
    for slot in range(spec.adapters):
        rank = choose_rank(slot, spec.rank)
        for a in (a13, a2):  # the matrices of a slot are (e, halves * R, K)
            halves = a[slot].view(a.shape[1], -1, spec.rank, a.shape[-1])
            halves[:, :, rank:] = 0
            halves *= halves.shape[-1] ** -0.5
        for b in (b13, b2):
            b[slot, :, :, rank:] = 0
            b[slot] *= _ADAPTER_STD * rank**-0.5 * (1 + slot % 2)
        if slot not in used_slots:
            for matrix in matrices.values():
                matrix[slot] = torch.nan
    matrices = {name: matrix.to(problem.dtype) for name, matrix in matrices.items()}
    return {name: _add_gaps(m) if with_gaps else m for name, m in matrices.items()}


def _add_gaps(matrix: torch.Tensor) -> torch.Tensor:
    """Copy the matrix into a view of a larger tensor, which is NaN outside of the view."""
    num_slots, experts, rows, columns = matrix.shape
    padded = matrix.new_full((num_slots, experts, rows + 1, columns + 8), torch.nan)
    view = padded[:, :, :rows, :columns]
    view.copy_(matrix)
    return view
