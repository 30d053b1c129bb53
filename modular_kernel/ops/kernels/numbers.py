"""Top-k ids to the numbers that a library of blocks of experts goes by, and their weights."""

import triton
import triton.language as tl


@triton.jit
def number_pairs_kernel(
    ids_ptr, weights_ptr, homes_ptr, copies_ptr, numbers_ptr, out_weights_ptr, invalid_ptr,
    num_tokens, num_experts, first_token, slots, most_copies, factor, stride_ids, stride_weights,
    TOP_K: tl.constexpr, JOIN: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """numbers = rank * slots + slot of each pair's expert, -1 if skipped; weights times factor.

    PLAIN: an expert's number is its id. JOIN: the first pair of a token that names an expert takes
    the weights of all that do, and the others are skipped. A skipped pair's weight is 0. Ids are
    compared in their own width; those outside [-1, num_experts) are counted.
    """
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    k = tl.arange(0, BLOCK_K)[None, :]
    mask = (token < num_tokens) & (k < TOP_K)
    ids = tl.load(ids_ptr + token.to(tl.int64) * stride_ids + k, mask=mask, other=-1)
    live = (ids >= 0) & (ids < num_experts)
    num_invalid = tl.sum(tl.sum((mask & (ids != -1) & ~live).to(tl.int32), axis=1), axis=0)
    if num_invalid > 0:
        tl.atomic_add(invalid_ptr, num_invalid)
    number = tl.where(live, ids, -1).to(tl.int64)
    if not PLAIN:
        copies = tl.load(copies_ptr + number, mask=live, other=1)
        home = (number * most_copies + (token + first_token) % copies) * 2
        rank = tl.load(homes_ptr + home, mask=live, other=0).to(tl.int64)
        slot = tl.load(homes_ptr + home + 1, mask=live, other=0).to(tl.int64)
        number = tl.where(live, rank * slots + slot, -1)
    given = weights_ptr + token.to(tl.int64) * stride_weights + k
    weight = tl.load(given, mask=mask & live, other=0.0)
    if JOIN:
        same = number[:, :, None] == number[:, None, :]
        joined = tl.sum(tl.where(same, weight[:, None, :], 0.0), axis=2)
        # Of lane j < lane k, in the shape of `same`: [tokens, k, j].
        lane = tl.arange(0, BLOCK_K)
        before = (lane[None, :] < lane[:, None])[None, :, :]
        repeat = tl.sum((same & before).to(tl.int32), axis=2) > 0
        kept = live & ~repeat
        number = tl.where(kept, number, -1)
        weight = tl.where(kept, joined, 0.0)
    out = token.to(tl.int64) * TOP_K + k
    tl.store(numbers_ptr + out, number, mask=mask)
    tl.store(out_weights_ptr + out, weight * factor, mask=mask)
