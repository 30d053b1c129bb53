"""Device functions: memory of other ranks, and flags that tell them how far this one is.

Every rank keeps the same layout in memory that all can reach. `deltas_ptr` (W,) int64 says how
many bytes beyond an address of this rank's the same place of another is mapped, 0 for this rank.
A flag (W,) int32 per phase holds, for each rank, the number of its last finished call: numbers only
grow (and wrap), so nothing is ever reset and a call replayed from a CUDA graph needs no argument.
"""

from time import monotonic_ns, sleep

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

_PAUSE_S = 0.0002


class HostNanoseconds(int):
    """Python's clock. A class, because a kernel may name no other thing that can be called.

    Asked again and again by who waits: other ranks may need the processor.
    """

    def __new__(cls) -> int:
        sleep(_PAUSE_S)
        return monotonic_ns()


@triton.jit
def of_rank(pointer, deltas_ptr, rank):
    """`pointer` into this rank's memory -> the same place of another; 16 bytes aligned."""
    address = pointer.to(tl.int64) + tl.load(deltas_ptr + rank)
    return tl.multiple_of(address.to(pointer.dtype), 16)


@triton.jit
def place_of(places_ptr, rank, token, tokens, row, PLACED: tl.constexpr):
    """Where a token's row is in the memory of `rank`, int64: `row`, or as the table says."""
    if PLACED:
        return tl.load(places_ptr + rank * tokens + token, mask=token < tokens, other=-1).to(
            tl.int64
        )
    else:
        return row


@triton.jit
def last_of_program(counter_ptr):
    """Whether all other programs of the launch came here before; then what they wrote is visible
    to this one, and the counter is 0 again."""
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1
    if last:
        tl.store(counter_ptr, 0)
    return last


@triton.jit
def signal(
    flags_ptr, deltas_ptr, rank, number, failed_ptr, WORLD: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """Set this rank's flag at every rank; what was written before is visible to who sees it.

    Not after a failure: what this rank has computed since then is not to be used.
    """
    to = tl.arange(0, PADDED)
    mask = (to < WORLD) & (tl.load(failed_ptr, volatile=True) == 0)
    deltas = tl.load(deltas_ptr + to, mask=mask, other=0)
    pointers = ((flags_ptr + rank).to(tl.int64) + deltas).to(flags_ptr.dtype)
    numbers = tl.zeros((PADDED,), tl.int32) + number
    tl.atomic_xchg(pointers, numbers, mask=mask, sem="release", scope="sys")


@triton.jit
def _load_acquire(pointers, INTERPRETED: tl.constexpr):
    """int32 values; what other ranks wrote before them is visible after a barrier."""
    if INTERPRETED:
        return tl.load(pointers, volatile=True)
    else:
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b32 $0, [$1];", "=r,l", [pointers.to(tl.int64)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _now(INTERPRETED: tl.constexpr):
    """Nanoseconds. What is interpreted is Python, and may ask Python's clock."""
    if INTERPRETED:
        return HostNanoseconds()
    else:
        return globaltimer()


@triton.jit
def wait_for_all(
    flags_ptr, number, failed_ptr, status_ptr, patience,
    PHASE: tl.constexpr, WORLD: tl.constexpr, PADDED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Wait until every rank's flag has reached `number`; returns whether a wait ever failed.

    patience: nanoseconds, int64. Who runs out of it sets *failed_ptr and
    writes PHASE << 56 | missing ranks as bits << 32 | number to *status_ptr, int64, if it is the
    first. After a failure nobody waits any more, one that another rank wrote there included.
    """
    rank = tl.arange(0, PADDED)
    pointers = flags_ptr + tl.minimum(rank, WORLD - 1)  # NaN-free: integers
    failed = tl.load(failed_ptr, volatile=True)
    started = _now(INTERPRETED)
    behind = 1 - failed
    while behind > 0:
        # By difference: numbers wrap.
        late = (_load_acquire(pointers, INTERPRETED) - number < 0) & (rank < WORLD)
        behind = tl.max(late.to(tl.int32), axis=0)  # NaN-free: integers
        if behind > 0:
            failed = tl.load(failed_ptr, volatile=True)
            if failed > 0:
                behind = 0
            elif _now(INTERPRETED) - started > patience:
                missing = tl.sum(tl.where(late, 1 << rank, 0), axis=0).to(tl.int64)
                word = (missing << 32) + (number.to(tl.int64) & 0xFFFFFFFF)
                word += tl.full((), PHASE, tl.int64) << 56
                if tl.atomic_cas(failed_ptr, 0, 1) == 0:
                    tl.store(status_ptr, word)
                failed = 1
                behind = 0
    tl.debug_barrier()
    return failed
