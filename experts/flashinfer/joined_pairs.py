"""joined_pairs: routing as a library takes it that cannot have an expert twice in a token.

Two pairs of a token that name one expert have the same row, so one pair with both weights does.
"""

import torch

from modular_kernel.ops.count import next_power_of_2
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.runtime import use_triton
from modular_kernel.tensors import DispatchedRouting

_PAIRS = 128  # of a program


def joined_pairs(
    routing: DispatchedRouting,
    num_local: int,
    *,
    factor: float,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
) -> None:
    """Write local ids int32, -1 for a skipped pair, and float32 weights times `factor`.

    The first pair of a token that names an expert takes the weights of all that do; the others are
    skipped. Weights are 1 where the routing has none. Ids that name no expert are counted.
    """
    if not use_triton(ids_TK):
        joined_pairs_ref(routing, num_local, factor=factor, ids_TK=ids_TK, weights_TK=weights_TK)
        return
    from experts.flashinfer.kernels.joined_pairs import joined_pairs_kernel

    given, router, placed = routing.topk_ids_TK, routing.topk_weights_TK, routing.expert_map
    tokens, top_k = given.shape
    block_k = next_power_of_2(top_k)
    block_t = max(1, _PAIRS // block_k)
    launch(
        joined_pairs_kernel,
        (-(-tokens // block_t),),
        ids_ptr=given,
        weights_ptr=weights_TK if router is None else router,
        map_ptr=ids_TK if placed is None else placed,
        invalid_ptr=routing.invalid_ids,
        out_ids_ptr=ids_TK,
        out_weights_ptr=weights_TK,
        num_tokens=tokens,
        num_experts=routing.num_experts,
        num_local=num_local,
        stride_ids=given.stride(0),
        stride_weights=0 if router is None else router.stride(0),
        factor=float(factor),
        TOP_K=top_k,
        HAS_MAP=placed is not None,
        HAS_WEIGHTS=router is not None,
        BLOCK_T=block_t,
        BLOCK_K=block_k,
    )


def joined_pairs_ref(
    routing: DispatchedRouting,
    num_local: int,
    *,
    factor: float,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
) -> None:
    """Torch twin of `joined_pairs`."""
    given, router = routing.topk_ids_TK, routing.topk_weights_TK
    named = (given >= 0) & (given < routing.num_experts)
    routing.invalid_ids.add_(((given != -1) & ~named).sum())
    local = torch.where(named, given, 0).long()
    if routing.expert_map is not None:
        local = routing.expert_map.long()[local]
    local = torch.where(named & (local >= 0) & (local < num_local), local, -1)
    live = local >= 0
    weights = torch.ones_like(weights_TK) if router is None else router
    weights = weights.masked_fill(~live, 0)  # of a skipped pair: anything
    total, repeat = torch.zeros_like(weights_TK), torch.zeros_like(live)
    for j in range(given.shape[1]):
        same = live & (local == local[:, j : j + 1])
        total += torch.where(same, weights[:, j : j + 1], 0)
        repeat[:, j + 1 :] |= same[:, j + 1 :]
    kept = live & ~repeat
    ids_TK.copy_(torch.where(kept, local, -1))
    weights_TK.copy_(torch.where(kept, total * factor, 0))
