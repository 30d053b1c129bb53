"""Maps of experts: which of all are rows of the weights here."""

import torch

from modular_kernel.spec.problem import Problem


def map_of(problem: Problem, generator: torch.Generator) -> torch.Tensor | None:
    """Return e experts chosen at random, in random order, here; -1 for the others."""
    if not problem.expert_map:
        return None
    here = torch.randperm(problem.experts, generator=generator)[: problem.e]
    expert_map = torch.full((problem.experts,), -1, dtype=torch.int32)
    expert_map[here] = torch.arange(problem.e, dtype=torch.int32)
    return expert_map


def in_other_words(expert_map: torch.Tensor, here: int) -> torch.Tensor:
    """Return the same map in other words: what is no row of the `here` ones skips as -1 does."""
    words = torch.tensor([here, -1, here + 7, -2, 2**31 - 1, -(2**31)], dtype=torch.int32)
    away = (expert_map < 0).nonzero().flatten()
    other = expert_map.clone()
    other[away] = words[torch.arange(len(away)) % len(words)]
    return other
