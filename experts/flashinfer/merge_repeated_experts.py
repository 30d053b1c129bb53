"""merge_repeated_experts: merge the pairs of a token that have the same expert.

FlashInfer does not support repeated experts. The expert's output is the same for all of these
pairs, so one pair with the sum of their router weights can replace them.
"""

import torch

from modular_kernel.ops.count import next_power_of_2
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.runtime import use_triton
from modular_kernel.tensors import DispatchedRouting

_PAIRS_PER_PROGRAM = 128


def merge_repeated_experts(
    routing: DispatchedRouting,
    num_local: int,
    *,
    factor: float,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
) -> None:
    """Write local expert ids and router weights in which no token has an expert twice.

    If several pairs of a token have the same expert, the first pair gets the sum of their router
    weights, and the other pairs are skipped. Router weights are 1 if the routing has none. Ids
    outside [-1, num_experts) are counted in `routing.invalid_ids`.

    num_local: number of local experts.
    ids_TK: output (T, K) int32, local ids, -1 for a skipped pair.
    weights_TK: output (T, K) float32, router weights times `factor`.
    """
    if not use_triton(ids_TK):
        merge_repeated_experts_ref(
            routing, num_local, factor=factor, ids_TK=ids_TK, weights_TK=weights_TK
        )
        return
    from experts.flashinfer.kernels.merge_repeated_experts import merge_repeated_experts_kernel

    topk_ids_TK, topk_weights_TK, expert_map = (
        routing.topk_ids_TK,
        routing.topk_weights_TK,
        routing.expert_map,
    )
    num_tokens, top_k = topk_ids_TK.shape
    block_k = next_power_of_2(top_k)
    block_t = max(1, _PAIRS_PER_PROGRAM // block_k)
    launch(
        merge_repeated_experts_kernel,
        (-(-num_tokens // block_t),),
        ids_ptr=topk_ids_TK,
        weights_ptr=weights_TK if topk_weights_TK is None else topk_weights_TK,
        map_ptr=ids_TK if expert_map is None else expert_map,
        invalid_ptr=routing.invalid_ids,
        out_ids_ptr=ids_TK,
        out_weights_ptr=weights_TK,
        num_tokens=num_tokens,
        num_experts=routing.num_experts,
        num_local=num_local,
        stride_ids=topk_ids_TK.stride(0),
        stride_weights=0 if topk_weights_TK is None else topk_weights_TK.stride(0),
        factor=float(factor),
        TOP_K=top_k,
        HAS_MAP=expert_map is not None,
        HAS_WEIGHTS=topk_weights_TK is not None,
        BLOCK_T=block_t,
        BLOCK_K=block_k,
    )


def merge_repeated_experts_ref(
    routing: DispatchedRouting,
    num_local: int,
    *,
    factor: float,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
) -> None:
    """PyTorch reference for `merge_repeated_experts`."""
    topk_ids_TK, topk_weights_TK = routing.topk_ids_TK, routing.topk_weights_TK
    is_valid = (topk_ids_TK >= 0) & (topk_ids_TK < routing.num_experts)
    routing.invalid_ids.add_(((topk_ids_TK != -1) & ~is_valid).sum())
    local_ids = torch.where(is_valid, topk_ids_TK, 0).long()
    if routing.expert_map is not None:
        local_ids = routing.expert_map.long()[local_ids]
    local_ids = torch.where(is_valid & (local_ids >= 0) & (local_ids < num_local), local_ids, -1)
    is_local = local_ids >= 0
    weights = torch.ones_like(weights_TK) if topk_weights_TK is None else topk_weights_TK
    weights = weights.masked_fill(~is_local, 0)  # weights of skipped pairs may have any value
    total, is_repeated = torch.zeros_like(weights_TK), torch.zeros_like(is_local)
    for j in range(topk_ids_TK.shape[1]):
        same_expert = is_local & (local_ids == local_ids[:, j : j + 1])
        total += torch.where(same_expert, weights[:, j : j + 1], 0)
        is_repeated[:, j + 1 :] |= same_expert[:, j + 1 :]
    is_first_pair = is_local & ~is_repeated
    ids_TK.copy_(torch.where(is_first_pair, local_ids, -1))
    weights_TK.copy_(torch.where(is_first_pair, total * factor, 0))
