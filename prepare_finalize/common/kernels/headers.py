"""Triton functions and kernels that count calls, and write and compare their headers.

A header is the metadata that every rank sends with its rows, so that the ranks can check on the
device that they make the same call (`common.device_status`). The kernels of `kernels.blocks` call
the functions. The kernels at the end of this file are for calls that send no rows.

`counters_ptr` points to 4 int64 in device memory, in the order of the constants `_ORDER` to
`_ENDED`. `progress_ptr` points to a copy of the last three in pinned memory.
"""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.pdl import pdl_wait

# Fields of a header (`device_status.FIELDS`), and the factor of the hash in `count_exchange`.
LAYER = tl.constexpr(0)
CALL = tl.constexpr(1)
ORDER = tl.constexpr(2)
TOKENS = tl.constexpr(3)
ROWS = tl.constexpr(4)
REFUSAL = tl.constexpr(5)
SENT = tl.constexpr(6)
PADDED_FIELDS = tl.constexpr(8)
ORDER_FACTOR = tl.constexpr(1000003)
# Elements of the counters.
_ORDER = tl.constexpr(0)
_BEGUN = tl.constexpr(1)
_RECEIVED = tl.constexpr(2)
_ENDED = tl.constexpr(3)


@triton.jit
def count_exchange(counters_ptr, layer, IS_COMBINE: tl.constexpr):
    """Add a dispatch or combine to the hash of the sequence of exchanges; return the hash."""
    order = tl.load(counters_ptr + _ORDER) * ORDER_FACTOR + (2 * layer + IS_COMBINE)
    tl.debug_barrier()  # every warp loads before any warp stores
    tl.store(counters_ptr + _ORDER, order)
    return order


@triton.jit
def _count(counters_ptr, progress_ptr, index):
    count = tl.load(counters_ptr + index) + 1
    tl.store(counters_ptr + index, count)
    tl.store(progress_ptr + index - _BEGUN, count)


@triton.jit
def count_begin(counters_ptr, progress_ptr):
    _count(counters_ptr, progress_ptr, _BEGUN)


@triton.jit
def count_received(counters_ptr, progress_ptr):
    """Count a call that has received the rows of all ranks."""
    _count(counters_ptr, progress_ptr, _RECEIVED)


@triton.jit
def count_end(counters_ptr, progress_ptr):
    _count(counters_ptr, progress_ptr, _ENDED)


@triton.jit
def new_header(calls_ptr, counters_ptr, layer, tokens, rows, refusal):
    """Count a call of the layer and its dispatch; return the header, (PADDED_FIELDS,) int64."""
    call = tl.load(calls_ptr) + 1
    # The barrier in count_exchange also separates the load from calls_ptr from the store to it.
    order = count_exchange(counters_ptr, layer, False)
    tl.store(calls_ptr, call)
    field = tl.arange(0, PADDED_FIELDS)
    header = tl.where(field == LAYER, layer, 0).to(tl.int64)
    header = tl.where(field == CALL, call, header)
    header = tl.where(field == ORDER, order, header)
    header = tl.where(field == TOKENS, tokens, header)
    header = tl.where(field == ROWS, rows, header)
    return tl.where(field == REFUSAL, refusal, header)


@triton.jit
def verify_headers(
    headers_ptr, stride, local_header_ptr, limits_ptr, words_ptr, host_words_ptr, failed_ptr,
    WORLD: tl.constexpr, PADDED: tl.constexpr, NUM_FIELDS: tl.constexpr,
):  # fmt: skip
    """Compare the headers of all ranks. If one is wrong, set the failed flag.

    If no earlier call has failed, also write the headers and limits for the host.

    headers_ptr: int64; the header of rank w is at w * stride.
    local_header_ptr: the header that this rank has sent.
    limits_ptr: (4,) int64: maximum tokens, maximum rows, whether tokens must be equal, 1.
    words_ptr, host_words_ptr: (WORLD * NUM_FIELDS + 4,) int64 in device and pinned memory; output
        of the headers and the limits. The last word is written last, with release semantics, so
        that the host reads complete headers.
    failed_ptr: (1,) int32.
    """
    rank = tl.arange(0, PADDED)
    is_rank = rank < WORLD
    row = headers_ptr + rank * stride
    wrong = tl.zeros((PADDED,), tl.int32)
    for i in tl.static_range(3):  # layer, call and order
        value = tl.load(row + i, mask=is_rank, other=0)
        wrong |= value != tl.load(local_header_ptr + i)
    tokens = tl.load(row + TOKENS, mask=is_rank, other=0)
    rows = tl.load(row + ROWS, mask=is_rank, other=0)
    refusal = tl.load(row + REFUSAL, mask=is_rank, other=-1)
    wrong |= (tokens < 0) | (tokens > tl.load(limits_ptr))
    wrong |= (rows < 0) | (rows > tl.load(limits_ptr + 1))
    equal_tokens = tl.load(limits_ptr + 2) > 0
    wrong |= (tokens != tl.load(local_header_ptr + TOKENS)) & equal_tokens
    wrong |= refusal != -1
    is_wrong = tl.max(tl.where(is_rank, wrong, 0), axis=0) > 0  # NaN-free: integer operands
    if is_wrong:
        if tl.load(failed_ptr) == 0:
            field = tl.arange(0, PADDED_FIELDS)
            mask = is_rank[:, None] & (field < NUM_FIELDS)[None, :]
            headers = tl.load(row[:, None] + field[None, :], mask=mask, other=0)
            word = rank[:, None] * NUM_FIELDS + field[None, :]
            tl.store(words_ptr + word, headers, mask=mask)
            tl.store(host_words_ptr + word, headers, mask=mask)
            limit = tl.arange(0, 4)
            limits = tl.load(limits_ptr + limit)
            tl.store(words_ptr + WORLD * NUM_FIELDS + limit, limits)
            tl.store(host_words_ptr + WORLD * NUM_FIELDS + limit, limits, mask=limit < 3)
            # The barrier orders the stores of every warp before the store of the last word.
            tl.debug_barrier()
            tl.atomic_xchg(
                host_words_ptr + WORLD * NUM_FIELDS + 3, tl.full((), 1, tl.int64),
                sem="release", scope="sys",
            )  # fmt: skip
        tl.store(failed_ptr, 1)


@triton.jit
def begin_kernel(counters_ptr, progress_ptr):
    """Count a call that begins. Grid: (1,)."""
    count_begin(counters_ptr, progress_ptr)


@triton.jit
def header_kernel(
    header_ptr, calls_ptr, counters_ptr, progress_ptr, layer, tokens, refusal,
    COUNT_BEGIN: tl.constexpr, NUM_FIELDS: tl.constexpr, USE_PDL: tl.constexpr = False,
):  # fmt: skip
    """Write the header of a call that sends no rows. Grid: (1,)."""
    pdl_wait(USE_PDL)
    if COUNT_BEGIN:
        count_begin(counters_ptr, progress_ptr)
    header = new_header(calls_ptr, counters_ptr, layer, tokens, 0, refusal)
    field = tl.arange(0, PADDED_FIELDS)
    tl.store(header_ptr + field, header, mask=field < NUM_FIELDS)


@triton.jit
def verify_kernel(
    headers_ptr, header_ptr, limits_ptr, words_ptr, host_words_ptr, failed_ptr, counters_ptr,
    progress_ptr, stride,
    WORLD: tl.constexpr, PADDED: tl.constexpr, NUM_FIELDS: tl.constexpr,
):  # fmt: skip
    """Run `verify_headers`, and count the call as received. Grid: (1,)."""
    count_received(counters_ptr, progress_ptr)
    verify_headers(
        headers_ptr, stride, header_ptr, limits_ptr, words_ptr, host_words_ptr, failed_ptr,
        WORLD, PADDED, NUM_FIELDS,
    )  # fmt: skip
