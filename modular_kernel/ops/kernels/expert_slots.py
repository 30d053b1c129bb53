"""Kernel that renumbers top-k ids for libraries with equal blocks of experts, with the weights."""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.pdl import pdl_wait


@triton.jit
def _join_repeats(
    ids, ids_row, weights_row, mask, k,
    TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the joined weight of each pair, and whether the pair repeats an earlier one.

    Pairs of a token repeat each other if they have the same expert. The joined weight is the sum of
    their weights. Every lane reads the whole row of its token. Those cache lines are loaded anyway,
    whereas comparing lanes with each other would require a layout conversion.
    """
    weight = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    repeat = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    row = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    for j in tl.static_range(TOP_K):
        same = tl.load(ids_row + row + j, mask=mask, other=-1) == ids
        # A skipped pair's weight is arbitrary; it enters no other pair's sum.
        weight += tl.where(same, tl.load(weights_row + row + j, mask=mask, other=0.0), 0.0)
        repeat = tl.where(same & (k > j), 1, repeat)
    return weight, repeat


@triton.jit
def number_pairs(
    program, ids_ptr, weights_ptr, homes_ptr, copies_ptr, numbers_ptr, out_weights_ptr, invalid_ptr,
    num_tokens, num_experts, first_token, world_size, slots, numbers_per_rank, max_copies, factor,
    stride_ids, stride_weights,
    TOP_K: tl.constexpr, JOIN: tl.constexpr, SINKS: tl.constexpr, LINEAR: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """numbers[t, k] = rank * numbers_per_rank + slot of the pair's expert; weights[t, k] *= factor.

    Handles BLOCK_T tokens, as program `program`. Ids are compared in their own width; those outside
    [-1, num_experts) are counted. A pair that is skipped or has an invalid id is dropped. It gets
    number -1 and weight 0.

    ids_ptr, weights_ptr: (num_tokens, TOP_K).
    homes_ptr, copies_ptr: the tables of the placement: (E, max_copies, 2) rank and slot of each
        copy, and (E,) copies.
    numbers_ptr, out_weights_ptr: the outputs, (num_tokens, TOP_K).
    JOIN: a token's first pair with an expert gets the sum of the weights of all of them, and the
        others are dropped.
    SINKS: dropped pairs get numbers after the slots of the ranks, from the rank of first_token on.
    LINEAR: every rank has `slots` experts, in order, so no table is read.
    """
    token = program * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    k = tl.arange(0, BLOCK_K)[None, :]
    in_bounds = (token < num_tokens) & (k < TOP_K)
    ids_row = ids_ptr + token.to(tl.int64) * stride_ids
    weights_row = weights_ptr + token.to(tl.int64) * stride_weights
    ids = tl.load(ids_row + k, mask=in_bounds, other=-1)
    valid = (ids >= 0) & (ids < num_experts)
    # Per lane: reducing first would stall the whole program.
    ones = tl.full((BLOCK_T, BLOCK_K), 1, tl.int32)
    invalid = in_bounds & (ids != -1) & (valid == 0)
    tl.atomic_add(invalid_ptr + (ones - 1), ones, mask=invalid, sem="relaxed")
    if JOIN:
        weight, repeat = _join_repeats(
            ids, ids_row, weights_row, in_bounds, k, TOP_K, BLOCK_T, BLOCK_K
        )
        is_kept = valid & (repeat == 0)
    else:
        weight = tl.load(weights_row + k, mask=in_bounds, other=0.0)
        is_kept = valid
    number = tl.where(valid, ids, 0).to(tl.int64)
    if LINEAR:
        if SINKS:
            number += number // slots * (numbers_per_rank - slots)
    else:
        copies = tl.load(copies_ptr + number, mask=valid, other=1)
        location = (number * max_copies + (token + first_token) % copies) * 2
        rank = tl.load(homes_ptr + location, mask=valid, other=0).to(tl.int64)
        number = rank * numbers_per_rank + tl.load(homes_ptr + location + 1, mask=valid, other=0)
    if SINKS:
        dropped = (in_bounds & (is_kept == 0)).to(tl.int32)
        sink = tl.cumsum(dropped, axis=1) - dropped
        sink_number = (
            (sink + first_token) % world_size * numbers_per_rank + slots + sink // world_size
        )
        number = tl.where(is_kept, number, sink_number)
    else:
        number = tl.where(is_kept, number, -1)
    out = token.to(tl.int64) * TOP_K + k
    tl.store(numbers_ptr + out, number.to(numbers_ptr.dtype.element_ty), mask=in_bounds)
    tl.store(out_weights_ptr + out, tl.where(is_kept, weight, 0.0) * factor, mask=in_bounds)


@triton.jit
def number_pairs_kernel(
    ids_ptr, weights_ptr, homes_ptr, copies_ptr, numbers_ptr, out_weights_ptr, invalid_ptr,
    num_tokens, num_experts, first_token, world_size, slots, numbers_per_rank, max_copies, factor,
    stride_ids, stride_weights,
    TOP_K: tl.constexpr, JOIN: tl.constexpr, SINKS: tl.constexpr, LINEAR: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """Run `number_pairs` in every program, for BLOCK_T tokens each."""
    pdl_wait(OVERLAP)
    number_pairs(
        tl.program_id(0), ids_ptr, weights_ptr, homes_ptr, copies_ptr, numbers_ptr,
        out_weights_ptr, invalid_ptr, num_tokens, num_experts, first_token, world_size, slots,
        numbers_per_rank, max_copies, factor, stride_ids, stride_weights,
        TOP_K, JOIN, SINKS, LINEAR, BLOCK_T, BLOCK_K,
    )  # fmt: skip
