"""`gemv_tma_down_kernel`: GEMM 2 of the gemv_tma path, with the sum over each token's pairs.

A pair is a token together with one of its top_k experts: pair p belongs to token p // top_k. A work
item is a token and a block of 64 / PAIR_SLOTS hidden columns, where PAIR_SLOTS is top_k rounded up
to a power of two. Persistent programs loop over work items. A tile of 64 weight rows holds the rows
of the block for each of the token's experts. `gemv_tma.kernels.pipeline` describes the ring of
weights and the vectors in shared memory.
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
    store_vectors,
    vector_row_layout,
    wait_empty_stage,
)
from modular_kernel.ops.kernels.extrema import max_nan
from modular_kernel.ops.kernels.ids import load_local_ids
from modular_kernel.ops.kernels.quantize import scale_of
from modular_kernel.replay.launch.triton_versions import tma_async_load

_OUT_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def _run_producer(
    w_desc, ring, full, empty, w_scale_ptr, topk_ids_ptr, expert_map_ptr, num_items,
    num_column_blocks, hidden_size, size_k,
    num_experts, num_local_experts, scale_rows, scale_groups,
    BLOCK_SCALES: gl.constexpr, HAS_EXPERT_MAP: gl.constexpr, TOP_K: gl.constexpr,
    PAIR_SLOTS: gl.constexpr,
):  # fmt: skip
    """Run the producer warp: load the weight panels of this program's work items with TMA.

    The arguments are those of the kernel.
    """
    PANELS_PER_STAGE: gl.constexpr = ring.shape[0] // full.shape[0]
    ROWS_PER_PAIR: gl.constexpr = ROWS // PAIR_SLOTS
    step = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        token, first = item // num_column_blocks, item % num_column_blocks * ROWS_PER_PAIR
        experts, num_valid = (), 0
        for k_index in gl.static_range(TOP_K):
            local_expert, _ = load_local_ids(
                topk_ids_ptr,
                token * TOP_K + k_index,
                k_index >= 0,
                expert_map_ptr,
                num_experts,
                num_local_experts,
                HAS_EXPERT_MAP,
            )
            experts += (local_expert,)
            if BLOCK_SCALES:
                # NaN-free: integer operands
                scale_row = gl.maximum(local_expert, 0).to(gl.int64) * scale_rows + first // PANEL
                prefetch_scales(w_scale_ptr + scale_row * scale_groups, scale_groups)
            num_valid += (local_expert >= 0).to(gl.int32)
        for start in range(0, size_k, PANELS_PER_STAGE * PANEL):
            stage, full_barrier = wait_empty_stage(step, full, empty)
            # There is one `expect` per stage. With a separate one for each of 8 pairs, a layer took
            # 10 to 22 us longer (H200).
            if num_valid == TOP_K:
                mbarrier.expect(full_barrier, TOP_K * PANELS_PER_STAGE * ROWS_PER_PAIR * PANEL)
            else:
                for count in gl.static_range(TOP_K):
                    mbarrier.expect(
                        full_barrier,
                        count * (PANELS_PER_STAGE * ROWS_PER_PAIR * PANEL),
                        pred=num_valid == count,
                    )
            # Rows of skipped pairs are not loaded. A branch is faster than predicates, which take
            # time even if no pair is skipped.
            for k_index in gl.static_range(TOP_K):
                if experts[k_index] >= 0:
                    row = experts[k_index] * hidden_size + first
                    for panel_index in gl.static_range(PANELS_PER_STAGE):
                        rows = ring.index(stage * PANELS_PER_STAGE + panel_index).slice(
                            k_index * ROWS_PER_PAIR, ROWS_PER_PAIR, 0
                        )
                        tma_async_load(
                            w_desc, [row, start + panel_index * PANEL], full_barrier, rows
                        )
            step += 1


@gluon.jit
def _store_pairs(
    vectors, scales, token, h_ptr, amax_ptr, size_k, amax_blocks,
    TOP_K: gl.constexpr, PAIR_SLOTS: gl.constexpr, BLOCK_SCALES: gl.constexpr, QMAX: gl.constexpr,
    MIN_SCALE: gl.constexpr, BLOCK_AMAX: gl.constexpr,
):  # fmt: skip
    """Store the rows of h of a token's pairs to shared memory, quantized.

    Return the scales of the rows, (8,). With BLOCK_SCALES, the result is 1, because the scales are
    in shared memory. The rows of skipped pairs may have any contents, because the results of these
    rows are discarded.
    """
    AMAX: gl.constexpr = gl.BlockedLayout([PAIR_SLOTS, 1], [1, 32], [1, 4], [1, 0])
    AMAX_ROWS: gl.constexpr = gl.SliceLayout(1, AMAX)
    INPUT_QUANT: gl.constexpr = "group" if BLOCK_SCALES else "token"
    PIECES: gl.constexpr = vectors.shape[0]
    k_index = gl.arange(0, PAIR_SLOTS, vector_row_layout(PAIR_SLOTS))
    row_ptrs = h_ptr + (token * TOP_K + k_index).to(gl.int64) * size_k
    pieces = load_pieces(row_ptrs, 1, k_index < TOP_K, size_k, PIECES)
    scale = gl.full((PAIR_SLOTS,), 1.0, gl.float32, AMAX_ROWS)
    if not BLOCK_SCALES:
        amax_slot = gl.arange(0, PAIR_SLOTS, AMAX_ROWS)[:, None]
        block = gl.arange(0, BLOCK_AMAX, gl.SliceLayout(0, AMAX))[None, :]
        ptrs = amax_ptr + (token * TOP_K + amax_slot) * amax_blocks + block
        mask = (amax_slot < TOP_K) & (block < amax_blocks)
        amax = max_nan(gl.load(ptrs, mask=mask, other=0.0), 1)
        scale = scale_of(amax, QMAX, MIN_SCALE)
    inverse_scale = gl.convert_layout(div_rn(1.0, scale), vector_row_layout(PAIR_SLOTS))
    store_vectors(
        vectors, scales, pieces, row_ptrs, 1, k_index < TOP_K, size_k, inverse_scale, row_ptrs, 0,
        INPUT_QUANT, BLOCK_SCALES, QMAX, MIN_SCALE,
    )  # fmt: skip
    return repeat_scales(scale)


@gluon.jit
def _run_consumer(
    ring, vectors, scales, full, empty, h_ptr, amax_ptr, w_scale_ptr, bias_ptr, router_weights_ptr,
    topk_ids_ptr, expert_map_ptr, out_ptr, num_items, num_column_blocks, hidden_size, size_k,
    amax_blocks, num_experts,
    num_local_experts, scale_rows, scale_groups, routed_scaling_factor,
    TOP_K: gl.constexpr, PAIR_SLOTS: gl.constexpr, HAS_EXPERT_MAP: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    BLOCK_SCALES: gl.constexpr, QMAX: gl.constexpr, MIN_SCALE: gl.constexpr,
    BLOCK_AMAX: gl.constexpr,
    USE_PDL: gl.constexpr,
):  # fmt: skip
    """Run the consumer warpgroup: multiply, sum over the pairs of a token, and store the output.

    The arguments are those of the kernel.
    """
    COLUMNS: gl.constexpr = gl.SliceLayout(0, ACC_LAYOUT)
    ROWS_PER_PAIR: gl.constexpr = ROWS // PAIR_SLOTS
    # h is valid only after this wait. The producer warp loads weights meanwhile.
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = gl.arange(0, ROWS, gl.SliceLayout(1, ACC_LAYOUT))
    k_index = row // ROWS_PER_PAIR
    vector = gl.arange(0, VECTORS, COLUMNS)
    h_scale = gl.full((VECTORS,), 1.0, gl.float32, COLUMNS)
    step, resident_token = 0, -1
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        token = item // num_column_blocks
        if token != resident_token:
            h_scale = _store_pairs(
                vectors, scales, token, h_ptr, amax_ptr, size_k, amax_blocks,
                TOP_K, PAIR_SLOTS, BLOCK_SCALES, QMAX, MIN_SCALE, BLOCK_AMAX,
            )  # fmt: skip
            resident_token = token
        pair = token * TOP_K + k_index
        local_expert, _ = load_local_ids(
            topk_ids_ptr,
            pair,
            k_index < TOP_K,
            expert_map_ptr,
            num_experts,
            num_local_experts,
            HAS_EXPERT_MAP,
        )
        first = item % num_column_blocks * ROWS_PER_PAIR
        column = first + row % ROWS_PER_PAIR
        in_bounds = (local_expert >= 0) & (column < hidden_size)
        expert = gl.maximum(local_expert, 0).to(gl.int64)  # NaN-free: integer operands
        w_scale_ptrs = w_scale_ptr + expert * hidden_size + column
        if BLOCK_SCALES:
            w_scale_ptrs = w_scale_ptr + (expert * scale_rows + column // PANEL) * scale_groups
        else:
            w_scale = gl.load(w_scale_ptrs, mask=in_bounds, other=0.0)
        if HAS_BIAS:
            bias = gl.load(bias_ptr + expert * hidden_size + column, mask=in_bounds, other=0.0)
        # The router weight of a skipped pair may have any value, including NaN.
        weight = gl.load(router_weights_ptr + pair, mask=in_bounds, other=0.0)
        acc, step = multiply(
            ring, vectors, scales, full, empty, step, size_k, w_scale_ptrs, in_bounds, BLOCK_SCALES
        )  # fmt: skip
        # Discard skipped pairs and the products with the vectors of other pairs.
        column_mask = (vector[None, :] == (k_index * (VECTORS // PAIR_SLOTS))[:, None]) & in_bounds[
            :, None
        ]
        value = gl.sum(gl.where(column_mask, acc * h_scale[None, :], 0.0), axis=1)
        if not BLOCK_SCALES:
            value *= w_scale
        if HAS_BIAS:
            value += bias.to(gl.float32)
        value *= weight
        total = gl.convert_layout(
            gl.sum(value.reshape((PAIR_SLOTS, ROWS_PER_PAIR)), axis=0), _OUT_LAYOUT
        )
        column = first + gl.arange(0, ROWS_PER_PAIR, _OUT_LAYOUT)
        out_ptrs = out_ptr + token.to(gl.int64) * hidden_size + column
        gl.store(
            out_ptrs,
            (total * routed_scaling_factor).to(out_ptr.dtype.element_ty),
            mask=column < hidden_size,
        )


@gluon.jit
def gemv_tma_down_kernel(
    w_desc, h_ptr, amax_ptr, w_scale_ptr, bias_ptr, router_weights_ptr, topk_ids_ptr,
    expert_map_ptr, out_ptr,
    num_tokens, hidden_size, size_k, amax_blocks, num_experts, num_local_experts, scale_rows,
    scale_groups,
    routed_scaling_factor,
    TOP_K: gl.constexpr, PAIR_SLOTS: gl.constexpr, HAS_EXPERT_MAP: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    BLOCK_SCALES: gl.constexpr, QMAX: gl.constexpr, MIN_SCALE: gl.constexpr,
    BLOCK_AMAX: gl.constexpr,
    PIECES: gl.constexpr, PANELS_PER_STAGE: gl.constexpr, STAGES: gl.constexpr,
    num_warps: gl.constexpr,
    USE_PDL: gl.constexpr = False,
):  # fmt: skip
    """Compute GEMM 2 for each pair, and write the weighted sum over the pairs of each token to out.

    The term of pair p is routed_scaling_factor * weight[p] * (h[p] @ w[expert of p]^T + bias).

    Grid: any number of programs, which share the work items (token, block of 64 / PAIR_SLOTS
        columns). A tile of the MMA has 64 weight rows, which are the rows of the block for each of
        PAIR_SLOTS experts.

    w_desc: TMA descriptor of the weights (num_experts * hidden_size, K) fp8, with boxes of 64 /
        PAIR_SLOTS rows and 128 bytes. Weights of skipped pairs are not read.
    h_ptr: (num_tokens * TOP_K, K), contiguous. If BLOCK_SCALES, the kernel quantizes h with one
        scale per 128 values. Otherwise, h has one scale per pair, computed from amax_ptr.
    amax_ptr: (num_tokens * TOP_K, amax_blocks) float32, the largest magnitude in each block of
        columns of h.
    w_scale_ptr: weight scales. If BLOCK_SCALES, they are (num_experts, scale_rows, scale_groups),
        with one scale per 128 x 128 block. Otherwise, they are (num_experts, hidden_size).
    bias_ptr: (num_experts, hidden_size), used if HAS_BIAS.
    router_weights_ptr: (num_tokens * TOP_K,) float32.
    topk_ids_ptr, expert_map_ptr, num_experts, num_local_experts, HAS_EXPERT_MAP: the expert ids of
        the pairs, and how they map to the experts on this rank; see `load_local_ids`. Pairs whose
        expert is not on this rank are skipped.
    out_ptr: (num_tokens, hidden_size), contiguous.
    size_k: K, the intermediate size.
    PAIR_SLOTS: TOP_K rounded up to a power of two, at most 8.
    QMAX, MIN_SCALE: the largest fp8 value, and the minimum scale of h.
    BLOCK_AMAX: a power of two >= amax_blocks.
    PIECES: number of pieces of 1024 values in a row of h.
    PANELS_PER_STAGE: number of panels in a stage of the ring.
    STAGES: number of stages of the ring.
    USE_PDL: whether the launch uses programmatic dependent launch (`pdl_wait`).
    """
    ring, full, empty = make_ring(w_desc.dtype, STAGES, PANELS_PER_STAGE)
    vectors = gl.allocate_shared_memory(w_desc.dtype, [PIECES, VECTORS, PIECE], SWIZZLED)
    scales = gl.allocate_shared_memory(gl.float32, [PIECES, VECTORS, VECTORS], UNSWIZZLED)
    num_column_blocks = gl.cdiv(hidden_size, ROWS // PAIR_SLOTS)
    num_items = num_tokens * num_column_blocks
    gl.warp_specialize(
        [
            (_run_consumer, (
                ring, vectors, scales, full, empty, h_ptr, amax_ptr, w_scale_ptr, bias_ptr,
                router_weights_ptr, topk_ids_ptr, expert_map_ptr, out_ptr, num_items,
                num_column_blocks, hidden_size, size_k,
                amax_blocks, num_experts, num_local_experts, scale_rows, scale_groups,
                routed_scaling_factor,
                TOP_K, PAIR_SLOTS, HAS_EXPERT_MAP, HAS_BIAS, BLOCK_SCALES, QMAX, MIN_SCALE,
                BLOCK_AMAX, USE_PDL,
            )),
            (_run_producer, (
                w_desc, ring, full, empty, w_scale_ptr, topk_ids_ptr, expert_map_ptr, num_items,
                num_column_blocks, hidden_size,
                size_k, num_experts, num_local_experts, scale_rows, scale_groups, BLOCK_SCALES,
                HAS_EXPERT_MAP,
                TOP_K,
                PAIR_SLOTS,
            )),
        ],
        [1],
        [40],
    )  # fmt: skip
