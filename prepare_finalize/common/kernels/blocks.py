"""Kernels that fill, read and sum blocks of rows; see `common.blocks` for their layout.

An expert number identifies an expert on any rank: slot s of rank r has the number r * slots + s.
The kernels also update the counters of calls and the headers of the device handshake
(`kernels.headers`).
"""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.pdl import pdl_wait
from prepare_finalize.common.kernels.headers import (
    PADDED_FIELDS,
    SENT,
    count_begin,
    count_end,
    count_exchange,
    count_received,
    new_header,
    verify_headers,
)


@triton.jit
def _load_expert_numbers(
    expert_numbers_ptr, token, tokens, stride_expert_numbers, total_slots,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the expert numbers of N tokens, (N, BLOCK_K) int32, and a mask of invalid numbers.

    Skipped pairs and pairs with an invalid number, outside [-1, total_slots), get -1. Numbers are
    compared before they are converted, because a conversion could make an invalid int64 valid.

    token: (N,).
    total_slots: number of slots of all ranks.
    """
    k = tl.arange(0, BLOCK_K)[None, :]
    mask = (token < tokens)[:, None] & (k < TOP_K)
    row = expert_numbers_ptr + token.to(tl.int64)[:, None] * stride_expert_numbers
    number = tl.load(row + k, mask=mask, other=-1)
    in_range = (number >= 0) & (number < total_slots)
    invalid = mask & (in_range == 0) & (number != -1)
    return tl.where(in_range, number, -1).to(tl.int32), invalid


@triton.jit
def _needs_rank(number, rank, slots):
    """Return whether each token has an expert on `rank`, (N,) int32.

    number: (N, BLOCK_K), expert numbers.
    """
    is_on_rank = (number >= 0) & (number // slots == rank)
    return tl.max(is_on_rank.to(tl.int32), axis=1)  # NaN-free: integer operands


@triton.jit
def _count_rows(
    expert_numbers_ptr, end, stride_expert_numbers, total_slots, rank, slots,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Return how many of the first `end` tokens have an expert on `rank`."""
    count = tl.full((), 0, tl.int32)
    for first in range(0, end, SCAN):
        token = first + tl.arange(0, SCAN)
        number, _ = _load_expert_numbers(
            expert_numbers_ptr, token, end, stride_expert_numbers, total_slots, TOP_K, BLOCK_K
        )
        count += tl.sum(_needs_rank(number, rank, slots), axis=0)
    return count


@triton.jit
def _fill_headers(
    expert_numbers_ptr, header_blocks_ptr, header_ptr, calls_ptr, counters_ptr, layer, refusal,
    tokens, rank, local_block, slots, stride_expert_numbers, total_slots, header_block_stride,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, WORLD: tl.constexpr, PADDED: tl.constexpr,
    SINGLE_BLOCK: tl.constexpr, SCAN: tl.constexpr, NUM_FIELDS: tl.constexpr,
):  # fmt: skip
    """Write the header of a call to header_ptr, and to each block with its number of rows."""
    w = tl.arange(0, PADDED)
    counts = tl.zeros((PADDED,), tl.int32) + tokens
    if not SINGLE_BLOCK:
        for peer in range(WORLD):
            count = _count_rows(
                expert_numbers_ptr, tokens, stride_expert_numbers, total_slots, peer, slots,
                TOP_K, BLOCK_K, SCAN,
            )  # fmt: skip
            counts = tl.where(w == peer, count, counts)
        counts = tl.where(w < WORLD, counts, 0)
    rows = tl.max(counts, axis=0)  # NaN-free: integer operands
    header = new_header(calls_ptr, counters_ptr, layer, tokens, rows, refusal)
    field = tl.arange(0, PADDED_FIELDS)
    tl.store(header_ptr + field, header, mask=field < NUM_FIELDS)
    block = tl.where(w == rank, local_block, w).to(tl.int64)[:, None]
    if SINGLE_BLOCK:
        is_sent = (w == rank)[:, None]
    else:
        is_sent = (w < WORLD)[:, None]
    headers = tl.where(field[None, :] == SENT, counts[:, None].to(tl.int64), header[None, :])
    out = header_blocks_ptr + block * header_block_stride + field[None, :]
    tl.store(out, headers, mask=is_sent & (field[None, :] < NUM_FIELDS))


@triton.jit
def fill_blocks_kernel(
    x_ptr, scale_ptr, expert_numbers_ptr, weights_ptr, adapters_ptr, row_of_token_ptr,
    invalid_count_ptr, x_blocks_ptr, scale_blocks_ptr, expert_numbers_blocks_ptr,
    weights_blocks_ptr, adapters_blocks_ptr,
    header_blocks_ptr, header_ptr, calls_ptr, counters_ptr, progress_ptr, failed_ptr,
    layer, refusal, tokens, capacity, row_stride, rank, local_block, slots, total_slots,
    stride_x, stride_scale, stride_expert_numbers, stride_weights,
    x_block_stride, word_block_stride, header_block_stride,
    HIDDEN: tl.constexpr, SCALES: tl.constexpr, BLOCK_S: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr, WORLD: tl.constexpr, PADDED: tl.constexpr, SINGLE_BLOCK: tl.constexpr,
    HAS_X: tl.constexpr, ADAPTERS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, SCAN: tl.constexpr, NUM_FIELDS: tl.constexpr,
    COUNT_BEGIN: tl.constexpr, USE_PDL: tl.constexpr = False,
):  # fmt: skip
    """Write the rows of a call and its header to the blocks to send; see `blocks.fill_blocks`.

    Grid: one program for the header, then SPLITS programs for each group of ROWS tokens and each
    block to send. Program s of SPLITS writes every SPLITS-th chunk of BLOCK columns of x, starting
    with chunk s. Program 0 also writes the other sections.

    *_blocks_ptr: the sections of block 0.
    x_block_stride, word_block_stride, header_block_stride: strides between blocks, in elements of
        x, of 4 bytes and of 8 bytes.
    total_slots: number of slots of all ranks.
    x_ptr: the activations, viewed as integers of the same itemsize.
    HAS_X: whether to write x.
    PADDED: WORLD rounded up to a power of two.
    SINGLE_BLOCK: whether all tokens are written to local_block only.
    ADAPTERS: "none" if rows have no adapter slot; "slots" to write adapters_ptr; "unused" to write
        -1, in a call without adapters.
    SCAN: number of tokens that are read at a time to count the rows of earlier tokens.
    """
    NUM_BLOCKS: tl.constexpr = 1 if SINGLE_BLOCK else WORLD
    pdl_wait(USE_PDL)
    if tl.program_id(0) == 0:
        if COUNT_BEGIN:
            count_begin(counters_ptr, progress_ptr)
        _fill_headers(
            expert_numbers_ptr, header_blocks_ptr, header_ptr, calls_ptr, counters_ptr,
            layer, refusal, tokens, rank, local_block, slots,
            stride_expert_numbers, total_slots, header_block_stride,
            TOP_K, BLOCK_K, WORLD, PADDED, SINGLE_BLOCK, SCAN, NUM_FIELDS,
        )  # fmt: skip
    else:
        program = tl.program_id(0) - 1
        split = program % SPLITS
        program = program // SPLITS
        # Programs of the same tokens are adjacent in the grid, so that x is read from the L2 cache.
        first = program // NUM_BLOCKS * ROWS
        w = program % NUM_BLOCKS
        token_R = first + tl.arange(0, ROWS)
        number, invalid = _load_expert_numbers(
            expert_numbers_ptr, token_R, tokens, stride_expert_numbers, total_slots, TOP_K, BLOCK_K
        )
        if SINGLE_BLOCK:
            block = tl.full((), 0, tl.int64) + local_block
            row_R = token_R
            is_row_R = (token_R < tokens) & (token_R < capacity)
        else:
            block = tl.where(w == rank, local_block, w).to(tl.int64)
            before = _count_rows(
                expert_numbers_ptr, first, stride_expert_numbers, total_slots, w, slots,
                TOP_K, BLOCK_K, SCAN,
            )  # fmt: skip
            needs_R = _needs_rank(number, w, slots)
            row_R = before + tl.cumsum(needs_R, axis=0) - needs_R
            is_row_R = (needs_R > 0) & (row_R < capacity)
        row = row_R[:, None].to(tl.int64)
        token = token_R[:, None].to(tl.int64)
        is_row = is_row_R[:, None]
        if split == 0:
            if not SINGLE_BLOCK:
                out_row = tl.where(is_row_R, row_R, -1)
                out_ptr = row_of_token_ptr + w * row_stride + token_R
                tl.store(out_ptr, out_row, mask=token_R < tokens)
            if w == 0:
                ones = tl.full((ROWS, BLOCK_K), 1, tl.int32)
                tl.atomic_add(invalid_count_ptr + (ones - 1), ones, mask=invalid, sem="relaxed")
            k = tl.arange(0, BLOCK_K)[None, :]
            is_pair = is_row & (k < TOP_K)
            out = block * word_block_stride + row * TOP_K + k
            weight = tl.load(weights_ptr + token * stride_weights + k, mask=is_pair)
            tl.store(expert_numbers_blocks_ptr + out, number, mask=is_pair)
            tl.store(weights_blocks_ptr + out, weight, mask=is_pair)
            if ADAPTERS != "none":
                slot = tl.full((ROWS, 1), -1, tl.int32)
                if ADAPTERS == "slots":
                    slot = tl.load(adapters_ptr + token, mask=is_row, other=-1)
                tl.store(adapters_blocks_ptr + block * word_block_stride + row, slot, mask=is_row)
            if SCALES:
                s = tl.arange(0, BLOCK_S)[None, :]
                is_scale = is_row & (s < SCALES)
                scale = tl.load(scale_ptr + token * stride_scale + s, mask=is_scale)
                out = block * word_block_stride + row * SCALES + s
                tl.store(scale_blocks_ptr + out, scale, mask=is_scale)
        for start in range(split * BLOCK, HIDDEN if HAS_X else 0, SPLITS * BLOCK):
            column = start + tl.arange(0, BLOCK)[None, :]
            mask = is_row & (column < HIDDEN)
            x = tl.load(x_ptr + token * stride_x + column, mask=mask)
            tl.store(x_blocks_ptr + block * x_block_stride + row * HIDDEN + column, x, mask=mask)


@triton.jit
def read_blocks_kernel(
    expert_numbers_ptr, weights_ptr, scale_ptr, adapters_ptr, header_blocks_ptr,
    slots_ptr, out_weights_ptr, out_scale_ptr, out_adapters_ptr,
    header_ptr, limits_ptr, words_ptr, host_words_ptr, failed_ptr, counters_ptr, progress_ptr,
    rows, block_rows, capacity, rank, slots, local_experts, word_block_stride, header_block_stride,
    SCALES: tl.constexpr, BLOCK_S: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_ADAPTERS: tl.constexpr, ROWS: tl.constexpr, WORLD: tl.constexpr, PADDED: tl.constexpr,
    NUM_FIELDS: tl.constexpr, VERIFY: tl.constexpr = True,
):  # fmt: skip
    """Read the columns of received blocks except activations; see `blocks.read_blocks`.

    Grid: one program per ROWS rows. If VERIFY, the first program also verifies the headers. In a
    failed call, expert numbers may have any value, but the written slots are always in
    [-1, local_experts).
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    block = (row // block_rows).to(tl.int64)
    row_in_block = row % block_rows
    in_bounds = row < rows
    sent = tl.load(header_blocks_ptr + block * header_block_stride + SENT, mask=in_bounds, other=0)
    has_token = in_bounds & (row_in_block < sent) & (row_in_block < capacity)
    k = tl.arange(0, BLOCK_K)[None, :]
    source = block * word_block_stride + row_in_block * TOP_K + k
    has_pair = has_token & (k < TOP_K)
    number = tl.load(expert_numbers_ptr + source, mask=has_pair, other=-1)
    slot = number - rank * slots
    is_local = has_pair & (number >= 0) & (slot >= 0) & (slot < local_experts)
    weight = tl.load(weights_ptr + source, mask=is_local, other=0.0)
    out = row.to(tl.int64) * TOP_K + k
    is_pair = in_bounds & (k < TOP_K)
    tl.store(slots_ptr + out, tl.where(is_local, slot, -1), mask=is_pair)
    tl.store(out_weights_ptr + out, weight, mask=is_pair)
    if HAS_ADAPTERS:
        adapter = tl.load(
            adapters_ptr + block * word_block_stride + row_in_block, mask=has_token, other=-1
        )
        tl.store(out_adapters_ptr + row, adapter, mask=in_bounds)
    if SCALES:
        s = tl.arange(0, BLOCK_S)[None, :]
        is_scale = has_token & (s < SCALES)
        scale = tl.load(
            scale_ptr + block * word_block_stride + row_in_block * SCALES + s,
            mask=is_scale,
            other=0.0,
        )
        tl.store(out_scale_ptr + row.to(tl.int64) * SCALES + s, scale,
                 mask=in_bounds & (s < SCALES))  # fmt: skip
    if VERIFY:
        if tl.program_id(0) == 0:
            count_received(counters_ptr, progress_ptr)
            verify_headers(
                header_blocks_ptr, header_block_stride, header_ptr, limits_ptr, words_ptr,
                host_words_ptr, failed_ptr, WORLD, PADDED, NUM_FIELDS,
            )  # fmt: skip


@triton.jit
def mask_remote_pairs_kernel(
    expert_numbers_ptr, weights_ptr, first, local_experts, numel,
    BLOCK: tl.constexpr, USE_PDL: tl.constexpr = False,
):  # fmt: skip
    """Replace expert numbers by slots of this rank; see `blocks.mask_remote_pairs`.

    Grid: one program per BLOCK pairs.

    first: number of this rank's first slot.
    """
    pdl_wait(USE_PDL)
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = pair < numel
    slot = tl.load(expert_numbers_ptr + pair, mask=mask, other=-1) - first
    is_local = (slot >= 0) & (slot < local_experts)
    tl.store(expert_numbers_ptr + pair, tl.where(is_local, slot, -1), mask=mask)
    tl.store(weights_ptr + pair, tl.full((BLOCK,), 0, tl.float32), mask=mask & (is_local == 0))


@triton.jit
def sum_blocks_kernel(
    sums_ptr, row_of_token_ptr, out_ptr, calls_ptr, counters_ptr, progress_ptr, failed_ptr,
    layer, tokens, block_rows, row_stride, rank, first_block, local_block, stride_out,
    HIDDEN: tl.constexpr, WORLD: tl.constexpr, SINGLE_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add each token's rows from all ranks in rank order; see `blocks.sum_blocks`.

    Grid: one program per token and BLOCK columns, and at least one. The first program counts the
    combine and the end of the call.
    """
    BLOCKS: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    token = tl.program_id(0) // BLOCKS
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    in_bounds = (token < tokens) & (column < HIDDEN)
    total = tl.zeros((BLOCK,), tl.float32)
    for w in tl.static_range(WORLD):
        row = token
        if not SINGLE_BLOCK:
            row = tl.load(row_of_token_ptr + w * row_stride + token, mask=token < tokens, other=-1)
        block = tl.where(w == rank, local_block, first_block + w).to(tl.int64)
        value_ptr = sums_ptr + (block * block_rows + row) * HIDDEN + column
        total += tl.load(value_ptr, mask=in_bounds & (row >= 0) & (row < block_rows), other=0.0).to(
            tl.float32
        )
    if tl.load(failed_ptr) != 0:
        total += float("nan")
    out = out_ptr + token.to(tl.int64) * stride_out + column
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=in_bounds)
    if tl.program_id(0) == 0:
        count_exchange(counters_ptr, layer, True)
        count_end(counters_ptr, progress_ptr)
