"""`number_and_quantize_kernel`: renumber the experts of pairs and quantize tokens."""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.expert_slots import number_pairs
from modular_kernel.ops.kernels.pdl import pdl_wait
from modular_kernel.ops.kernels.quantize import quantize_program


@triton.jit
def number_and_quantize_kernel(
    topk_ids_ptr, router_weights_ptr, expert_locations_ptr, num_copies_ptr, expert_numbers_ptr,
    out_router_weights_ptr, invalid_count_ptr,
    x_ptr, q_ptr, scale_ptr,
    num_tokens, num_experts, first_token, world_size, slots_per_rank, numbers_per_rank, max_copies,
    weight_factor,
    stride_ids, stride_weights, pair_programs,
    num_columns, group_size, num_groups, stride_x, capacity, programs_per_segment,
    TOP_K: tl.constexpr, MERGE_REPEATS: tl.constexpr, HAS_SINKS: tl.constexpr,
    LINEAR_PLACEMENT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_TOP_K: tl.constexpr,
    SCALE_SOURCE: tl.constexpr, QMAX: tl.constexpr, ROUND_TO_INT: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    GROUP_FITS_BLOCK: tl.constexpr, SCALES_GROUP_MAJOR: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_GROUPS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    USE_PDL: tl.constexpr = False,
):  # fmt: skip
    """Run `number_pairs` in the first pair_programs programs, and `quantize_program` in the others.

    Grid: (pair_programs + programs of `quantize_program`,).

    The arguments are those of the two functions. All rows of x are tokens.
    """
    pdl_wait(USE_PDL)
    program = tl.program_id(0)
    if program < pair_programs:
        number_pairs(
            program, topk_ids_ptr, router_weights_ptr, expert_locations_ptr, num_copies_ptr,
            expert_numbers_ptr, out_router_weights_ptr,
            invalid_count_ptr, num_tokens, num_experts, first_token, world_size, slots_per_rank,
            numbers_per_rank,
            max_copies, weight_factor, stride_ids, stride_weights,
            TOP_K, MERGE_REPEATS, HAS_SINKS, LINEAR_PLACEMENT, BLOCK_TOKENS, BLOCK_TOP_K,
        )  # fmt: skip
    else:
        quantize_program(
            program - pair_programs, x_ptr, x_ptr, x_ptr, x_ptr, q_ptr, scale_ptr, scale_ptr,
            num_columns, group_size, num_groups, stride_x, 0, capacity, programs_per_segment, 0, 0,
            0,
            SCALE_SOURCE, "all", False, False, "identity", 0.0, 0.0, 1, QMAX, ROUND_TO_INT,
            MIN_SCALE,
            GROUP_FITS_BLOCK,
            SCALES_GROUP_MAJOR, STAGES, BLOCK_ROWS, BLOCK_GROUPS, BLOCK_COLUMNS, 1,
        )  # fmt: skip
