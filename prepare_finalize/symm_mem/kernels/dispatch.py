"""Dispatch: rows of this rank's tokens, written into the memory of the ranks that need them."""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.extrema import max_nan, maximum_nan
from modular_kernel.ops.kernels.pdl import after_predecessor
from modular_kernel.ops.kernels.quantize import quantized_values, scale_of
from prepare_finalize.symm_mem.kernels.signals import (
    last_of_program,
    of_rank,
    place_of,
    signal,
    wait_for_all,
)


@triton.jit
def _homes_of(
    ids_ptr, homes_ptr, copies_ptr, token, live, first_copy, num_experts,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, MOST_COPIES: tl.constexpr,
):  # fmt: skip
    """Rank and slot of a token's pairs, (BLOCK_K,) int32, -1 where skipped; how many are invalid.

    Compared in the ids' own width: a 64-bit id is not truncated into range.
    """
    k = tl.arange(0, BLOCK_K)
    mask = (k < TOP_K) & live
    ids = tl.load(ids_ptr + token * TOP_K + k, mask=mask, other=-1)
    valid = (ids >= 0) & (ids < num_experts)
    invalid = mask & ((ids < -1) | (ids >= num_experts))
    place = tl.where(valid, ids, 0).to(tl.int64) * MOST_COPIES
    if MOST_COPIES > 1:
        copies = tl.load(copies_ptr + tl.where(valid, ids, 0))
        place += (token + first_copy) % copies
    rank = tl.load(homes_ptr + place * 2, mask=valid, other=-1)
    slot = tl.load(homes_ptr + place * 2 + 1, mask=valid, other=-1)
    return rank, slot, tl.sum(invalid.to(tl.int32), axis=0)


@triton.jit
def _send_routing(
    weights_ptr, adapters_ptr, ids_there_ptr, weights_there_ptr, adapters_there_ptr, deltas_ptr,
    places_ptr, token, tokens, live, row, ranks, slots,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, ADAPTERS: tl.constexpr, PLACED: tl.constexpr,
    WORLD: tl.constexpr,
):  # fmt: skip
    """Slots (-1: not there) and weights of a token's row, to every rank; its adapter's slot too.

    PLACED: to ranks that have a place for it.
    """
    k = tl.arange(0, BLOCK_K)
    mask = k < TOP_K
    weights_ptr += token * TOP_K
    weights = tl.load(weights_ptr + k, mask=mask & live, other=0.0)
    adapter = -1
    if ADAPTERS == "slots":
        adapter = tl.load(adapters_ptr + token, mask=live, other=-1)
    for to in tl.static_range(WORLD):
        there = ranks == to
        at = place_of(places_ptr, to, token, tokens, row, PLACED)
        fits = mask
        if PLACED:
            fits = mask & (at >= 0)
        ids_ptr = of_rank(ids_there_ptr, deltas_ptr, to) + at * TOP_K
        tl.store(ids_ptr + k, tl.where(there, slots, -1), mask=fits)
        ptr = of_rank(weights_there_ptr, deltas_ptr, to) + at * TOP_K
        tl.store(ptr + k, tl.where(there, weights, 0.0), mask=fits)
        if ADAPTERS != "none":
            adapter_ptr = of_rank(adapters_there_ptr, deltas_ptr, to) + at
            if PLACED:
                tl.store(adapter_ptr, adapter, mask=at >= 0)
            else:
                tl.store(adapter_ptr, adapter)


@triton.jit
def _send_columns(
    x_ptr, x_there_ptr, scale_there_ptr, deltas_ptr, places_ptr, token, tokens, row, sent, inverse,
    first, HIDDEN: tl.constexpr, QUANT: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr,
    ROUND: tl.constexpr, MIN_SCALE: tl.constexpr, PLACED: tl.constexpr, WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of a row, to the ranks whose bits are set in `sent`."""
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
    for to in tl.static_range(WORLD):
        if (sent >> to) & 1 != 0:
            at = place_of(places_ptr, to, token, tokens, row, PLACED)
            tl.store(of_rank(x_there_ptr, deltas_ptr, to) + at * HIDDEN + column, value, mask=mask)
            if QUANT == "group":
                ptr = of_rank(scale_there_ptr, deltas_ptr, to) + at * GROUPS
                group = first // GROUP + tl.arange(0, BLOCK // GROUP)
                tl.store(ptr + group, scale, mask=group < GROUPS)


@triton.jit
def _largest_of(x_ptr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
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
    """Return a row's scales that were computed before."""
    column = tl.arange(0, BLOCK_S)
    mask = column < SCALES
    scale = tl.load(scale_ptr + token * SCALES + column, mask=mask, other=0.0)
    for to in tl.static_range(WORLD):
        if (sent >> to) & 1 != 0:
            at = place_of(places_ptr, to, token, tokens, row, PLACED)
            ptr = of_rank(scale_there_ptr, deltas_ptr, to) + at * SCALES
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
    """Write token t of `tokens` to row rank * capacity + t of every rank that holds one of its
    experts, and its slots and weights there to every rank; rows up to capacity get slots -1.

    x (tokens, HIDDEN); ids and weights (tokens, TOP_K). *_there: this rank's own memory, whose
    layout all ranks share: rows (WORLD * capacity, HIDDEN), scales, slots int32, weights float32.
    sent (capacity,) int32: the ranks that got a row, as bits. Any grid (programs,); CHUNK columns
    of a row at a time, a multiple of BLOCK.
    QUANT: "none" copies rows, "scaled" their SCALES scales as well; "group" and "token" quantize
    them on the way, GROUP columns or a row with one scale.
    PLACED: the row of token t at rank r is places[r, t] instead, (WORLD, tokens) int32, -1 where it
    is not sent; no other row is written.
    ADAPTERS: "slots" sends adapters (tokens,) int32, "nobody" -1 for each row, "none" nothing.
    state (2,) int32: the number of the last call, and a counter. WAIT: the last program waits for
    the rows of the others; else `arrival_kernel` does.
    """
    after_predecessor(OVERLAP)
    CHUNKS: tl.constexpr = (HIDDEN + CHUNK - 1) // CHUNK
    for item in range(tl.program_id(0), capacity * CHUNKS, tl.num_programs(0)):
        token, chunk = tl.full((), 0, tl.int64) + item // CHUNKS, item % CHUNKS
        live = token < tokens
        ranks, slots, invalid = _homes_of(
            ids_ptr, homes_ptr, copies_ptr, token, live, rank, num_experts,
            TOP_K, BLOCK_K, MOST_COPIES,
        )  # fmt: skip
        row = rank * capacity + token
        sent = 0
        for to in tl.static_range(WORLD):
            here = tl.max((ranks == to).to(tl.int32), axis=0)  # NaN-free: integers
            if PLACED:
                here = tl.where(place_of(places_ptr, to, token, tokens, row, PLACED) >= 0, here, 0)
            sent |= here << to
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
                scale = scale_of(_largest_of(row_ptr, HIDDEN, BLOCK), LARGEST, MIN_SCALE)
                inverse = tl.div_rn(1.0, scale)
                if chunk == 0:
                    for to in tl.static_range(WORLD):
                        if (sent >> to) & 1 != 0:
                            at = place_of(places_ptr, to, token, tokens, row, PLACED)
                            tl.store(of_rank(scale_there_ptr, deltas_ptr, to) + at, scale)
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
    if last_of_program(state_ptr + 1):
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
    """Wait for the rows of a dispatch that did not. Grid (1,)."""
    after_predecessor(OVERLAP)
    number = tl.load(state_ptr)
    wait_for_all(flags_ptr, number, failed_ptr, status_ptr, patience, 1, WORLD, PADDED, INTERPRETED)
