"""Random expert maps, from global expert ids to local rows of the weights."""

import torch

from modular_kernel.spec.problem import Problem


def draw_expert_map(problem: Problem, generator: torch.Generator) -> torch.Tensor | None:
    """Draw an expert map, (E,) int32, or return None if the problem has none.

    The local rows 0 to e - 1 are assigned to e randomly chosen experts. The other experts get -1.
    """
    if not problem.expert_map:
        return None
    local_ids = torch.randperm(problem.experts, generator=generator)[: problem.e]
    expert_map = torch.full((problem.experts,), -1, dtype=torch.int32)
    expert_map[local_ids] = torch.arange(problem.e, dtype=torch.int32)
    return expert_map


def replace_skip_values(expert_map: torch.Tensor, num_local: int) -> torch.Tensor:
    """Return a copy of the map in which remote experts have values other than -1.

    Parts must treat any value outside [0, num_local) like -1.
    """
    invalid_rows = torch.tensor(
        [num_local, -1, num_local + 7, -2, 2**31 - 1, -(2**31)], dtype=torch.int32
    )
    remote_ids = (expert_map < 0).nonzero().flatten()
    new_map = expert_map.clone()
    new_map[remote_ids] = invalid_rows[torch.arange(len(remote_ids)) % len(invalid_rows)]
    return new_map
