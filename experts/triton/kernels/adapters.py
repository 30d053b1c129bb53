"""Device functions for LoRA adapters: the shrink u = A x of a tile, and the expand that adds B u.

An adapter has a matrix A (rank, K) and a matrix B (N, rank) for every GEMM and expert. The matrices
of all loaded adapters are stacked, and the index of an adapter in the stack is its slot. The shrink
kernels (`shrink`) compute u with `shrink_tile`; the GEMM kernels add B u to their accumulators with
`expand_adapters`.

The rows of a tile can have different adapters. Both functions therefore loop over the slots that
occur in the tile, each once and in ascending order, with the rows of other slots masked to zero.
Matrices of other slots are not read. Rows without an adapter get the same result as in a call
without LoRA.
"""

import triton
import triton.language as tl

SLOT_END = tl.constexpr(2147483647)  # larger than any adapter slot


@triton.jit
def load_slots(adapter_slots_ptr, tokens, row_mask, num_adapter_slots):
    """Load the adapter slot of each row of a tile. A row without an adapter gets SLOT_END.

    adapter_slots_ptr: int32, one slot per token. A slot outside [0, num_adapter_slots) means no
        adapter.
    tokens: (BLOCK_M,), the index into adapter_slots_ptr for each row.
    row_mask: (BLOCK_M,), False for rows that do not exist.
    """
    adapter_slots = tl.load(adapter_slots_ptr + tokens, mask=row_mask, other=-1)
    return tl.where(
        (adapter_slots >= 0) & (adapter_slots < num_adapter_slots), adapter_slots, SLOT_END
    )


@triton.jit
def shrink_tile(
    x_ptrs, adapter_slots, lora_a_ptr, rank_row, rank_mask, size_k, stride_xk, stride_lora_a_slot,
    stride_lora_a_rank,
    INPUT_PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return u = A x of a tile, float32 (BLOCK_M, BLOCK_RANK). It is 0 for rows without an adapter.

    x_ptrs: (BLOCK_M, 1), pointers to the rows of x at k = 0.
    adapter_slots: (BLOCK_M,), the slot of each row, from `load_slots`.
    lora_a_ptr: pointer to A of slot 0 and of the tile's expert.
    rank_row: (BLOCK_RANK,), the rows of A to multiply by.
    rank_mask: (BLOCK_RANK,), False for rows of A that do not exist.
    size_k: K, the length of a row of x and of A.
    stride_lora_a_slot, stride_lora_a_rank: strides of A between slots and between rows.
    INPUT_PRECISION: `input_precision` of tl.dot, used for float32 operands.
    """
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_RANK), tl.float32)
    slot = tl.min(adapter_slots, axis=0)  # NaN-free: integer operands
    while slot < SLOT_END:
        in_slot = (adapter_slots == slot)[:, None]
        lora_a_ptrs = (
            lora_a_ptr
            + slot.to(tl.int64) * stride_lora_a_slot
            + rank_row.to(tl.int64)[None, :] * stride_lora_a_rank
        )
        for start in range(0, size_k, BLOCK_K):
            in_bounds = start + k < size_k
            x = tl.load(
                x_ptrs + (start + k)[None, :] * stride_xk,
                mask=in_slot & in_bounds[None, :],
                other=0.0,
            )
            lora_a = tl.load(
                lora_a_ptrs + (start + k)[:, None],
                mask=rank_mask[None, :] & in_bounds[:, None],
                other=0.0,
            )
            total = tl.dot(x, lora_a, total, input_precision=INPUT_PRECISION)
        slot = tl.min(
            tl.where(adapter_slots > slot, adapter_slots, SLOT_END), axis=0
        )  # NaN-free: integer operands
    return total


@triton.jit
def load_expand_operands(
    slot, start, adapter_slots, rows, lora_u_ptr, lora_b_ptr, row, up_row_offset, column_mask,
    lora_rank,
    stride_lora_u, stride_lora_b_slot, stride_lora_b_n, LORA_UP_OFFSET: tl.constexpr,
    GATED: tl.constexpr, BLOCK_RANK: tl.constexpr,
):  # fmt: skip
    """Load a block of u and B of one slot, which begins at rank index `start`.

    Return (u, B, u for up, B for up), where u is (BLOCK_M, BLOCK_RANK) and B is (BLOCK_RANK,
    BLOCK_N). If not GATED, the last two are the same as the first two. u is zero for rows with
    another slot. For SLOT_END, nothing is read, and all results are zero. For the other arguments,
    see `expand_adapters`.
    """
    rank_index = start + tl.arange(0, BLOCK_RANK)
    in_bounds = (rank_index < lora_rank) & (slot < SLOT_END)
    u_mask, b_mask = (
        (adapter_slots == slot)[:, None] & in_bounds[None, :],
        in_bounds[:, None] & column_mask[None],
    )
    u_ptrs = lora_u_ptr + rows.to(tl.int64)[:, None] * stride_lora_u + rank_index[None, :]
    lora_b_ptr += slot.to(tl.int64) * stride_lora_b_slot
    lora_b_ptrs = lora_b_ptr + row.to(tl.int64)[None, :] * stride_lora_b_n + rank_index[:, None]
    u = tl.load(u_ptrs, mask=u_mask, other=0.0)
    lora_b = tl.load(lora_b_ptrs, mask=b_mask, other=0.0)
    up_u, up_lora_b = u, lora_b
    if GATED:
        if LORA_UP_OFFSET > 0:
            up_u = tl.load(u_ptrs + LORA_UP_OFFSET, mask=u_mask, other=0.0)
        # Triton specializes up_row_offset = 1 to a constant, which has no method `to`. The sum with
        # `row` is a tensor.
        up_ptrs = (
            lora_b_ptr
            + (row + up_row_offset).to(tl.int64)[None, :] * stride_lora_b_n
            + rank_index[:, None]
        )
        up_lora_b = tl.load(up_ptrs, mask=b_mask, other=0.0)
    return u, lora_b, up_u, up_lora_b


@triton.jit
def expand_loaded(
    gate, up, u, lora_b, up_u, up_lora_b, adapter_slots, rows, lora_u_ptr, lora_b_ptr, row,
    up_row_offset, column_mask, lora_rank,
    stride_lora_u, stride_lora_b_slot, stride_lora_b_n, LORA_UP_OFFSET: tl.constexpr,
    GATED: tl.constexpr, INPUT_PRECISION: tl.constexpr, BLOCK_RANK: tl.constexpr,
):  # fmt: skip
    """Like `expand_adapters`, but takes the operands of the first step as arguments.

    A GEMM kernel loads these operands before its main loop to hide the latency.

    u, lora_b, up_u, up_lora_b: the result of `load_expand_operands` for the first slot and start =
        0.
    """
    slot, start = tl.min(adapter_slots, axis=0), 0  # NaN-free: integer operands
    while slot < SLOT_END:
        gate = tl.dot(u, lora_b, gate, input_precision=INPUT_PRECISION)
        if GATED:
            up = tl.dot(up_u, up_lora_b, up, input_precision=INPUT_PRECISION)
        start += BLOCK_RANK
        if start >= lora_rank:
            # NaN-free: integer operands
            slot, start = tl.min(tl.where(adapter_slots > slot, adapter_slots, SLOT_END), axis=0), 0
        u, lora_b, up_u, up_lora_b = load_expand_operands(
            slot, start, adapter_slots, rows, lora_u_ptr, lora_b_ptr, row, up_row_offset,
            column_mask, lora_rank,
            stride_lora_u, stride_lora_b_slot, stride_lora_b_n, LORA_UP_OFFSET, GATED, BLOCK_RANK,
        )  # fmt: skip
    return gate, up


@triton.jit
def expand_adapters(
    gate, up, adapter_slots, rows, lora_u_ptr, lora_b_ptr, row, up_row_offset, column_mask,
    lora_rank,
    stride_lora_u, stride_lora_b_slot, stride_lora_b_n, LORA_UP_OFFSET: tl.constexpr,
    GATED: tl.constexpr, INPUT_PRECISION: tl.constexpr, BLOCK_RANK: tl.constexpr,
):  # fmt: skip
    """Add B u of each row to gate and up; return (gate, up), float32 (BLOCK_M, BLOCK_N).

    gate, up: the accumulators of the GEMM.
    adapter_slots: (BLOCK_M,), the slot of each row, from `load_slots`.
    rows: (BLOCK_M,), the row of u for each row of the tile.
    lora_u_ptr: u, from a shrink kernel; rows are stride_lora_u apart.
    lora_b_ptr: pointer to B of slot 0 and of the tile's expert.
    row: (BLOCK_N,), the row of B for the gate (or only) value of each column. For up, it is row +
        up_row_offset.
    column_mask: (BLOCK_N,), False for columns that do not exist.
    stride_lora_b_slot, stride_lora_b_n: strides of B between slots and between rows.
    LORA_UP_OFFSET: the first column of u for up; 0 if gate and up use the same columns.
    GATED: whether there are up values.
    BLOCK_RANK: elements of the rank per step.
    """
    # NaN-free: integer operands
    u, lora_b, up_u, up_lora_b = load_expand_operands(
        tl.min(adapter_slots, axis=0), 0, adapter_slots, rows, lora_u_ptr, lora_b_ptr, row,
        up_row_offset, column_mask, lora_rank,
        stride_lora_u, stride_lora_b_slot, stride_lora_b_n, LORA_UP_OFFSET, GATED, BLOCK_RANK,
    )  # fmt: skip
    return expand_loaded(
        gate, up, u, lora_b, up_u, up_lora_b, adapter_slots, rows, lora_u_ptr, lora_b_ptr, row,
        up_row_offset, column_mask, lora_rank,
        stride_lora_u, stride_lora_b_slot, stride_lora_b_n, LORA_UP_OFFSET, GATED, INPUT_PRECISION,
        BLOCK_RANK,
    )  # fmt: skip
