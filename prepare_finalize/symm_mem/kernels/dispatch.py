"""Dispatch kernel: write rows of this rank's tokens to the memory of the ranks that need them."""

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
    ids_ptr, homes_ptr, copies_ptr, token, live, first_copy, num_experts,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, MOST_COPIES: tl.constexpr,
):  # fmt: skip
    """Return rank and slot of a token's pairs, (BLOCK_K,) int32, and the number of invalid ids.

    Both are -1 for skipped pairs. Ids are compared in their own width, so a 64-bit id is not
    truncated into range.
    """
    k = tl.arange(0, BLOCK_K)
    mask = (k < TOP_K) & live
    ids = tl.load(ids_ptr + token * TOP_K + k, mask=mask, other=-1)
    valid = (ids >= 0) & (ids < num_experts)
    invalid = mask & ((ids < -1) | (ids >= num_experts))
    home = tl.where(valid, ids, 0).to(tl.int64) * MOST_COPIES
    if MOST_COPIES > 1:
        copies = tl.load(copies_ptr + tl.where(valid, ids, 0))
        home += (token + first_copy) % copies
    rank = tl.load(homes_ptr + home * 2, mask=valid, other=-1)
    slot = tl.load(homes_ptr + home * 2 + 1, mask=valid, other=-1)
    return rank, slot, tl.sum(invalid.to(tl.int32), axis=0)


@triton.jit
def _send_routing(
    weights_ptr, adapters_ptr, ids_there_ptr, weights_there_ptr, adapters_there_ptr, deltas_ptr,
    places_ptr, token, tokens, live, row, ranks, slots,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, ADAPTERS: tl.constexpr, PLACED: tl.constexpr,
    WORLD: tl.constexpr,
):  # fmt: skip
    """Write slots (-1 for other ranks), weights and adapter of a token's row to every rank.

    PLACED: only to ranks that have a row for the token.
    """
    k = tl.arange(0, BLOCK_K)
    mask = k < TOP_K
    weights_ptr += token * TOP_K
    weights = tl.load(weights_ptr + k, mask=mask & live, other=0.0)
    adapter = -1
    if ADAPTERS == "slots":
        adapter = tl.load(adapters_ptr + token, mask=live, other=-1)
    for peer in tl.static_range(WORLD):
        is_on_peer = ranks == peer
        peer_row = row_at_peer(places_ptr, peer, token, tokens, row, PLACED)
        row_mask = mask
        if PLACED:
            row_mask = mask & (peer_row >= 0)
        ids_ptr = peer_pointer(ids_there_ptr, deltas_ptr, peer) + peer_row * TOP_K
        tl.store(ids_ptr + k, tl.where(is_on_peer, slots, -1), mask=row_mask)
        ptr = peer_pointer(weights_there_ptr, deltas_ptr, peer) + peer_row * TOP_K
        tl.store(ptr + k, tl.where(is_on_peer, weights, 0.0), mask=row_mask)
        if ADAPTERS != "none":
            adapter_ptr = peer_pointer(adapters_there_ptr, deltas_ptr, peer) + peer_row
            if PLACED:
                tl.store(adapter_ptr, adapter, mask=peer_row >= 0)
            else:
                tl.store(adapter_ptr, adapter)


@triton.jit
def _send_columns(
    x_ptr, x_there_ptr, scale_there_ptr, deltas_ptr, places_ptr, token, tokens, row, sent, inverse,
    first, HIDDEN: tl.constexpr, QUANT: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr,
    ROUND: tl.constexpr, MIN_SCALE: tl.constexpr, PLACED: tl.constexpr, WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write BLOCK columns of a row to the ranks whose bits are set in `sent`."""
    TYPE: tl.constexpr = x_there_ptr.dtype.element_ty
    GROUPS: tl.constexpr = HIDDEN // GROUP
    column = first + tl.arange(0, BLOCK)
    mask = column < HIDDEN
    value = tl.load(x_ptr + column, mask=mask, other=0.0)
    if QUANT == "group":
        groups = tl.reshape(value.to(tl.float32), (BLOCK // GROUP, GROUP))
        scale = scale_of(max_nan(tl.abs(groups), 1), LARGEST, MIN_SCALE)
        q = quantized_values(groups, tl.div_rn(1.0, scale)[:, None], LARGEST, ROUND)
        value = tl.reshape(q, (BLOCK,))
    elif QUANT == "token":
        value = quantized_values(value, inverse, LARGEST, ROUND)  # inverse is float32
    value = value.to(TYPE)
    for peer in tl.static_range(WORLD):
        if (sent >> peer) & 1 != 0:
            peer_row = row_at_peer(places_ptr, peer, token, tokens, row, PLACED)
            tl.store(
                peer_pointer(x_there_ptr, deltas_ptr, peer) + peer_row * HIDDEN + column,
                value,
                mask=mask,
            )
            if QUANT == "group":
                ptr = peer_pointer(scale_there_ptr, deltas_ptr, peer) + peer_row * GROUPS
                group = first // GROUP + tl.arange(0, BLOCK // GROUP)
                tl.store(ptr + group, scale, mask=group < GROUPS)


@triton.jit
def _row_amax(x_ptr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest magnitude of a row."""
    largest = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, HIDDEN, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(x_ptr + column, mask=column < HIDDEN, other=0.0)
        largest = maximum_nan(largest, tl.abs(value.to(tl.float32)))
    return max_nan(largest, 0)


@triton.jit
def _send_scales(
    scale_ptr, scale_there_ptr, deltas_ptr, places_ptr, token, tokens, row, sent,
    SCALES: tl.constexpr, BLOCK_S: tl.constexpr, PLACED: tl.constexpr, WORLD: tl.constexpr,
):  # fmt: skip
    """Write a row's precomputed scales to the ranks whose bits are set in `sent`."""
    column = tl.arange(0, BLOCK_S)
    mask = column < SCALES
    scale = tl.load(scale_ptr + token * SCALES + column, mask=mask, other=0.0)
    for peer in tl.static_range(WORLD):
        if (sent >> peer) & 1 != 0:
            peer_row = row_at_peer(places_ptr, peer, token, tokens, row, PLACED)
            ptr = peer_pointer(scale_there_ptr, deltas_ptr, peer) + peer_row * SCALES
            tl.store(ptr + column, scale, mask=mask)


@triton.jit
def dispatch_kernel(
    x_ptr, scale_ptr, ids_ptr, weights_ptr, homes_ptr, copies_ptr, invalid_ptr, sent_ptr,
    adapters_ptr, x_there_ptr, scale_there_ptr, ids_there_ptr, weights_there_ptr,
    adapters_there_ptr, places_ptr, flags_ptr, deltas_ptr, state_ptr, failed_ptr, status_ptr,
    patience, tokens, capacity, rank, num_experts, stride_x,
    HIDDEN: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, MOST_COPIES: tl.constexpr,
    QUANT: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, BLOCK_S: tl.constexpr,
    LARGEST: tl.constexpr, ROUND: tl.constexpr, MIN_SCALE: tl.constexpr, ADAPTERS: tl.constexpr,
    PLACED: tl.constexpr, WAIT: tl.constexpr, WORLD: tl.constexpr, PADDED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """Write token t of `tokens` to row rank * capacity + t of every rank with one of its experts.

    Slots and weights are written to every rank; the rows up to capacity get slots -1.

    - x (tokens, HIDDEN); ids and weights (tokens, TOP_K).
    - *_there: this rank's own memory, with the same layout on all ranks: rows (WORLD * capacity,
      HIDDEN), scales, int32 slots, float32 weights.
    - sent (capacity,) int32: the ranks that got a row, as bits.
    - QUANT: "none" copies rows; "scaled" copies their SCALES scales as well; "group" and "token"
      quantize rows, with one scale for GROUP columns or for a row.
    - PLACED: write token t to row places[r, t] of rank r instead; places (WORLD, tokens) int32 is
      -1 for ranks that do not get it. No other row is written.
    - ADAPTERS: "slots" sends adapters (tokens,) int32, "nobody" sends -1 for each row, "none"
      nothing.
    - state (2,) int32: number of the last call, and a counter.
    - WAIT: the last program waits for the rows of all other ranks; otherwise `arrival_kernel` does.

    Any grid (programs,). A work item is CHUNK columns of a row; CHUNK is a multiple of BLOCK.
    """
    pdl_wait(OVERLAP)
    CHUNKS: tl.constexpr = (HIDDEN + CHUNK - 1) // CHUNK
    for item in range(tl.program_id(0), capacity * CHUNKS, tl.num_programs(0)):
        token, chunk = tl.full((), 0, tl.int64) + item // CHUNKS, item % CHUNKS
        live = token < tokens
        ranks, slots, invalid = _load_homes(
            ids_ptr, homes_ptr, copies_ptr, token, live, rank, num_experts,
            TOP_K, BLOCK_K, MOST_COPIES,
        )  # fmt: skip
        row = rank * capacity + token
        sent = 0
        for peer in tl.static_range(WORLD):
            is_needed = tl.max((ranks == peer).to(tl.int32), axis=0)  # NaN-free: integers
            if PLACED:
                is_needed = tl.where(
                    row_at_peer(places_ptr, peer, token, tokens, row, PLACED) >= 0, is_needed, 0
                )
            sent |= is_needed << peer
        if chunk == 0:
            _send_routing(
                weights_ptr, adapters_ptr, ids_there_ptr, weights_there_ptr, adapters_there_ptr,
                deltas_ptr, places_ptr, token, tokens, live, row, ranks, slots,
                TOP_K, BLOCK_K, ADAPTERS, PLACED, WORLD,
            )  # fmt: skip
            tl.store(sent_ptr + token, sent)
            if invalid > 0:
                tl.atomic_add(invalid_ptr, invalid)
        if sent != 0:
            row_ptr = x_ptr + token * stride_x
            inverse = 1.0
            if QUANT == "token":
                scale = scale_of(_row_amax(row_ptr, HIDDEN, BLOCK), LARGEST, MIN_SCALE)
                inverse = tl.div_rn(1.0, scale)
                if chunk == 0:
                    for peer in tl.static_range(WORLD):
                        if (sent >> peer) & 1 != 0:
                            peer_row = row_at_peer(places_ptr, peer, token, tokens, row, PLACED)
                            tl.store(
                                peer_pointer(scale_there_ptr, deltas_ptr, peer) + peer_row, scale
                            )
            elif QUANT == "scaled":
                if chunk == 0:
                    _send_scales(
                        scale_ptr, scale_there_ptr, deltas_ptr, places_ptr, token, tokens, row,
                        sent, SCALES, BLOCK_S, PLACED, WORLD,
                    )  # fmt: skip
            for first in tl.static_range(0, CHUNK, BLOCK):
                _send_columns(
                    row_ptr, x_there_ptr, scale_there_ptr, deltas_ptr, places_ptr, token, tokens,
                    row, sent, inverse, chunk * CHUNK + first, HIDDEN, QUANT, GROUP, LARGEST,
                    ROUND, MIN_SCALE, PLACED, WORLD, BLOCK,
                )  # fmt: skip
    if is_last_program(state_ptr + 1):
        number = tl.load(state_ptr) + 1
        tl.store(state_ptr, number)
        signal(flags_ptr, deltas_ptr, rank, number, failed_ptr, WORLD, PADDED)
        if WAIT:
            wait_for_all(
                flags_ptr, number, failed_ptr, status_ptr, patience, 1, WORLD, PADDED, INTERPRETED
            )


@triton.jit
def arrival_kernel(
    flags_ptr, state_ptr, failed_ptr, status_ptr, patience,
    WORLD: tl.constexpr, PADDED: tl.constexpr, INTERPRETED: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """Wait for the rows of a dispatch without WAIT. Grid (1,)."""
    pdl_wait(OVERLAP)
    number = tl.load(state_ptr)
    wait_for_all(flags_ptr, number, failed_ptr, status_ptr, patience, 1, WORLD, PADDED, INTERPRETED)
