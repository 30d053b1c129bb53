"""What every part over ranks checks and hands over, whatever carries its rows."""

import torch

from modular_kernel.contracts import Call
from modular_kernel.errors import ConfigurationError, DeviceError
from modular_kernel.support import Rejection
from modular_kernel.tensors import ContiguousTokens, DispatchedRouting
from modular_kernel.types import IdSpace, Problem


def placement_rejections(part: str, problem: Problem) -> tuple[Rejection, ...]:
    """Why ids could not be turned into this rank's slots; empty if they can."""
    found = []
    held = len(problem.placement.slots[problem.parallel.rank])
    parties = (part, "problem")
    if problem.expert_map:
        hint = "ids are localised by Parallel(placement=...)"
        found.append(Rejection("expert_map", parties, "an expert_map", "a placement", hint))
    if problem.e != held:
        need = f"{held}, as the placement says"
        found.append(Rejection("placement", parties, f"local_experts={problem.e}", need))
    return tuple(found)


def check_place(problem: Problem, rank: int, world_size: int) -> None:
    """ConfigurationError unless a group's size and this process's rank in it are the problem's."""
    parallel = problem.parallel
    if world_size != parallel.world_size:
        need = f"{parallel.world_size}, the problem's world_size"
        raise ConfigurationError("process group's size", got=world_size, need=need)
    if rank != parallel.rank:
        need = f"{parallel.rank}, the problem's parallel.rank"
        raise ConfigurationError("rank in the process group", got=rank, need=need)


def check_device(device: torch.device | str, served: str, backend: str) -> None:
    """DeviceError unless tensors on `device` can be exchanged by a group that serves `served`."""
    kind = torch.device(device).type
    if kind != served:
        need = f"{served}: the group's backend is {backend}"
        raise DeviceError("tensors of an exchange", got=kind, need=need)


def local_tokens(
    problem: Problem,
    call: Call,
    x_RH: torch.Tensor,
    scale: torch.Tensor | None,
    slots_RK: torch.Tensor,
    weights_RK: torch.Tensor,
) -> ContiguousTokens:
    """Rows with local ids (-1: not for this rank), as experts take them."""
    routing = DispatchedRouting(
        topk_weights_TK=weights_RK,
        topk_ids_TK=slots_RK,
        space=IdSpace.LOCAL,
        num_experts=problem.e,
        expert_map=None,
        invalid_ids=call.invalid_ids,
    )
    return ContiguousTokens(x_RH, routing, scale)
