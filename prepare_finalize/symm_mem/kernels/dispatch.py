"""Dispatch kernel: write rows to the memory of the ranks that have their experts.

A heap is memory with the same layout on every rank, which kernels of all ranks can access. A
replicated expert has several copies, on different ranks. The table `homes` has the rank and the
slot of each copy. A slot is the index of an expert in the weights of its rank.
"""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.extrema import max_nan, maximum_nan
from modular_kernel.ops.kernels.pdl import pdl_wait
from modular_kernel.ops.kernels.quantize import quantized_values, scale_of
from prepare_finalize.symm_mem.kernels.signals import (
    is_last_program,
    peer_pointer,
    row_at_peer,
    signal,
    wait_for_all,
)


@triton.jit
def _load_homes(
    ids_ptr, homes_ptr, copies_ptr, token, is_token, first_copy, num_experts,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, MAX_COPIES: tl.constexpr,
):  # fmt: skip
    """Return rank and slot of a token's pairs, (BLOCK_K,) int32, and the number of invalid ids.

    Rank and slot are -1 for skipped pairs. Ids are compared before they are converted, because a
    conversion could make an invalid int64 valid. Copies are used round-robin, starting with
    first_copy.
    """
    k = tl.arange(0, BLOCK_K)
    mask = (k < TOP_K) & is_token
    ids = tl.load(ids_ptr + token * TOP_K + k, mask=mask, other=-1)
    valid = (ids >= 0) & (ids < num_experts)
    invalid = mask & ((ids < -1) | (ids >= num_experts))
    home = tl.where(valid, ids, 0).to(tl.int64) * MAX_COPIES
    if MAX_COPIES > 1:
        copies = tl.load(copies_ptr + tl.where(valid, ids, 0))
        home += (token + first_copy) % copies
    rank = tl.load(homes_ptr + home * 2, mask=valid, other=-1)
    slot = tl.load(homes_ptr + home * 2 + 1, mask=valid, other=-1)
    return rank, slot, tl.sum(invalid.to(tl.int32), axis=0)


@triton.jit
def _send_routing(
    weights_ptr, adapters_ptr, ids_heap_ptr, weights_heap_ptr, adapters_heap_ptr, deltas_ptr,
    peer_rows_ptr, token, tokens, is_token, row, ranks, slots,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, ADAPTERS: tl.constexpr, HAS_PEER_ROWS: tl.constexpr,
    WORLD: tl.constexpr,
):  # fmt: skip
    """Write slots, weights and adapter of a token to its row on every rank.

    Slots are -1 for experts of other ranks. If HAS_PEER_ROWS, write only to ranks that have a row
    for the token.
    """
    k = tl.arange(0, BLOCK_K)
    mask = k < TOP_K
    weights_ptr += token * TOP_K
    weights = tl.load(weights_ptr + k, mask=mask & is_token, other=0.0)
    adapter = -1
    if ADAPTERS == "slots":
        adapter = tl.load(adapters_ptr + token, mask=is_token, other=-1)
    for peer in tl.static_range(WORLD):
        is_on_peer = ranks == peer
        peer_row = row_at_peer(peer_rows_ptr, peer, token, tokens, row, HAS_PEER_ROWS)
        row_mask = mask
        if HAS_PEER_ROWS:
            row_mask = mask & (peer_row >= 0)
        ids_ptr = peer_pointer(ids_heap_ptr, deltas_ptr, peer) + peer_row * TOP_K
        tl.store(ids_ptr + k, tl.where(is_on_peer, slots, -1), mask=row_mask)
        ptr = peer_pointer(weights_heap_ptr, deltas_ptr, peer) + peer_row * TOP_K
        tl.store(ptr + k, tl.where(is_on_peer, weights, 0.0), mask=row_mask)
        if ADAPTERS != "none":
            adapter_ptr = peer_pointer(adapters_heap_ptr, deltas_ptr, peer) + peer_row
            if HAS_PEER_ROWS:
                tl.store(adapter_ptr, adapter, mask=peer_row >= 0)
            else:
                tl.store(adapter_ptr, adapter)


@triton.jit
def _send_columns(
    x_ptr, x_heap_ptr, scale_heap_ptr, deltas_ptr, peer_rows_ptr, token, tokens, row, rank_bits,
    inverse, start,
    HIDDEN: tl.constexpr, QUANT: tl.constexpr, GROUP: tl.constexpr, QMAX: tl.constexpr,
    ROUND: tl.constexpr, MIN_SCALE: tl.constexpr, HAS_PEER_ROWS: tl.constexpr, WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write BLOCK columns of a row, starting at `start`, to the ranks with a bit in rank_bits.

    With QUANT "group" or "token", quantize the values first; see `dispatch_kernel`.
    """
    TYPE: tl.constexpr = x_heap_ptr.dtype.element_ty
    GROUPS: tl.constexpr = HIDDEN // GROUP
    column = start + tl.arange(0, BLOCK)
    mask = column < HIDDEN
    value = tl.load(x_ptr + column, mask=mask, other=0.0)
    if QUANT == "group":
        groups = tl.reshape(value.to(tl.float32), (BLOCK // GROUP, GROUP))
        scale = scale_of(max_nan(tl.abs(groups), 1), QMAX, MIN_SCALE)
        q = quantized_values(groups, tl.div_rn(1.0, scale)[:, None], QMAX, ROUND)
        value = tl.reshape(q, (BLOCK,))
    elif QUANT == "token":
        value = quantized_values(value, inverse, QMAX, ROUND)  # inverse is float32
    value = value.to(TYPE)
    for peer in tl.static_range(WORLD):
        if (rank_bits >> peer) & 1 != 0:
            peer_row = row_at_peer(peer_rows_ptr, peer, token, tokens, row, HAS_PEER_ROWS)
            tl.store(
                peer_pointer(x_heap_ptr, deltas_ptr, peer) + peer_row * HIDDEN + column,
                value,
                mask=mask,
            )
            if QUANT == "group":
                ptr = peer_pointer(scale_heap_ptr, deltas_ptr, peer) + peer_row * GROUPS
                group = start // GROUP + tl.arange(0, BLOCK // GROUP)
                tl.store(ptr + group, scale, mask=group < GROUPS)


@triton.jit
def _row_amax(x_ptr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """Return the maximum absolute value of a row."""
    amax = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, HIDDEN, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x_ptr + column, mask=column < HIDDEN, other=0.0)
        amax = maximum_nan(amax, tl.abs(value.to(tl.float32)))
    return max_nan(amax, 0)


@triton.jit
def _send_scales(
    scale_ptr, scale_heap_ptr, deltas_ptr, peer_rows_ptr, token, tokens, row, rank_bits,
    SCALES: tl.constexpr, BLOCK_S: tl.constexpr, HAS_PEER_ROWS: tl.constexpr, WORLD: tl.constexpr,
):  # fmt: skip
    """Write the scales of a quantized row to the ranks with a bit in rank_bits."""
    column = tl.arange(0, BLOCK_S)
    mask = column < SCALES
    scale = tl.load(scale_ptr + token * SCALES + column, mask=mask, other=0.0)
    for peer in tl.static_range(WORLD):
        if (rank_bits >> peer) & 1 != 0:
            peer_row = row_at_peer(peer_rows_ptr, peer, token, tokens, row, HAS_PEER_ROWS)
            ptr = peer_pointer(scale_heap_ptr, deltas_ptr, peer) + peer_row * SCALES
            tl.store(ptr + column, scale, mask=mask)


@triton.jit
def dispatch_kernel(
    x_ptr, scale_ptr, ids_ptr, weights_ptr, homes_ptr, copies_ptr, invalid_ptr, rank_bits_ptr,
    adapters_ptr, x_heap_ptr, scale_heap_ptr, ids_heap_ptr, weights_heap_ptr,
    adapters_heap_ptr, peer_rows_ptr, flags_ptr, deltas_ptr, state_ptr, failed_ptr, status_ptr,
    timeout_ns, tokens, capacity, rank, num_experts, stride_x,
    HIDDEN: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, MAX_COPIES: tl.constexpr,
    QUANT: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, BLOCK_S: tl.constexpr,
    QMAX: tl.constexpr, ROUND: tl.constexpr, MIN_SCALE: tl.constexpr, ADAPTERS: tl.constexpr,
    HAS_PEER_ROWS: tl.constexpr, WAIT: tl.constexpr, WORLD: tl.constexpr, PADDED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
    USE_PDL: tl.constexpr = False,
):  # fmt: skip
    """Write token t to row rank * capacity + t of every rank with one of its experts.

    Slots and weights are written to every rank. The slots of rows `tokens` to capacity - 1 are -1.

    Grid: any number of programs, which loop over work items. A work item is CHUNK columns of a row.
    CHUNK is a multiple of BLOCK. The last program to finish sets the flags of this rank.

    x_ptr: (tokens, HIDDEN).
    scale_ptr: (tokens, SCALES), scales of quantized rows.
    ids_ptr, weights_ptr: (tokens, TOP_K).
    homes_ptr: (E, MAX_COPIES, 2), rank and slot of each copy of each expert.
    copies_ptr: (E,), number of copies of each expert; not read if MAX_COPIES is 1.
    x_heap_ptr, scale_heap_ptr, ids_heap_ptr, weights_heap_ptr, adapters_heap_ptr: received rows in
        the heap of this rank, at the same offsets on all ranks: x (WORLD * capacity, HIDDEN),
        scales, int32 slots, float32 weights and int32 adapter slots.
    rank_bits_ptr: (capacity,) int32, output. Bit r is set if the token is sent to rank r.
    peer_rows_ptr: if HAS_PEER_ROWS, (WORLD, tokens) int32. Token t is then written to row
        peer_rows[r, t] of rank r, or not at all if peer_rows[r, t] is -1. No other row is written.
    flags_ptr, deltas_ptr, failed_ptr, status_ptr, timeout_ns: see `signals`.
    state_ptr: (2,) int32, the number of the last dispatch, and the counter of `is_last_program`.
    QUANT: "none" to copy rows; "scaled" to copy rows and their SCALES scales; "group" and "token"
        to quantize rows, with one scale per GROUP columns or per row.
    ADAPTERS: "slots" to send adapters_ptr, (tokens,) int32; "unused" to send -1 for each row;
        "none" to send nothing.
    WAIT: whether the last program waits for the rows of all ranks. If not, `arrival_kernel` does.
    BLOCK_K, BLOCK_S, PADDED: powers of two >= TOP_K, SCALES and WORLD.
    """
    pdl_wait(USE_PDL)
    CHUNKS: tl.constexpr = (HIDDEN + CHUNK - 1) // CHUNK
    for item in range(tl.program_id(0), capacity * CHUNKS, tl.num_programs(0)):
        token, chunk = tl.full((), 0, tl.int64) + item // CHUNKS, item % CHUNKS
        is_token = token < tokens
        ranks, slots, invalid = _load_homes(
            ids_ptr, homes_ptr, copies_ptr, token, is_token, rank, num_experts,
            TOP_K, BLOCK_K, MAX_COPIES,
        )  # fmt: skip
        row = rank * capacity + token
        rank_bits = 0
        for peer in tl.static_range(WORLD):
            is_needed = tl.max((ranks == peer).to(tl.int32), axis=0)  # NaN-free: integer operands
            if HAS_PEER_ROWS:
                is_needed = tl.where(
                    row_at_peer(peer_rows_ptr, peer, token, tokens, row, HAS_PEER_ROWS) >= 0,
                    is_needed,
                    0,
                )
            rank_bits |= is_needed << peer
        if chunk == 0:
            _send_routing(
                weights_ptr, adapters_ptr, ids_heap_ptr, weights_heap_ptr, adapters_heap_ptr,
                deltas_ptr, peer_rows_ptr, token, tokens, is_token, row, ranks, slots,
                TOP_K, BLOCK_K, ADAPTERS, HAS_PEER_ROWS, WORLD,
            )  # fmt: skip
            tl.store(rank_bits_ptr + token, rank_bits)
            if invalid > 0:
                tl.atomic_add(invalid_ptr, invalid)
        if rank_bits != 0:
            row_ptr = x_ptr + token * stride_x
            inverse = 1.0
            if QUANT == "token":
                scale = scale_of(_row_amax(row_ptr, HIDDEN, BLOCK), QMAX, MIN_SCALE)
                inverse = tl.div_rn(1.0, scale)
                if chunk == 0:
                    for peer in tl.static_range(WORLD):
                        if (rank_bits >> peer) & 1 != 0:
                            peer_row = row_at_peer(
                                peer_rows_ptr, peer, token, tokens, row, HAS_PEER_ROWS
                            )
                            tl.store(
                                peer_pointer(scale_heap_ptr, deltas_ptr, peer) + peer_row, scale
                            )
            elif QUANT == "scaled":
                if chunk == 0:
                    _send_scales(
                        scale_ptr, scale_heap_ptr, deltas_ptr, peer_rows_ptr, token, tokens, row,
                        rank_bits, SCALES, BLOCK_S, HAS_PEER_ROWS, WORLD,
                    )  # fmt: skip
            for start in tl.static_range(0, CHUNK, BLOCK):
                _send_columns(
                    row_ptr, x_heap_ptr, scale_heap_ptr, deltas_ptr, peer_rows_ptr, token, tokens,
                    row, rank_bits, inverse, chunk * CHUNK + start, HIDDEN, QUANT, GROUP, QMAX,
                    ROUND, MIN_SCALE, HAS_PEER_ROWS, WORLD, BLOCK,
                )  # fmt: skip
    if is_last_program(state_ptr + 1):
        number = tl.load(state_ptr) + 1
        tl.store(state_ptr, number)
        signal(flags_ptr, deltas_ptr, rank, number, failed_ptr, WORLD, PADDED)
        if WAIT:
            wait_for_all(
                flags_ptr, number, failed_ptr, status_ptr, timeout_ns, 1, WORLD, PADDED, INTERPRETED
            )


@triton.jit
def arrival_kernel(
    flags_ptr, state_ptr, failed_ptr, status_ptr, timeout_ns,
    WORLD: tl.constexpr, PADDED: tl.constexpr, INTERPRETED: tl.constexpr,
    USE_PDL: tl.constexpr = False,
):  # fmt: skip
    """Wait for the rows of all ranks, after a dispatch without WAIT. Grid: (1,)."""
    pdl_wait(USE_PDL)
    number = tl.load(state_ptr)
    wait_for_all(
        flags_ptr, number, failed_ptr, status_ptr, timeout_ns, 1, WORLD, PADDED, INTERPRETED
    )
