"""Combine kernel: add up the output rows of each token, which other ranks have computed.

Each rank with experts of a token has stored one row for the token, the weighted sum over these
experts, in its own heap. A heap is memory with the same layout on every rank, which kernels of all
ranks can access.
"""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.pdl import pdl_wait
from prepare_finalize.symm_mem.kernels.signals import (
    is_last_program,
    peer_pointer,
    row_at_peer,
    signal,
    wait_for_all,
)


@triton.jit
def combine_kernel(
    y_heap_ptr, rank_bits_ptr, peer_rows_ptr, out_ptr, flags_ptr, deltas_ptr, state_ptr, failed_ptr,
    status_ptr, timeout_ns, tokens, capacity, rank, stride_out,
    HIDDEN: tl.constexpr, HAS_PEER_ROWS: tl.constexpr, WORLD: tl.constexpr, PADDED: tl.constexpr,
    BLOCK: tl.constexpr, INTERPRETED: tl.constexpr, USE_PDL: tl.constexpr = False,
):  # fmt: skip
    """Signal that y of this rank is complete, wait for all ranks, and add the rows of each token.

        out[t] = sum over the ranks r to which token t was sent of y_r[rank * capacity + t]

    Grid: any number of programs, which loop over tokens and blocks of BLOCK columns. Rows are added
    in float32 in rank order. The output is NaN after a failed wait.

    y_heap_ptr: y, (WORLD * capacity, HIDDEN), in the heap of this rank, at the same offset on all
        ranks. It is complete when the launch begins.
    rank_bits_ptr: (capacity,) int32. Bit r is set if the token was sent to rank r.
    peer_rows_ptr: if HAS_PEER_ROWS, (WORLD, tokens) int32; the row of token t on rank r is then
        peer_rows[r, t].
    flags_ptr: (WORLD,) int32. Flag r is the number of the last combine that rank r has signaled.
    deltas_ptr: (WORLD,) int64. Adding deltas[r] to an address in the heap of this rank gives the
        address of the same object on rank r.
    state_ptr: (2,) int32, the number of the last combine, and the counter of `is_last_program`.
    failed_ptr: int32, not 0 after a wait of any rank has timed out.
    status_ptr: int64, written by the first wait of this rank that times out (`wait_for_all`).
    timeout_ns: timeout of the wait in nanoseconds.
    tokens: number of tokens of this rank.
    capacity: number of rows that each rank reserves in its heap for the tokens of one rank.
    rank: this rank.
    PADDED: WORLD rounded up to a power of two.
    """
    pdl_wait(USE_PDL)
    number = tl.load(state_ptr) + 1
    # The first program signals before any program waits, so programs that are not yet resident
    # cannot block the signal.
    if tl.program_id(0) == 0:
        signal(flags_ptr, deltas_ptr, rank, number, failed_ptr, WORLD, PADDED)
    failed = wait_for_all(
        flags_ptr, number, failed_ptr, status_ptr, timeout_ns, 2, WORLD, PADDED, INTERPRETED
    )
    BLOCKS: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    for item in range(tl.program_id(0), tokens * BLOCKS, tl.num_programs(0)):
        token = tl.full((), 0, tl.int64) + item // BLOCKS
        column = item % BLOCKS * BLOCK + tl.arange(0, BLOCK)
        row = rank * capacity + token
        rank_bits = tl.load(rank_bits_ptr + token)
        total = tl.zeros((BLOCK,), tl.float32)
        for peer in tl.static_range(WORLD):
            mask = (column < HIDDEN) & ((rank_bits >> peer) & 1 != 0)
            peer_row = row_at_peer(peer_rows_ptr, peer, token, tokens, row, HAS_PEER_ROWS)
            ptr = peer_pointer(y_heap_ptr, deltas_ptr, peer) + peer_row * HIDDEN
            total += tl.load(ptr + column, mask=mask, other=0.0)
        if failed > 0:
            total += float("nan")
        out_ptrs = out_ptr + token * stride_out + column
        tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=column < HIDDEN)
    # Only the last program increments the number, after all programs have read it.
    if is_last_program(state_ptr + 1):
        tl.store(state_ptr, number)
