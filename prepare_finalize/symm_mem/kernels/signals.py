"""Device functions for accessing other ranks' memory and for flags between ranks.

Every rank has the same layout in memory that all can access. Adding `deltas_ptr[r]`, (W,) int64, to
an address of this rank's memory gives rank r's address; it is 0 for this rank. For each phase,
flags (W,) int32 hold the number of each rank's last finished call. Numbers only grow (and wrap
around), so flags are never reset, and a call replayed from a CUDA graph needs no new argument.
"""

from time import monotonic_ns, sleep

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

_PAUSE_S = 0.0002


class HostClock(int):
    """Python's monotonic clock, with a short sleep.

    A class, because a Triton kernel may refer to no other kind of callable. Waiting loops call it
    repeatedly; the sleep lets processes of other ranks use the CPU.
    """

    def __new__(cls) -> int:
        sleep(_PAUSE_S)
        return monotonic_ns()


@triton.jit
def peer_pointer(pointer, deltas_ptr, rank):
    """Return the address of another rank for `pointer` into this rank's memory; 16-byte aligned."""
    address = pointer.to(tl.int64) + tl.load(deltas_ptr + rank)
    return tl.multiple_of(address.to(pointer.dtype), 16)


@triton.jit
def row_at_peer(peer_rows_ptr, rank, token, tokens, row, HAS_PEER_ROWS: tl.constexpr):
    """Return the int64 row of a token in the memory of `rank`: `row`, or its entry in the table."""
    if HAS_PEER_ROWS:
        return tl.load(peer_rows_ptr + rank * tokens + token, mask=token < tokens, other=-1).to(
            tl.int64
        )
    else:
        return row


@triton.jit
def is_last_program(counter_ptr):
    """Return whether this is the last program of the launch to get here.

    For the last one, the writes of all others are visible, and the counter is 0 again.
    """
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1
    if is_last:
        tl.store(counter_ptr, 0)
    return is_last


@triton.jit
def signal(
    flags_ptr, deltas_ptr, rank, number, failed_ptr, WORLD: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """Set this rank's flag on every rank, releasing all writes before it.

    Does nothing after a failure, because results computed since then are invalid.
    """
    peer = tl.arange(0, PADDED)
    mask = (peer < WORLD) & (tl.load(failed_ptr, volatile=True) == 0)
    deltas = tl.load(deltas_ptr + peer, mask=mask, other=0)
    pointers = ((flags_ptr + rank).to(tl.int64) + deltas).to(flags_ptr.dtype)
    numbers = tl.zeros((PADDED,), tl.int32) + number
    tl.atomic_xchg(pointers, numbers, mask=mask, sem="release", scope="sys")


@triton.jit
def _load_acquire(pointers, INTERPRETED: tl.constexpr):
    """Load int32 flags with acquire semantics.

    After a barrier, writes of other ranks before those flags are visible to all threads.
    """
    if INTERPRETED:
        return tl.load(pointers, volatile=True)
    else:
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b32 $0, [$1];", "=r,l", [pointers.to(tl.int64)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _now(INTERPRETED: tl.constexpr):
    """Return nanoseconds; interpreted kernels read Python's clock."""
    if INTERPRETED:
        return HostClock()
    else:
        return globaltimer()


@triton.jit
def wait_for_all(
    flags_ptr, number, failed_ptr, status_ptr, timeout_ns,
    PHASE: tl.constexpr, WORLD: tl.constexpr, PADDED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Wait until every rank's flag has reached `number`; return whether a wait ever failed.

    timeout_ns: timeout in nanoseconds, int64. On timeout, the first to fail sets *failed_ptr and
    writes PHASE << 56 | missing ranks as bits << 32 | number to *status_ptr, int64. After a
    failure, even one that another rank wrote there, no wait blocks.
    """
    rank = tl.arange(0, PADDED)
    pointers = flags_ptr + tl.minimum(rank, WORLD - 1)  # NaN-free: integers
    failed = tl.load(failed_ptr, volatile=True)
    started = _now(INTERPRETED)
    is_waiting = 1 - failed
    while is_waiting > 0:
        # Compare by difference, because numbers wrap around.
        is_late = (_load_acquire(pointers, INTERPRETED) - number < 0) & (rank < WORLD)
        is_waiting = tl.max(is_late.to(tl.int32), axis=0)  # NaN-free: integers
        if is_waiting > 0:
            failed = tl.load(failed_ptr, volatile=True)
            if failed > 0:
                is_waiting = 0
            elif _now(INTERPRETED) - started > timeout_ns:
                missing = tl.sum(tl.where(is_late, 1 << rank, 0), axis=0).to(tl.int64)
                word = (missing << 32) + (number.to(tl.int64) & 0xFFFFFFFF)
                word += tl.full((), PHASE, tl.int64) << 56
                if tl.atomic_cas(failed_ptr, 0, 1) == 0:
                    tl.store(status_ptr, word)
                failed = 1
                is_waiting = 0
    tl.debug_barrier()
    return failed
