"""`grouped_gemm_w4_kernel`: a grouped GEMM with 4-bit weights, for few rows per expert.

A pair is a token together with one of its top_k experts: pair p belongs to token p // top_k. As in
`grouped_gemm_kernel`, a program computes BLOCK_M pairs of one expert. With few rows, most of the
time is spent reading weights, so the weights stay packed until they are in registers. They are the
left operand of the MMA, (weight rows, K) by (K, pairs), so that each thread unpacks the words that
it multiplies. The warps of a program split K, and their accumulators are added at the end.

`experts.triton.kernels.operands_w4` explains word order, the order along K in which weights and
activations are multiplied.
"""

import triton
import triton.language as tl

from experts.triton.kernels.gemm_tile import finish_tile, grouped_tile_order, store_rows
from experts.triton.kernels.operands_w4 import (
    activations_to_word_order,
    load_scale,
    load_zero_points,
    multiply_words,
    prescale,
    row_offsets,
    unpack_scaled_words,
    weight_row_indices,
    word_order_offsets,
    word_start_offsets,
)
from experts.triton.kernels.unpack_w4 import (
    hide_from_optimizer,
    missing_factor_log2,
    unpacks_without_offset,
)
from modular_kernel.ops.kernels.pdl import pdl_wait


@triton.jit
def _make_span_row_indices(
    first, count, ROWS: tl.constexpr, GATE_STRIDE: tl.constexpr, UP_ROW_OFFSET: tl.constexpr,
    BLOCK_N: tl.constexpr, SPAN: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """Return the weight rows of a tile as two summands (1, ROWS, 1) of `weight_row_indices`.

    The rows are split into spans of SPAN rows. `outer` is the start of a row's span, and `inner` is
    the row within the span.
    """
    row = tl.arange(0, ROWS)[None, :, None]
    span = row // SPAN * SPAN
    return weight_row_indices(
        first, count, row % SPAN, span, GATE_STRIDE, UP_ROW_OFFSET, BLOCK_N, EVEN_N
    )


@triton.jit
def _load_scales(
    scale_ptr, scale_offsets, zero_point_ptr, zero_point_offsets, zero_point_shift, start, step_k,
    size_k,
    WEIGHT_FORMAT: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr, MISSING_FACTOR_LOG2: tl.constexpr,
    UNPACKED_WITHOUT_OFFSET: tl.constexpr, STEP_K: tl.constexpr, GROUP_K: tl.constexpr,
    EVEN_K: tl.constexpr, MMA_K: tl.constexpr,
):  # fmt: skip
    """Load the weight scales and zero points of the K step that begins at `start`.

    Return (scales, zero points). The scales are (MMAS_PER_STEP, ROWS, 1), or (MMAS_PER_STEP, ROWS,
    MMA_K / 16) for NVFP4. Past the end of K, the last scales are loaded again, because a masked
    load takes an extra instruction that zeroes its register.

    scale_offsets, zero_point_offsets: offsets of the weight rows, as two summands of
        `weight_row_indices`.
    zero_point_shift: the position of a row's zero point in its byte, bit 0 or 4.
    step_k: (MMAS_PER_STEP, 1, 1), the K offset of each MMA in the step.
    MISSING_FACTOR_LOG2: log2 of the factor by which scales are multiplied (`missing_factor_log2`).
    UNPACKED_WITHOUT_OFFSET: whether unpacked weights are the codes q instead of q - 8
        (`unpacks_without_offset`).
    STEP_K: K elements per step.
    """
    if EVEN_K:
        start = tl.minimum(start, size_k - STEP_K)  # NaN-free: integer operands
    if WEIGHT_FORMAT == "nvfp4":
        group = (start + step_k) // GROUP_K + tl.arange(0, MMA_K // GROUP_K)[None, None, :]
    elif STEP_K % GROUP_K == 0:
        group = step_k // GROUP_K + start // GROUP_K
    else:
        group = (start + step_k) // GROUP_K
    in_bounds = None
    if not EVEN_K:
        in_bounds = start + step_k < size_k
        group = tl.minimum(group, (size_k - 1) // GROUP_K)  # NaN-free: integer operands
    scale_ptrs = (scale_ptr + (scale_offsets[0] + group)) + scale_offsets[1]
    zero_point_ptrs = (zero_point_ptr + (zero_point_offsets[0] + group)) + zero_point_offsets[1]
    if WEIGHT_FORMAT == "nvfp4":  # words past the end of K are zeros
        scale = tl.load(scale_ptrs)
    else:
        scale = load_scale(scale_ptrs, in_bounds, WEIGHT_FORMAT, MISSING_FACTOR_LOG2)
    return scale, load_zero_points(
        zero_point_ptrs, zero_point_shift, HAS_ZERO_POINTS, UNPACKED_WITHOUT_OFFSET
    )


@triton.jit(do_not_specialize=["num_pairs", "num_m_blocks"])
def grouped_gemm_w4_kernel(
    a_ptr, b_ptr, b_scale_ptr, zero_point_ptr, bias_ptr, router_weights_ptr, out_ptr,
    sorted_token_ids_ptr, expert_ids_ptr, num_tokens_post_padded_ptr,
    num_pairs, size_n, size_k, num_m_blocks,
    stride_am, stride_be, stride_bse, stride_bze, stride_bias,
    stride_bn: tl.constexpr, stride_bsn: tl.constexpr, stride_bzn: tl.constexpr,
    UP_ROW_OFFSET: tl.constexpr, PAIRS_PER_A_ROW: tl.constexpr, GATE_STRIDE: tl.constexpr,
    WRITE_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ROUTER_WEIGHTS: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, ACTIVATION_ALPHA: tl.constexpr, ACTIVATION_LIMIT: tl.constexpr,
    WEIGHT_FORMAT: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr, EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    GROUP_K: tl.constexpr, MMA_K: tl.constexpr, NUM_WARPS: tl.constexpr,
    MMAS_PER_WARP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, USE_PDL: tl.constexpr = False,
):  # fmt: skip
    """out[p, n] = act(a[p // PAIRS_PER_A_ROW] @ b[expert of p, rows of n]^T) for every pair p.

    Grid: (row blocks * column blocks,), for the largest possible number of row blocks. A program
        computes one block of BLOCK_M pairs by BLOCK_N output columns. Its NUM_WARPS warps split K:
        in one step of the loop, each warp runs MMAS_PER_WARP MMAs of MMA_K elements along K. The
        accumulators of the warps are added after the loop.

    A scale covers GROUP_K elements along K. MMA_K divides GROUP_K, so that the scale can be applied
    to the result of an MMA. NVFP4 weights are multiplied by their scales before the MMA, so an MMA
    may span several NVFP4 groups.

    a_ptr: activations (num_pairs / PAIRS_PER_A_ROW, K), with contiguous rows. A row is a token
        (PAIRS_PER_A_ROW = top_k) in GEMM 1 and a pair (PAIRS_PER_A_ROW = 1) in GEMM 2.
    b_ptr: weights (num_experts, rows, K / 2) bytes, read as int32 words of eight weights. K is a
        multiple of 32. Output column n uses weight row n * GATE_STRIDE and, if GATED, also row n *
        GATE_STRIDE + UP_ROW_OFFSET for up.
    b_scale_ptr: weight scales (num_experts, rows, K / GROUP_K).
    zero_point_ptr: zero points (num_experts, rows / 2, K / GROUP_K), two rows per byte, used if
        HAS_ZERO_POINTS. With NVFP4, the float32 global scales of each expert instead.
    bias_ptr: (num_experts, rows), used if HAS_BIAS.
    router_weights_ptr: (num_pairs,) float32. If HAS_ROUTER_WEIGHTS, they multiply the sums before
        the bias is added.
    out_ptr: (num_pairs, N), contiguous. Pairs in blocks of expert -1 are skipped: their rows get
        zeros if WRITE_ZEROS, and are not written otherwise.
    sorted_token_ids_ptr, expert_ids_ptr, num_tokens_post_padded_ptr: the blocks of pairs, as in
        vLLM's moe_align_block_size (`modular_kernel.ops.align.AlignedPairs`). The ids are indices
        of pairs.
    size_n: N, the number of output columns.
    size_k: K.
    num_m_blocks: number of row blocks in the grid.
    stride_*: strides, named as in vLLM: a (activations), b (weights, in bytes), bs (weight scales),
        bz (zero points); dimensions e (expert), m, n.
    GATE_STRIDE: 2 if gate and up rows alternate in b, otherwise 1.
    GATED: whether the activation function combines a gate and an up value, as in SwiGLU.
    ACTIVATION, ACTIVATION_ALPHA, ACTIVATION_LIMIT: the activation function
        (`modular_kernel.ops.kernels.activation`); "identity" for none.
    WEIGHT_FORMAT: the encoding of words and scales (`experts.triton.kernels.unpack_w4`).
    EVEN_K: whether a step divides K, so that no masks along K are needed.
    EVEN_N: whether BLOCK_N divides N, so that no masks along N are needed.
    USE_PDL: whether the launch uses programmatic dependent launch (`pdl_wait`).
    """
    pdl_wait(USE_PDL)
    num_n_blocks = tl.cdiv(size_n, BLOCK_N)
    pid_m, pid_n = grouped_tile_order(tl.program_id(0), num_m_blocks, num_n_blocks, 1)
    if pid_m * BLOCK_M >= tl.load(num_tokens_post_padded_ptr):
        return
    pairs = tl.load(sorted_token_ids_ptr + pid_m * BLOCK_M + tl.arange(0, BLOCK_M))
    row_mask = pairs < num_pairs
    column = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = column < size_n
    expert = tl.load(expert_ids_ptr + pid_m).to(tl.int64)
    if expert < 0:
        if WRITE_ZEROS:
            zeros = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            store_rows(out_ptr, pairs, row_mask, column, column_mask, size_n, zeros)
        return
    MMAS_PER_STEP: tl.constexpr = NUM_WARPS * MMAS_PER_WARP
    K_PER_WARP: tl.constexpr = MMAS_PER_WARP * MMA_K
    STEP_K: tl.constexpr = NUM_WARPS * K_PER_WARP
    ROWS: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    MISSING_FACTOR_LOG2: tl.constexpr = missing_factor_log2(WEIGHT_FORMAT, a_ptr.dtype.element_ty)
    UNPACKED_WITHOUT_OFFSET: tl.constexpr = unpacks_without_offset(
        WEIGHT_FORMAT, a_ptr.dtype.element_ty
    )
    # A thread computes one address. Its other addresses are at distances known at compile time,
    # because rows are split into spans: eight rows for words, and as many rows as one load covers
    # for scales. 32-bit offsets suffice within an expert.
    first_column = pid_n * BLOCK_N
    rows = _make_span_row_indices(
        first_column, size_n, ROWS, GATE_STRIDE, UP_ROW_OFFSET, BLOCK_N, 8, EVEN_N
    )
    words_offsets = row_offsets(rows, stride_bn // 4)
    SPAN: tl.constexpr = min(32 // MMAS_PER_WARP, BLOCK_N)
    rows = _make_span_row_indices(
        first_column, size_n, ROWS, GATE_STRIDE, UP_ROW_OFFSET, BLOCK_N, SPAN, EVEN_N
    )
    scale_offsets = row_offsets(rows, stride_bsn)
    # Two rows share a byte. One of the two summands is even, so both can be halved separately.
    zero_point_offsets = row_offsets((rows[0] // 2, rows[1] // 2), stride_bzn)
    zero_point_shift = (rows[0] + rows[1]) % 2 * 4
    step = tl.arange(0, MMAS_PER_STEP)[:, None, None]
    step_k = (step % NUM_WARPS) * K_PER_WARP + (step // NUM_WARPS) * MMA_K
    words_ptr = b_ptr.to(tl.pointer_type(tl.int32)) + expert * (stride_be // 4)
    # A warp loads adjacent words. If the words of two warps were interleaved in pieces of 16 bytes,
    # each 32-byte sector would be loaded twice.
    word = tl.arange(0, NUM_WARPS)[:, None, None] * (K_PER_WARP // 8)
    word += tl.arange(0, K_PER_WARP // 8)[None, None, :]
    a_row = (pairs // PAIRS_PER_A_ROW).to(tl.int64)[None, None, :, None]
    a_k = step_k[:, :, :, None] + word_order_offsets(MMA_K)
    a_ptrs = a_ptr + a_row * stride_am + a_k
    a_mask = row_mask[None, None, :, None]
    b_scale_ptr += expert * stride_bse
    zero_point_ptr += expert * stride_bze
    total = tl.zeros((NUM_WARPS, ROWS, BLOCK_M), tl.float32)
    # Scales and zero points are loaded a step ahead to hide their latency.
    scale, zero_points = _load_scales(
        b_scale_ptr, scale_offsets, zero_point_ptr, zero_point_offsets, zero_point_shift, 0,
        step_k, size_k,
        WEIGHT_FORMAT, HAS_ZERO_POINTS, MISSING_FACTOR_LOG2, UNPACKED_WITHOUT_OFFSET, STEP_K,
        GROUP_K, EVEN_K, MMA_K,
    )  # fmt: skip
    for start in range(0, size_k, STEP_K):
        a_mask_k = a_mask
        if not EVEN_K:
            # A 16-byte copy has 32 weights.
            words_mask = word // 4 * 32 < size_k - start
            a_mask_k = a_mask & (step_k[:, :, :, None] + word_start_offsets(MMA_K) < size_k - start)
        # Hide the address, so that the compiler does not keep a pointer (two registers) per row.
        base_ptr = tl.multiple_of(
            hide_from_optimizer(words_ptr.to(tl.int64)).to(words_ptr.dtype), 16
        )
        words_ptrs = (base_ptr + (words_offsets[0] + word)) + words_offsets[1]
        if EVEN_K:
            words = tl.load(words_ptrs)
        else:
            words = tl.load(words_ptrs, mask=words_mask, other=0)
        a = tl.load(a_ptrs, mask=a_mask_k, other=0.0)
        next_scale, next_zero_points = _load_scales(
            b_scale_ptr, scale_offsets, zero_point_ptr, zero_point_offsets, zero_point_shift,
            start + STEP_K, step_k,
            size_k,
            WEIGHT_FORMAT, HAS_ZERO_POINTS, MISSING_FACTOR_LOG2, UNPACKED_WITHOUT_OFFSET, STEP_K,
            GROUP_K, EVEN_K, MMA_K,
        )  # fmt: skip
        warp_words = tl.reshape(words, (NUM_WARPS, ROWS, MMAS_PER_WARP, MMA_K // 8))
        words = tl.reshape(tl.permute(warp_words, (2, 0, 1, 3)), (MMAS_PER_STEP, ROWS, MMA_K // 8))
        x = prescale(
            activations_to_word_order(a, WEIGHT_FORMAT, MMAS_PER_STEP, BLOCK_M, MMA_K),
            WEIGHT_FORMAT,
            MMA_K,
        )
        if WEIGHT_FORMAT == "nvfp4":
            w = unpack_scaled_words(
                words, scale, WEIGHT_FORMAT, x.dtype, MMAS_PER_STEP, ROWS, MMA_K
            )
            part = tl.dot(w, x)
        else:
            part = multiply_words(
                words,
                x,
                zero_points,
                WEIGHT_FORMAT,
                HAS_ZERO_POINTS,
                MMAS_PER_STEP,
                ROWS,
                MMA_K,
                BLOCK_M,
            )
            part *= scale
        if MMAS_PER_WARP > 1:
            part = tl.sum(tl.reshape(part, (MMAS_PER_WARP, NUM_WARPS, ROWS, BLOCK_M)), 0)
        total += part
        scale = next_scale
        zero_points = next_zero_points
        words_ptr += STEP_K // 8
        a_ptrs += STEP_K
    tile = tl.sum(total, 0)
    if GATED:
        halves = tl.permute(tl.reshape(tile, (2, BLOCK_N, BLOCK_M)), (2, 1, 0))
        gate_tile, up_tile = tl.split(halves)
    else:
        gate_tile = tl.trans(tile)
        up_tile = gate_tile
    if WEIGHT_FORMAT == "nvfp4":
        gate_tile *= tl.load(zero_point_ptr)
        if GATED:
            up_tile *= tl.load(zero_point_ptr + 1)
    # The pairs are loaded again instead of being kept in registers during the loop.
    pairs = tl.load(
        sorted_token_ids_ptr + hide_from_optimizer(pid_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    )
    row_mask = pairs < num_pairs
    router_weights = gate_tile
    if HAS_ROUTER_WEIGHTS:
        router_weights = tl.load(router_weights_ptr + pairs, mask=row_mask, other=0.0)
    out_tile = finish_tile(
        gate_tile, up_tile, bias_ptr + expert * stride_bias, column * GATE_STRIDE, UP_ROW_OFFSET,
        column_mask,
        router_weights, HAS_BIAS, HAS_ROUTER_WEIGHTS, GATED, ACTIVATION, ACTIVATION_ALPHA,
        ACTIVATION_LIMIT,
    )  # fmt: skip
    store_rows(out_ptr, pairs, row_mask, column, column_mask, size_n, out_tile)
