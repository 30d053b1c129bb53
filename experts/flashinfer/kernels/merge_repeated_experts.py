"""Kernel that computes local ids and router weights and merges repeated experts of a token."""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.ids import load_local_ids


@triton.jit
def merge_repeated_experts_kernel(
    ids_ptr, weights_ptr, map_ptr, invalid_ptr, out_ids_ptr, out_weights_ptr,
    num_tokens, num_experts, num_local, stride_ids, stride_weights, factor,
    TOP_K: tl.constexpr, HAS_MAP: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write (T, K) int32 local ids, -1 for a skipped pair, and float32 weights times `factor`.

    Grid: (blocks of BLOCK_T tokens,). If several pairs of a token have the same expert, the first
    pair gets the sum of their weights, added in the order of k. The other pairs get id -1 and
    weight 0, like skipped pairs.

    ids_ptr, map_ptr, num_experts, num_local, HAS_MAP: the expert ids of the pairs; see
        `load_local_ids`.
    weights_ptr: (T, K) float32 router weights, used if HAS_WEIGHTS. Otherwise, the weights are 1.
    invalid_ptr: int32, incremented by the number of ids outside [-1, num_experts).
    out_ids_ptr: output (T, K) int32, contiguous.
    out_weights_ptr: output (T, K) float32, contiguous.
    BLOCK_K: a power of two >= TOP_K.
    """
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    k = tl.arange(0, BLOCK_K)[None, :]
    row_mask, mask = token < num_tokens, (token < num_tokens) & (k < TOP_K)
    ids_row = token.to(tl.int64) * stride_ids
    weights_row = token.to(tl.int64) * stride_weights
    local_expert, is_invalid = load_local_ids(
        ids_ptr, ids_row + k, mask, map_ptr, num_experts, num_local, HAS_MAP
    )
    ones = tl.full((BLOCK_T, BLOCK_K), 1, tl.int32)
    tl.atomic_add(invalid_ptr + (ones - 1), ones, mask=is_invalid, sem="relaxed")
    weight = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    num_earlier_pairs = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    for j in tl.static_range(TOP_K):
        expert_j, _ = load_local_ids(
            ids_ptr, ids_row + j, row_mask, map_ptr, num_experts, num_local, HAS_MAP
        )
        same_expert = mask & (local_expert >= 0) & (expert_j == local_expert)
        if HAS_WEIGHTS:
            weight_j = tl.load(
                weights_ptr + weights_row + j, mask=row_mask & (expert_j >= 0), other=0.0
            )
        else:
            weight_j = tl.full((BLOCK_T, 1), 1.0, tl.float32)
        weight += tl.where(same_expert, weight_j, 0.0)
        num_earlier_pairs += (same_expert & (k > j)).to(tl.int32)
    is_first_pair = (local_expert >= 0) & (num_earlier_pairs == 0)
    out_offsets = token.to(tl.int64) * TOP_K + k
    tl.store(out_ids_ptr + out_offsets, tl.where(is_first_pair, local_expert, -1), mask=mask)
    tl.store(
        out_weights_ptr + out_offsets, tl.where(is_first_pair, weight * factor, 0.0), mask=mask
    )
