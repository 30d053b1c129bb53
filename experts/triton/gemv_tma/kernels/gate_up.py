"""`gemv_tma_gate_up_kernel`: GEMM 1 of the gemv_tma path, h = act(x W1^T), with fp8 weights.

A pair is a token together with one of its top_k experts: pair p belongs to token p // top_k. A work
item is a pair and a block of 32 output columns. Persistent programs loop over work items.
`gemv_tma.kernels.pipeline` describes the ring of weights and the vectors in shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language import div_rn
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from experts.triton.gemv_tma.kernels.pipeline import (
    ACC_LAYOUT,
    PANEL,
    PIECE,
    ROWS,
    SWIZZLED,
    UNSWIZZLED,
    VECTORS,
    load_pieces,
    make_ring,
    multiply,
    prefetch_scales,
    repeat_scales,
    row_amax,
    store_vectors,
    vector_row_layout,
    wait_empty_stage,
)
from experts.triton.kernels.gluon_epilogue import activate
from modular_kernel.ops.kernels.extrema import max_nan
from modular_kernel.ops.kernels.ids import load_local_ids
from modular_kernel.ops.kernels.quantize import scale_of
from modular_kernel.replay.launch.triton_versions import tma_async_load

_COLUMNS = gl.constexpr(32)  # output columns per tile, which has 32 gate rows and 32 up rows
_GATE_UP_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 2], [32, 1], [4, 1], [1, 0]))
_BLOCK_IDS = gl.constexpr(128)
_IDS_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def _locate_work_item(
    index, num_pairs, intermediate_size, TOP_K: gl.constexpr, TOKENS_IN_GROUP: gl.constexpr
):
    """Return (pair, column block, first token of the group) of a work item.

    A group is TOKENS_IN_GROUP tokens whose vectors are in shared memory at the same time. Work
    items are ordered by group, then by column block, then by pair.

    index: the number of the work item.
    """
    blocks = gl.cdiv(intermediate_size, _COLUMNS)
    group = index // (TOKENS_IN_GROUP * TOP_K * blocks)
    first_pair = group * TOKENS_IN_GROUP * TOP_K
    index_in_group = index - first_pair * blocks
    # NaN-free: integer operands
    count = gl.minimum(TOKENS_IN_GROUP * TOP_K, num_pairs - first_pair)
    return first_pair + index_in_group % count, index_in_group // count, group * TOKENS_IN_GROUP


@gluon.jit
def _run_producer(
    w_desc, ring, full, empty, w_scale_ptr, topk_ids_ptr, expert_map_ptr, num_pairs, num_items,
    intermediate_size,
    hidden_size, weight_rows, up_row_offset, num_experts, num_local_experts, scale_rows,
    scale_groups,
    BLOCK_SCALES: gl.constexpr, TOP_K: gl.constexpr, TOKENS_IN_GROUP: gl.constexpr,
    HAS_EXPERT_MAP: gl.constexpr,
    GATE_STRIDE: gl.constexpr,
):  # fmt: skip
    """Run the producer warp: load the weight panels of this program's work items with TMA.

    The arguments are those of the kernel.
    """
    PANELS_PER_STAGE: gl.constexpr = ring.shape[0] // full.shape[0]
    HALF_ROWS: gl.constexpr = w_desc.block_type.shape[0]
    step = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        pair, block, _ = _locate_work_item(
            item, num_pairs, intermediate_size, TOP_K, TOKENS_IN_GROUP
        )
        local_expert, _ = load_local_ids(
            topk_ids_ptr,
            pair,
            pair >= 0,
            expert_map_ptr,
            num_experts,
            num_local_experts,
            HAS_EXPERT_MAP,
        )
        if local_expert >= 0:
            first_row = local_expert * weight_rows + block * (_COLUMNS * GATE_STRIDE)
            if BLOCK_SCALES:
                row = block * (_COLUMNS * GATE_STRIDE)
                scale_ptr = w_scale_ptr + local_expert.to(gl.int64) * scale_rows * scale_groups
                prefetch_scales(scale_ptr + row // PANEL * scale_groups, scale_groups)
                if GATE_STRIDE == 1:
                    row += up_row_offset
                    prefetch_scales(scale_ptr + row // PANEL * scale_groups, scale_groups)
            for start in range(0, hidden_size, PANELS_PER_STAGE * PANEL):
                stage, full_barrier = wait_empty_stage(step, full, empty)
                mbarrier.expect(full_barrier, PANELS_PER_STAGE * ROWS * PANEL)
                for panel_index in gl.static_range(PANELS_PER_STAGE):
                    panel, k = (
                        ring.index(stage * PANELS_PER_STAGE + panel_index),
                        start + panel_index * PANEL,
                    )
                    if GATE_STRIDE == 2:
                        tma_async_load(w_desc, [first_row, k], full_barrier, panel)
                    else:
                        gate, up = (
                            panel.slice(0, HALF_ROWS, 0),
                            panel.slice(HALF_ROWS, HALF_ROWS, 0),
                        )
                        tma_async_load(w_desc, [first_row, k], full_barrier, gate)
                        tma_async_load(w_desc, [first_row + up_row_offset, k], full_barrier, up)
                step += 1


@gluon.jit
def _count_invalid(
    topk_ids_ptr,
    expert_map_ptr,
    invalid_count_ptr,
    num_pairs,
    num_experts,
    num_local_experts,
    HAS_EXPERT_MAP: gl.constexpr,
):
    """Add the number of ids outside [-1, num_experts) to the counter at invalid_count_ptr."""
    for start in range(0, num_pairs, _BLOCK_IDS):
        pairs = start + gl.arange(0, _BLOCK_IDS, _IDS_LAYOUT)
        _, invalid = load_local_ids(
            topk_ids_ptr,
            pairs,
            pairs < num_pairs,
            expert_map_ptr,
            num_experts,
            num_local_experts,
            HAS_EXPERT_MAP,
        )
        count = gl.sum(invalid.to(gl.int32), axis=0)
        if count > 0:
            gl.atomic_add(invalid_count_ptr, count)


@gluon.jit
def _store_tokens(
    vectors, scales, first_token, num_tokens, hidden_size, x_ptr, x_scale_ptr,
    stride_xm, stride_xk, stride_xsm, stride_xsk,
    TOKENS_IN_GROUP: gl.constexpr, INPUT_QUANT: gl.constexpr, BLOCK_SCALES: gl.constexpr,
    QMAX: gl.constexpr,
    MIN_SCALE: gl.constexpr,
):  # fmt: skip
    """Store the vectors of a group of tokens to shared memory, quantized.

    Return the scales of the vectors, (8,). With BLOCK_SCALES, the result is 1, because the scales
    are in shared memory.
    """
    PIECES: gl.constexpr = vectors.shape[0]
    rows = first_token + gl.arange(0, TOKENS_IN_GROUP, vector_row_layout(TOKENS_IN_GROUP))
    row_mask = rows < num_tokens
    row_ptrs = x_ptr + rows.to(gl.int64) * stride_xm
    scale_ptrs = x_scale_ptr + rows.to(gl.int64) * stride_xsm
    pieces = load_pieces(row_ptrs, stride_xk, row_mask, hidden_size, PIECES)
    x_scale = gl.full((TOKENS_IN_GROUP,), 1.0, gl.float32, vector_row_layout(TOKENS_IN_GROUP))
    if INPUT_QUANT == "token":
        amax = row_amax(pieces, row_ptrs, stride_xk, row_mask, hidden_size, PIECES)
        x_scale = scale_of(amax, QMAX, MIN_SCALE)
    elif not BLOCK_SCALES:
        x_scale = gl.load(scale_ptrs, mask=row_mask, other=1.0)
    store_vectors(
        vectors, scales, pieces, row_ptrs, stride_xk, row_mask, hidden_size, div_rn(1.0, x_scale),
        scale_ptrs, stride_xsk, INPUT_QUANT, BLOCK_SCALES, QMAX, MIN_SCALE,
    )  # fmt: skip
    return repeat_scales(x_scale)


@gluon.jit
def _run_consumer(
    ring, vectors, scales, full, empty, x_ptr, x_scale_ptr, w_scale_ptr, bias_ptr,
    topk_ids_ptr, expert_map_ptr, invalid_count_ptr, h_ptr, amax_ptr,
    num_pairs, num_items, intermediate_size, hidden_size, weight_rows, up_row_offset, num_experts,
    num_local_experts,
    stride_xm, stride_xk, stride_xsm, stride_xsk, scale_rows, scale_groups,
    TOP_K: gl.constexpr, TOKENS_IN_GROUP: gl.constexpr, HAS_EXPERT_MAP: gl.constexpr,
    GATE_STRIDE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr, ACTIVATION_ALPHA: gl.constexpr, ACTIVATION_LIMIT: gl.constexpr,
    INPUT_QUANT: gl.constexpr,
    BLOCK_SCALES: gl.constexpr, QMAX: gl.constexpr, MIN_SCALE: gl.constexpr,
):  # fmt: skip
    """Run the consumer warpgroup: multiply, apply bias and activation function, and store h.

    The arguments are those of the kernel.
    """
    if gl.program_id(0) == 0:
        _count_invalid(
            topk_ids_ptr,
            expert_map_ptr,
            invalid_count_ptr,
            num_pairs,
            num_experts,
            num_local_experts,
            HAS_EXPERT_MAP,
        )
    vector = gl.arange(0, VECTORS, gl.SliceLayout(0, ACC_LAYOUT))
    row = gl.arange(0, ROWS, gl.SliceLayout(1, ACC_LAYOUT))
    x_scale = gl.full((VECTORS,), 1.0, gl.float32, gl.SliceLayout(0, ACC_LAYOUT))
    step, resident_first_token = 0, -1
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        pair, block, first_token = _locate_work_item(
            item, num_pairs, intermediate_size, TOP_K, TOKENS_IN_GROUP
        )
        if first_token != resident_first_token:
            x_scale = _store_tokens(
                vectors, scales, first_token, num_pairs // TOP_K, hidden_size, x_ptr, x_scale_ptr,
                stride_xm, stride_xk, stride_xsm, stride_xsk,
                TOKENS_IN_GROUP, INPUT_QUANT, BLOCK_SCALES, QMAX, MIN_SCALE,
            )  # fmt: skip
            resident_first_token = first_token
        local_expert, _ = load_local_ids(
            topk_ids_ptr,
            pair,
            pair >= 0,
            expert_map_ptr,
            num_experts,
            num_local_experts,
            HAS_EXPERT_MAP,
        )
        if local_expert >= 0:
            if GATE_STRIDE == 2:
                w_row = block * ROWS + row
            else:
                w_row = block * _COLUMNS + row % _COLUMNS + row // _COLUMNS * up_row_offset
            # Rows of the last block that are past the end of the expert are not stored.
            in_bounds = w_row < weight_rows
            row_offset = local_expert.to(gl.int64) * weight_rows + w_row
            w_scale_ptrs = w_scale_ptr + row_offset
            if BLOCK_SCALES:
                scale_row = local_expert.to(gl.int64) * scale_rows + w_row // PANEL
                w_scale_ptrs = w_scale_ptr + scale_row * scale_groups
            else:
                w_scale = gl.load(w_scale_ptrs, mask=in_bounds, other=0.0)
            if HAS_BIAS:
                bias = gl.load(bias_ptr + row_offset, mask=in_bounds, other=0.0).to(gl.float32)
            acc, step = multiply(
                ring,
                vectors,
                scales,
                full,
                empty,
                step,
                hidden_size,
                w_scale_ptrs,
                in_bounds,
                BLOCK_SCALES,
            )
            # Discard the products with the vectors of other tokens.
            column_mask = (vector == (pair // TOP_K - first_token) * (VECTORS // TOKENS_IN_GROUP))[
                None, :
            ]
            value = gl.sum(gl.where(column_mask, acc * x_scale[None, :], 0.0), axis=1)
            if not BLOCK_SCALES:
                value *= w_scale
            if HAS_BIAS:
                value += bias
            if GATE_STRIDE == 2:
                halves = value.reshape((_COLUMNS, 2))
            else:
                halves = value.reshape((2, _COLUMNS)).permute((1, 0))
            gate, up = gl.convert_layout(halves, _GATE_UP_LAYOUT).split()
            h = activate(gate, up, ACTIVATION, ACTIVATION_ALPHA, ACTIVATION_LIMIT).to(
                h_ptr.dtype.element_ty
            )
            column = block * _COLUMNS + gl.arange(0, _COLUMNS, gl.SliceLayout(1, _GATE_UP_LAYOUT))
            mask = column < intermediate_size
            gl.store(h_ptr + pair.to(gl.int64) * intermediate_size + column, h, mask=mask)
            if not BLOCK_SCALES:
                amax = max_nan(gl.where(mask, gl.abs(h.to(gl.float32)), 0.0), 0)
                gl.store(amax_ptr + pair * gl.cdiv(intermediate_size, _COLUMNS) + block, amax)


@gluon.jit
def gemv_tma_gate_up_kernel(
    w_desc, x_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, topk_ids_ptr, expert_map_ptr,
    invalid_count_ptr,
    h_ptr, amax_ptr, num_pairs, intermediate_size, hidden_size, weight_rows, up_row_offset,
    num_experts, num_local_experts,
    stride_xm, stride_xk, stride_xsm, stride_xsk, scale_rows, scale_groups,
    TOP_K: gl.constexpr, TOKENS_IN_GROUP: gl.constexpr, HAS_EXPERT_MAP: gl.constexpr,
    GATE_STRIDE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr, ACTIVATION_ALPHA: gl.constexpr, ACTIVATION_LIMIT: gl.constexpr,
    INPUT_QUANT: gl.constexpr,
    BLOCK_SCALES: gl.constexpr, QMAX: gl.constexpr, MIN_SCALE: gl.constexpr,
    PIECES: gl.constexpr, PANELS_PER_STAGE: gl.constexpr, STAGES: gl.constexpr,
    num_warps: gl.constexpr,
    USE_PDL: gl.constexpr = False,
):  # fmt: skip
    """h[p, n] = act(x[p // TOP_K] @ w[expert of p, rows of n]^T) for pairs p of local experts.

    Grid: any number of programs, which share the work items (pair, block of 32 columns). A tile of
        the MMA has 64 weight rows: 32 gate rows and 32 up rows. The first program also counts the
        ids that are not valid.

    w_desc: TMA descriptor of the weights (num_experts * weight_rows, hidden_size) fp8, with boxes
        of 128 bytes along K. With GATE_STRIDE 1, up rows are up_row_offset rows after gate rows,
        and a box has 32 rows. With GATE_STRIDE 2, gate and up rows alternate, and a box has 64.
    x_ptr: (num_pairs / TOP_K, hidden_size).
    x_scale_ptr: the scales of x if INPUT_QUANT is "prequantized".
    w_scale_ptr: weight scales; see BLOCK_SCALES.
    bias_ptr: (num_experts, weight_rows), used if HAS_BIAS.
    topk_ids_ptr, expert_map_ptr, num_experts, num_local_experts, HAS_EXPERT_MAP: the expert ids of
        the pairs, and how they map to the experts on this rank; see `load_local_ids`. Pairs whose
        expert is not on this rank are skipped.
    invalid_count_ptr: int32, incremented by the number of ids outside [-1, num_experts).
    h_ptr: output (num_pairs, intermediate_size), contiguous. Rows of skipped pairs are not written.
    amax_ptr: float32 output (num_pairs, column blocks), the largest magnitude in each block of
        columns of h. Not written if BLOCK_SCALES.
    stride_*: strides of x and of the scales of x (xs); dimensions m and k.
    scale_rows, scale_groups: the shape of the weight scales of an expert; see BLOCK_SCALES.
    TOKENS_IN_GROUP: number of tokens that are in shared memory at the same time, a power of two up
        to 8.
    ACTIVATION, ACTIVATION_ALPHA, ACTIVATION_LIMIT: the activation function
        (`modular_kernel.ops.kernels.activation`).
    INPUT_QUANT: "prequantized" if x is fp8 and has scales. Otherwise the kernel quantizes x, with
        one scale per token ("token") or per 128 values ("group").
    BLOCK_SCALES: whether the weight scales are (num_experts, scale_rows, scale_groups), with one
        scale per 128 x 128 block. Otherwise, they are (num_experts, weight_rows).
    QMAX, MIN_SCALE: the largest fp8 value, and the minimum scale of x.
    PIECES: number of pieces of 1024 values in a row of x.
    PANELS_PER_STAGE: number of panels in a stage of the ring.
    STAGES: number of stages of the ring.
    USE_PDL: whether the launch uses programmatic dependent launch (`pdl_wait`).
    """
    ring, full, empty = make_ring(w_desc.dtype, STAGES, PANELS_PER_STAGE)
    vectors = gl.allocate_shared_memory(w_desc.dtype, [PIECES, VECTORS, PIECE], SWIZZLED)
    scales = gl.allocate_shared_memory(gl.float32, [PIECES, VECTORS, VECTORS], UNSWIZZLED)
    num_items = num_pairs * gl.cdiv(intermediate_size, _COLUMNS)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    gl.warp_specialize(
        [
            (_run_consumer, (
                ring, vectors, scales, full, empty, x_ptr, x_scale_ptr, w_scale_ptr, bias_ptr,
                topk_ids_ptr, expert_map_ptr, invalid_count_ptr, h_ptr, amax_ptr,
                num_pairs, num_items, intermediate_size, hidden_size, weight_rows, up_row_offset,
                num_experts, num_local_experts,
                stride_xm, stride_xk, stride_xsm, stride_xsk, scale_rows, scale_groups,
                TOP_K, TOKENS_IN_GROUP, HAS_EXPERT_MAP, GATE_STRIDE, HAS_BIAS, ACTIVATION,
                ACTIVATION_ALPHA, ACTIVATION_LIMIT, INPUT_QUANT,
                BLOCK_SCALES, QMAX,
                MIN_SCALE,
            )),
            (_run_producer, (
                w_desc, ring, full, empty, w_scale_ptr, topk_ids_ptr, expert_map_ptr, num_pairs,
                num_items,
                intermediate_size, hidden_size, weight_rows, up_row_offset, num_experts,
                num_local_experts, scale_rows,
                scale_groups, BLOCK_SCALES, TOP_K, TOKENS_IN_GROUP, HAS_EXPERT_MAP, GATE_STRIDE,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip
