"""Kernel that renumbers top-k ids for libraries with equal blocks of experts, with the weights."""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.pdl import pdl_wait


@triton.jit
def _merge_repeats(
    ids, ids_row, weights_row, mask, k,
    TOP_K: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_TOP_K: tl.constexpr,
):  # fmt: skip
    """Return the joined weight of each pair, and whether the pair repeats an earlier one.

    Pairs of a token repeat each other if they have the same expert. The joined weight is the sum of
    their weights. Every lane reads the whole row of its token. Those cache lines are loaded anyway,
    whereas comparing lanes with each other would require a layout conversion.
    """
    weight = tl.zeros((BLOCK_TOKENS, BLOCK_TOP_K), tl.float32)
    repeat = tl.zeros((BLOCK_TOKENS, BLOCK_TOP_K), tl.int32)
    row = tl.zeros((BLOCK_TOKENS, BLOCK_TOP_K), tl.int32)
    for j in tl.static_range(TOP_K):
        same = tl.load(ids_row + row + j, mask=mask, other=-1) == ids
        # A skipped pair's weight is arbitrary; it enters no other pair's sum.
        weight += tl.where(same, tl.load(weights_row + row + j, mask=mask, other=0.0), 0.0)
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
    """numbers[t, k] = rank * numbers_per_rank + slot of the pair's expert; weights[t, k] *= factor.

    Handles BLOCK_TOKENS tokens, as program `program`. Ids are compared in their own width; those
    outside
    [-1, num_experts) are counted. A pair that is skipped or has an invalid id is dropped. It gets
    number -1 and weight 0.

    topk_ids_ptr, router_weights_ptr: (num_tokens, TOP_K).
    expert_locations_ptr, num_copies_ptr: the tables of the placement: (E, max_copies, 2) rank and
        slot of each
        copy, and (E,) copies.
    expert_numbers_ptr, out_router_weights_ptr: the outputs, (num_tokens, TOP_K).
    MERGE_REPEATS: a token's first pair with an expert gets the sum of the weights of all of them,
        and the
        others are dropped.
    HAS_SINKS: dropped pairs get numbers after the slots of the ranks, from the rank of first_token
        on.
    LINEAR_PLACEMENT: every rank has `slots` experts, in order, so no table is read.
    """
    token = program * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)[:, None]
    k = tl.arange(0, BLOCK_TOP_K)[None, :]
    in_bounds = (token < num_tokens) & (k < TOP_K)
    ids_row = topk_ids_ptr + token.to(tl.int64) * stride_ids
    weights_row = router_weights_ptr + token.to(tl.int64) * stride_weights
    ids = tl.load(ids_row + k, mask=in_bounds, other=-1)
    valid = (ids >= 0) & (ids < num_experts)
    # Per lane: reducing first would stall the whole program.
    ones = tl.full((BLOCK_TOKENS, BLOCK_TOP_K), 1, tl.int32)
    invalid = in_bounds & (ids != -1) & (valid == 0)
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
        sink = tl.cumsum(dropped, axis=1) - dropped
        sink_number = (
            (sink + first_token) % world_size * numbers_per_rank
            + slots_per_rank
            + sink // world_size
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
    """Run `number_pairs` in every program, for BLOCK_TOKENS tokens each."""
    pdl_wait(USE_PDL)
    number_pairs(
        tl.program_id(0), topk_ids_ptr, router_weights_ptr, expert_locations_ptr, num_copies_ptr,
        expert_numbers_ptr,
        out_router_weights_ptr, invalid_count_ptr, num_tokens, num_experts, first_token,
        world_size, slots_per_rank,
        numbers_per_rank, max_copies, weight_factor, stride_ids, stride_weights,
        TOP_K, MERGE_REPEATS, HAS_SINKS, LINEAR_PLACEMENT, BLOCK_TOKENS, BLOCK_TOP_K,
    )  # fmt: skip
