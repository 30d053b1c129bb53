"""Adapters of a case: which slots its tokens name, and the matrices in them.

Slots differ in rank, from the problem's down to 1, and in scaling. A slot that no token names is
full of NaN: nothing may read it. Beside the layer's own rows of a standard deviation of about 1,
an adapter adds rows of about half of it, so that a wrong or a missing one shows.
"""

from typing import Literal

import torch

from modular_kernel.spec.problem import Problem

# How the tokens of a call name the slots of a problem with adapters.
NAMED = (
    "mixed",  # any slot but the last of three or more, or none, from token to token
    "sequences",  # runs of five tokens, the first without
    "nobody",  # -1 alone
    "without",  # the call says that it has no adapters
)
_RUN = 5
_STD = 0.5


def slots(
    problem: Problem, named: str, generator: torch.Generator
) -> torch.Tensor | Literal["none"] | None:
    """Return `adapters_T` of a routing: (T,) int32, or what says that there are none."""
    spec, tokens = problem.adapters, problem.tokens
    if spec is None:
        return None
    if named == "without":
        return "none"
    if named == "nobody":
        return torch.full((tokens,), -1, dtype=torch.int32)
    used = spec.adapters - (spec.adapters > 2)
    if named == "sequences":
        runs = torch.arange(tokens) // _RUN
        return (runs % (used + 1) - 1).to(torch.int32)
    drawn = torch.randint(-1, used, (tokens,), generator=generator)
    if tokens:
        drawn[0] = used - 1  # some token has one, whatever was drawn
    return drawn.to(torch.int32)


def rank_of(slot: int, rank: int) -> int:
    """Return the rank of a slot's adapter: that of the problem, two thirds of it, one, ..."""
    return max(1, (rank, rank * 2 // 3, 1)[slot % 3])


def adapters_of(
    problem: Problem,
    slots_T: torch.Tensor | str | None,
    generator: torch.Generator,
    *,
    spaced: bool,
) -> dict[str, torch.Tensor]:
    """Return the matrices of every slot, by the names of ExpertWeights; none without adapters.

    spaced: slots and experts lie apart, with NaN between them.
    """
    spec = problem.adapters
    if spec is None:
        return {}
    shapes = spec.shapes(problem.e, problem.w1_rows, problem.hidden, problem.intermediate)
    matrices = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    named = set(slots_T.tolist()) if isinstance(slots_T, torch.Tensor) else set()
    a13, b13, a2, b2 = (matrices[name] for name in shapes)
    for slot in range(spec.adapters):
        rank = rank_of(slot, spec.rank)
        for a in (a13, a2):  # (e, halves of R rows, K)
            halves = a[slot].view(a.shape[1], -1, spec.rank, a.shape[-1])
            halves[:, :, rank:] = 0
            halves *= halves.shape[-1] ** -0.5
        for b in (b13, b2):
            b[slot, :, :, rank:] = 0
            b[slot] *= _STD * rank**-0.5 * (1 + slot % 2)
        if slot not in named:
            for matrix in matrices.values():
                matrix[slot] = torch.nan
    typed = {name: matrix.to(problem.dtype) for name, matrix in matrices.items()}
    return {name: _apart(m) if spaced else m for name, m in typed.items()}


def _apart(matrix: torch.Tensor) -> torch.Tensor:
    """Return equal values, one row more and eight columns more apart."""
    slots_, experts, rows, columns = matrix.shape
    room = matrix.new_full((slots_, experts, rows + 1, columns + 8), torch.nan)
    view = room[:, :, :rows, :columns]
    view.copy_(matrix)
    return view
