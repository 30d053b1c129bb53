"""Kernel that numbers pairs and quantizes tokens in one launch."""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.expert_slots import number_pairs
from modular_kernel.ops.kernels.pdl import pdl_wait
from modular_kernel.ops.kernels.quantize import quantize_program


@triton.jit
def number_and_quantize_kernel(
    ids_ptr, weights_ptr, homes_ptr, copies_ptr, numbers_ptr, out_weights_ptr, invalid_ptr,
    x_ptr, q_ptr, scale_ptr,
    num_tokens, num_experts, first_token, world_size, slots, numbers_per_rank, max_copies, factor,
    stride_ids, stride_weights, pair_programs,
    num_columns, group, num_groups, stride_x, capacity, programs_per_segment,
    TOP_K: tl.constexpr, JOIN: tl.constexpr, SINKS: tl.constexpr, LINEAR: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    SCALE: tl.constexpr, QMAX: tl.constexpr, ROUND: tl.constexpr, MIN_SCALE: tl.constexpr,
    GROUP_FITS_BLOCK: tl.constexpr, ALONG_ROWS: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """Run `number_pairs` in the first pair_programs programs, and `quantize_program` in the others.

    Grid: (pair_programs + programs of `quantize_program`,). All rows of x are tokens.
    """
    pdl_wait(OVERLAP)
    program = tl.program_id(0)
    if program < pair_programs:
        number_pairs(
            program, ids_ptr, weights_ptr, homes_ptr, copies_ptr, numbers_ptr, out_weights_ptr,
            invalid_ptr, num_tokens, num_experts, first_token, world_size, slots, numbers_per_rank,
            max_copies, factor, stride_ids, stride_weights,
            TOP_K, JOIN, SINKS, LINEAR, BLOCK_T, BLOCK_K,
        )  # fmt: skip
    else:
        quantize_program(
            program - pair_programs, x_ptr, x_ptr, x_ptr, x_ptr, q_ptr, scale_ptr, scale_ptr,
            num_columns, group, num_groups, stride_x, 0, capacity, programs_per_segment, 0, 0, 0,
            SCALE, "all", False, False, "identity", 0.0, 0.0, 1, QMAX, ROUND, MIN_SCALE,
            GROUP_FITS_BLOCK,
            ALONG_ROWS, STAGES, BLOCK_R, BLOCK_G, BLOCK_C, 1,
        )  # fmt: skip
