"""Kernel that renumbers the experts of pairs for libraries that exchange tokens between ranks.

`modular_kernel.ops.expert_slots` explains the numbering. A pair is a token together with one of its
top_k experts: pair p belongs to token p // top_k. A slot is the place of an expert in the weights
of a rank. An expert may have copies in several slots. A sink is an additional number of a rank that
does not belong to any expert.
"""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.pdl import pdl_wait


@triton.jit
def _merge_repeats(
    ids, ids_row, weights_row, mask, k,
    TOP_K: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_TOP_K: tl.constexpr,
):  # fmt: skip
    """Return the merged router weight of each pair, and whether the pair repeats an earlier one.

    A pair repeats an earlier pair of its token if both have the same expert. The merged weight is
    the sum of the weights of all pairs of the token with that expert.

    ids: (BLOCK_TOKENS, BLOCK_TOP_K), the id of each pair.
    ids_row, weights_row: (BLOCK_TOKENS, 1), pointers to the ids and weights of each token.
    mask: False for pairs that do not exist.
    k: (1, BLOCK_TOP_K), the index of each pair among the pairs of its token.
    """
    weight = tl.zeros((BLOCK_TOKENS, BLOCK_TOP_K), tl.float32)
    repeat = tl.zeros((BLOCK_TOKENS, BLOCK_TOP_K), tl.int32)
    zeros = tl.zeros((BLOCK_TOKENS, BLOCK_TOP_K), tl.int32)
    # Every lane loads the whole row of its token, whose cache lines are loaded anyway. Comparing
    # lanes with each other would require a layout conversion.
    for j in tl.static_range(TOP_K):
        same = tl.load(ids_row + zeros + j, mask=mask, other=-1) == ids
        # The weight of a skipped pair may have any value. Only skipped pairs have its id, so the
        # value does not affect the sums of other pairs.
        weight += tl.where(same, tl.load(weights_row + zeros + j, mask=mask, other=0.0), 0.0)
        repeat = tl.where(same & (k > j), 1, repeat)
    return weight, repeat


@triton.jit
def number_pairs(
    program, topk_ids_ptr, router_weights_ptr, expert_locations_ptr, num_copies_ptr,
    expert_numbers_ptr, out_router_weights_ptr, invalid_count_ptr,
    num_tokens, num_experts, first_token, world_size, slots_per_rank, numbers_per_rank, max_copies,
    weight_factor,
    stride_ids, stride_weights,
    TOP_K: tl.constexpr, MERGE_REPEATS: tl.constexpr, HAS_SINKS: tl.constexpr,
    LINEAR_PLACEMENT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_TOP_K: tl.constexpr,
):  # fmt: skip
    """Write the expert number rank * numbers_per_rank + slot and the scaled weight of each pair.

    The program with index `program` handles BLOCK_TOKENS tokens. A pair is dropped if its id is -1
    or invalid, that is, outside [-1, num_experts). It gets the number -1 or the number of a sink,
    and the weight 0.

    topk_ids_ptr, router_weights_ptr: (num_tokens, TOP_K); rows are stride_ids and stride_weights
        apart.
    expert_locations_ptr: (num_experts, max_copies, 2) integers, the rank and the slot of each copy
        of each expert.
    num_copies_ptr: (num_experts,) integers, the number of copies of each expert. Token t uses copy
        (t + first_token) % copies.
    expert_numbers_ptr: integer output (num_tokens, TOP_K), contiguous.
    out_router_weights_ptr: float32 output (num_tokens, TOP_K), contiguous.
    invalid_count_ptr: int32, incremented by the number of invalid ids.
    slots_per_rank: number of slots of each rank.
    numbers_per_rank: number of slots and sinks of each rank.
    weight_factor: factor of the router weights.
    MERGE_REPEATS: whether to merge pairs of a token with the same expert. The first pair then gets
        the sum of their weights, and the other pairs are dropped.
    HAS_SINKS: whether dropped pairs get numbers of sinks. The first dropped pair of a token gets a
        sink of rank first_token % world_size, the next pair a sink of the next rank, and so on.
    LINEAR_PLACEMENT: whether every rank has slots_per_rank experts, in order. The locations of
        experts are then not read.
    BLOCK_TOP_K: a power of two >= TOP_K.
    """
    token = program * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)[:, None]
    k = tl.arange(0, BLOCK_TOP_K)[None, :]
    in_bounds = (token < num_tokens) & (k < TOP_K)
    ids_row = topk_ids_ptr + token.to(tl.int64) * stride_ids
    weights_row = router_weights_ptr + token.to(tl.int64) * stride_weights
    ids = tl.load(ids_row + k, mask=in_bounds, other=-1)
    valid = (ids >= 0) & (ids < num_experts)
    ones = tl.full((BLOCK_TOKENS, BLOCK_TOP_K), 1, tl.int32)
    invalid = in_bounds & (ids != -1) & (valid == 0)
    # Each lane adds its own count, because a sum over lanes would stall the whole program.
    tl.atomic_add(invalid_count_ptr + (ones - 1), ones, mask=invalid, sem="relaxed")
    if MERGE_REPEATS:
        weight, repeat = _merge_repeats(
            ids, ids_row, weights_row, in_bounds, k, TOP_K, BLOCK_TOKENS, BLOCK_TOP_K
        )
        is_kept = valid & (repeat == 0)
    else:
        weight = tl.load(weights_row + k, mask=in_bounds, other=0.0)
        is_kept = valid
    number = tl.where(valid, ids, 0).to(tl.int64)
    if LINEAR_PLACEMENT:
        if HAS_SINKS:
            number += number // slots_per_rank * (numbers_per_rank - slots_per_rank)
    else:
        copies = tl.load(num_copies_ptr + number, mask=valid, other=1)
        location = (number * max_copies + (token + first_token) % copies) * 2
        rank = tl.load(expert_locations_ptr + location, mask=valid, other=0).to(tl.int64)
        number = rank * numbers_per_rank + tl.load(
            expert_locations_ptr + location + 1, mask=valid, other=0
        )
    if HAS_SINKS:
        dropped = (in_bounds & (is_kept == 0)).to(tl.int32)
        drop_index = tl.cumsum(dropped, axis=1) - dropped
        sink_number = (
            (drop_index + first_token) % world_size * numbers_per_rank
            + slots_per_rank
            + drop_index // world_size
        )
        number = tl.where(is_kept, number, sink_number)
    else:
        number = tl.where(is_kept, number, -1)
    out = token.to(tl.int64) * TOP_K + k
    tl.store(
        expert_numbers_ptr + out, number.to(expert_numbers_ptr.dtype.element_ty), mask=in_bounds
    )
    tl.store(
        out_router_weights_ptr + out, tl.where(is_kept, weight, 0.0) * weight_factor, mask=in_bounds
    )


@triton.jit
def number_pairs_kernel(
    topk_ids_ptr, router_weights_ptr, expert_locations_ptr, num_copies_ptr, expert_numbers_ptr,
    out_router_weights_ptr, invalid_count_ptr,
    num_tokens, num_experts, first_token, world_size, slots_per_rank, numbers_per_rank, max_copies,
    weight_factor,
    stride_ids, stride_weights,
    TOP_K: tl.constexpr, MERGE_REPEATS: tl.constexpr, HAS_SINKS: tl.constexpr,
    LINEAR_PLACEMENT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_TOP_K: tl.constexpr, USE_PDL: tl.constexpr = False,
):  # fmt: skip
    """Run `number_pairs` in every program, for BLOCK_TOKENS tokens each.

    USE_PDL: whether the launch uses programmatic dependent launch (`pdl_wait`).
    """
    pdl_wait(USE_PDL)
    number_pairs(
        tl.program_id(0), topk_ids_ptr, router_weights_ptr, expert_locations_ptr, num_copies_ptr,
        expert_numbers_ptr,
        out_router_weights_ptr, invalid_count_ptr, num_tokens, num_experts, first_token,
        world_size, slots_per_rank,
        numbers_per_rank, max_copies, weight_factor, stride_ids, stride_weights,
        TOP_K, MERGE_REPEATS, HAS_SINKS, LINEAR_PLACEMENT, BLOCK_TOKENS, BLOCK_TOP_K,
    )  # fmt: skip
