"""Combine: a token's sums, read from the memory of the ranks that computed them, and added."""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.pdl import after_predecessor
from prepare_finalize.symm_mem.kernels.signals import (
    last_of_program,
    of_rank,
    place_of,
    signal,
    wait_for_all,
)


@triton.jit
def combine_kernel(
    y_there_ptr, sent_ptr, places_ptr, out_ptr, flags_ptr, deltas_ptr, state_ptr, failed_ptr,
    status_ptr, patience, tokens, capacity, rank, stride_out,
    HIDDEN: tl.constexpr, PLACED: tl.constexpr, WORLD: tl.constexpr, PADDED: tl.constexpr,
    BLOCK: tl.constexpr, INTERPRETED: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """out[t] = the sum over the ranks that got token t of row rank * capacity + t of their y.

    y (WORLD * capacity, HIDDEN) is this rank's own memory, whose layout all share, and whole when
    the launch begins. sent (capacity,) int32: those ranks as bits. PLACED: of row places[r, t] of
    rank r, as in dispatch_kernel. Added in float32, in the order of ranks; NaN after a failed wait.
    state (2,) int32: as in dispatch_kernel, but of combines. Any grid (programs,).
    """
    after_predecessor(OVERLAP)
    number = tl.load(state_ptr) + 1
    # Before any program waits, so that no grid is too large.
    if tl.program_id(0) == 0:
        signal(flags_ptr, deltas_ptr, rank, number, failed_ptr, WORLD, PADDED)
    failed = wait_for_all(
        flags_ptr, number, failed_ptr, status_ptr, patience, 2, WORLD, PADDED, INTERPRETED
    )
    BLOCKS: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    for item in range(tl.program_id(0), tokens * BLOCKS, tl.num_programs(0)):
        token = tl.full((), 0, tl.int64) + item // BLOCKS
        column = item % BLOCKS * BLOCK + tl.arange(0, BLOCK)
        row = rank * capacity + token
        sent = tl.load(sent_ptr + token)
        total = tl.zeros((BLOCK,), tl.float32)
        for at in tl.static_range(WORLD):
            mask = (column < HIDDEN) & ((sent >> at) & 1 != 0)
            place = place_of(places_ptr, at, token, tokens, row, PLACED)
            ptr = of_rank(y_there_ptr, deltas_ptr, at) + place * HIDDEN
            total += tl.load(ptr + column, mask=mask, other=0.0)
        if failed > 0:
            total += float("nan")
        out_ptrs = out_ptr + token * stride_out + column
        tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=column < HIDDEN)
    # All programs have read the number when the last one counts it up.
    if last_of_program(state_ptr + 1):
        tl.store(state_ptr, number)
