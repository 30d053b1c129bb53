"""Triton functions that access the memory of peers, and synchronize ranks through flags.

All ranks use the same layout of symmetric memory. Adding deltas[r], (W,) int64, to an address in
the memory of this rank gives the address of the same object on rank r. deltas[rank] is 0.

For each phase, dispatch and combine, every rank has flags (W,) int32. Flag r is the number of the
last call for which rank r has finished the phase. The numbers increase by 1 per call (modulo 2^32),
so flags are never reset, and a call replayed from a CUDA graph needs no new argument.
"""

from time import monotonic_ns, sleep

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

_PAUSE_S = 0.0002


class HostClock(int):
    """Monotonic clock of the host in nanoseconds, for interpreted kernels.

    Loops that poll flags call this class. Each call sleeps, so that the processes of other ranks
    get the CPU. The clock is a class because Triton kernels may not call Python functions.
    """

    def __new__(cls) -> int:
        sleep(_PAUSE_S)
        return monotonic_ns()


@triton.jit
def peer_pointer(pointer, deltas_ptr, rank):
    """Translate `pointer`, 16-byte aligned in the memory of this rank, to the address on `rank`."""
    address = pointer.to(tl.int64) + tl.load(deltas_ptr + rank)
    return tl.multiple_of(address.to(pointer.dtype), 16)


@triton.jit
def row_at_peer(peer_rows_ptr, rank, token, tokens, row, HAS_PEER_ROWS: tl.constexpr):
    """Return the int64 row of a token in the memory of `rank`.

    If HAS_PEER_ROWS, return peer_rows_ptr[rank, token], or -1 if the token is not sent to `rank`.
    Otherwise, return `row`.
    """
    if HAS_PEER_ROWS:
        return tl.load(peer_rows_ptr + rank * tokens + token, mask=token < tokens, other=-1).to(
            tl.int64
        )
    else:
        return row


@triton.jit
def is_last_program(counter_ptr):
    """Return whether this is the last program of the launch to call this function.

    The writes of all other programs are visible to the last program, which resets the counter to 0.
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
    """Set this rank's flag to `number` on every rank, with release semantics.

    Do nothing after a failed wait, because later results are invalid.
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

    After a subsequent barrier, all threads see the values that other ranks wrote before they set
    these flags.
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
    if INTERPRETED:
        return HostClock()
    else:
        return globaltimer()


@triton.jit
def wait_for_all(
    flags_ptr, number, failed_ptr, status_ptr, timeout_ns,
    PHASE: tl.constexpr, WORLD: tl.constexpr, PADDED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Wait until the flags of all ranks have reached `number`; return whether any wait has failed.

    On a timeout, set *failed_ptr. The first program that does so also writes the int64
    PHASE << 56 | bitmask of missing ranks << 32 | number to *status_ptr. Once *failed_ptr is set,
    by this rank or a peer, waits return immediately.

    timeout_ns: int64.
    PHASE: 1 for a dispatch, 2 for a combine.
    """
    rank = tl.arange(0, PADDED)
    pointers = flags_ptr + tl.minimum(rank, WORLD - 1)  # NaN-free: integer operands
    failed = tl.load(failed_ptr, volatile=True)
    started = _now(INTERPRETED)
    is_waiting = 1 - failed
    while is_waiting > 0:
        # Compare by difference, because numbers wrap around.
        is_late = (_load_acquire(pointers, INTERPRETED) - number < 0) & (rank < WORLD)
        is_waiting = tl.max(is_late.to(tl.int32), axis=0)  # NaN-free: integer operands
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
