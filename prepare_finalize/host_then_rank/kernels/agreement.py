"""Kernel with which all ranks verify the headers of a call in a two-level exchange.

A rank receives the headers of its counterparts on all hosts, the ranks with the same local rank
(the index of a rank on its host). The ranks of a host share these headers through their memory, so
that each rank has the headers of all ranks.
"""

import triton
import triton.language as tl

from prepare_finalize.common.kernels.headers import PADDED_FIELDS, count_received, verify_headers
from prepare_finalize.symm_mem.kernels.signals import peer_pointer, signal, wait_for_all


@triton.jit
def agree_kernel(
    header_blocks_ptr, headers_heap_ptr, flags_ptr, deltas_ptr, state_ptr, wait_failed_ptr,
    wait_status_ptr, timeout_ns, header_ptr, limits_ptr, words_ptr, host_words_ptr, failed_ptr,
    counters_ptr, progress_ptr, header_block_stride, local_rank,
    HOSTS: tl.constexpr, PADDED_HOSTS: tl.constexpr, RANKS_PER_HOST: tl.constexpr,
    PADDED_RANKS: tl.constexpr, WORLD: tl.constexpr, PADDED: tl.constexpr,
    NUM_FIELDS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Share the received headers with the ranks of this host, and verify the headers of all ranks.

    Grid: (1,). If a header is wrong, or if a call failed before, `failed` is set, and so is the
    flag that ends all waits of this rank for other ranks of its host.

    header_blocks_ptr: int64; the header from host h is at h * header_block_stride.
    headers_heap_ptr: (2, WORLD, NUM_FIELDS) int64 in the memory of this host. Calls use the halves
        alternately. When a rank writes to a half, all ranks have read the headers of the last call
        that used it, because they have signaled the call after that one.
    flags_ptr: (RANKS_PER_HOST,) int32. Flag r is the number of the last call for which rank r of
        this host has written its headers.
    deltas_ptr: (RANKS_PER_HOST,) int64; see `signals`.
    state_ptr: (1,) int32, the number of the last call.
    wait_failed_ptr, wait_status_ptr, timeout_ns: see `signals.wait_for_all`.
    header_ptr, limits_ptr, words_ptr, host_words_ptr, failed_ptr: see `verify_headers`.
    local_rank: this rank among the ranks of its host.
    PADDED_HOSTS, PADDED_RANKS, PADDED: powers of two >= HOSTS, RANKS_PER_HOST and WORLD.
    """
    number = tl.load(state_ptr) + 1
    first_row = (number & 1) * WORLD
    host = tl.arange(0, PADDED_HOSTS)[:, None]
    field = tl.arange(0, PADDED_FIELDS)[None, :]
    mask = (host < HOSTS) & (field < NUM_FIELDS)
    headers = tl.load(header_blocks_ptr + host * header_block_stride + field, mask=mask, other=0)
    word = (first_row + host * RANKS_PER_HOST + local_rank) * NUM_FIELDS + field
    for peer in tl.static_range(RANKS_PER_HOST):
        out = peer_pointer(headers_heap_ptr, deltas_ptr, peer)
        tl.store(out + word, headers, mask=mask)
    tl.debug_barrier()  # every warp stores before any warp signals
    signal(flags_ptr, deltas_ptr, local_rank, number, wait_failed_ptr, RANKS_PER_HOST, PADDED_RANKS)
    wait_failed = wait_for_all(
        flags_ptr, number, wait_failed_ptr, wait_status_ptr, timeout_ns, 1, RANKS_PER_HOST,
        PADDED_RANKS, INTERPRETED,
    )  # fmt: skip
    tl.store(state_ptr, number)
    count_received(counters_ptr, progress_ptr)
    if wait_failed > 0:
        tl.store(failed_ptr, 1)  # headers are missing
    else:
        verify_headers(
            headers_heap_ptr + first_row * NUM_FIELDS, NUM_FIELDS, header_ptr, limits_ptr,
            words_ptr, host_words_ptr, failed_ptr, WORLD, PADDED, NUM_FIELDS,
        )  # fmt: skip
    tl.debug_barrier()
    # Ranks that make different calls must not wait for each other's rows.
    if tl.load(failed_ptr) != 0:
        tl.store(wait_failed_ptr, 1)
