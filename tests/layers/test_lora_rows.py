"""The feature checklist of LoRA adapters names tests that exist, and gaps in their coverage.

Rows are L1 to L23. A row names tests as `file::function`. "The branch" is run_moe_lora, which adds
the contribution of adapters to the output of the experts. "Merged" adapters are applied inside the
experts, as in training.
"""

import pytest
from checklist import Row, missing_tests

BRANCH, STEPS = "test_moe_lora", "test_moe_lora_steps"
READS, REFUSED = "test_moe_lora_rows", "test_moe_lora_bad_input"
LAYERS, SHARES, MANAGER = "test_lora_layers", "test_lora_shares", "test_lora_manager"
POOL, EXACT = "test_adapter_pool", "test_adapters"
KERNELS = "interpreter/test_adapter_kernels"
ROWS = {
    "L1": Row("the branch's delta, with the gated product", (
        f"{BRANCH}::test_moe_lora_equals_the_loop",
        f"{LAYERS}::test_parallel_mode_adds_the_branch_to_the_base_output",
        f"{BRANCH}::test_moe_lora_differs_from_merged_weights",
    )),
    "L2": Row("four buffers with the maximum rank, rows of gate first", (
        f"{LAYERS}::test_the_backend_uses_the_buffers_of_its_pool",
        f"{REFUSED}::test_errors_name_the_invalid_argument",
    )),
    "L3": Row("ranks of slots: rows beyond the rank are not read", (
        f"{STEPS}::test_each_step_equals_its_float64_loop",
        f"{READS}::test_invalid_ranks_and_ids_are_ignored",
    )),
    "L4": Row("scalings, once for each pair", (
        f"{LAYERS}::test_parallel_mode_adds_the_branch_to_the_base_output",
        f"{MANAGER}::test_folding_scales_both_b_matrices",
    ), "merged adapters have the scaling folded into both B"),
    "L5": Row("adapters by sequence and by token; rows without an adapter are unchanged", (
        f"{READS}::test_adapters_by_sequence_equal_adapters_by_token",
        f"{READS}::test_rows_without_an_adapter_or_an_expert_keep_their_bits",
        f"{EXACT}::test_tokens_get_the_slots_of_their_sequences",
        f"{EXACT}::test_rows_without_an_adapter_equal_the_layer_without_adapters",
    )),
    "L6": Row("invalid expert ids are skipped; ranks by expert", (
        f"{READS}::test_rows_without_an_adapter_or_an_expert_keep_their_bits",
        f"{STEPS}::test_each_step_equals_its_float64_loop",
    ), "merged has one rank per slot: rows beyond the rank of an expert are zero"),
    "L7": Row("moe_lora_a_kernel", (
        f"{STEPS}::test_each_step_equals_its_float64_loop",
        "compile/test_moe_lora_compile::test_kernels_compile_without_violations",
    ), "tiles of 16 pairs, up to 32 ranks, 128 bytes of depth: fp32 spills at 128 values"),
    "L8": Row("moe_lora_gate_up_b_kernel", (
        f"{STEPS}::test_each_step_equals_its_float64_loop",
        "compile/test_moe_lora_compile::test_kernels_compile_without_violations",
    )),
    "L9": Row("moe_lora_down_combine_kernel, in place", (
        f"{STEPS}::test_each_step_equals_its_float64_loop",
        f"{READS}::test_rows_without_an_adapter_or_an_expert_keep_their_bits",
    ), "the product with A of down is one more launch of the first kernel, so it is not repeated "
       "for each block of H; tiles of 16 tokens, the minimum of tensor cores"),
    "L10": Row("moe_lora_fused_kernel", (
        f"{STEPS}::test_fused_kernel_equals_the_loop",
        f"{BRANCH}::test_moe_lora_equals_the_loop",
    )),
    "L11": Row("run_moe_lora and its strategies", (
        f"{BRANCH}::test_moe_lora_equals_the_loop",
        f"{BRANCH}::test_auto_launches_one_implementation",
    )),
    "L12": Row("MoELoRABatchInfo; buffers of any strides", (
        f"{READS}::test_strided_arguments_give_the_same_result",
        f"{REFUSED}::test_invalid_lora_info_is_refused",
    )),
    "L13": Row("small and odd ranks, several in one batch", (
        f"{BRANCH}::test_moe_lora_of_irregular_sizes_equals_the_loop",
        "test_adapters_and_merged_weights::test_float32_error_is_below_one_millionth",
        f"{KERNELS}::test_small_and_large_ranks_equal_the_reference",
    )),
    "L14": Row("float32 sums, IEEE products in float32", (
        f"{BRANCH}::test_moe_lora_of_deepseek_sizes_equals_the_loop",
        f"{BRANCH}::test_moe_lora_equals_the_loop",
    )),
    "L15": Row("backend, prepare_moe_lora_batch, load and evict", (
        f"{LAYERS}::test_layer_without_adapters_equals_the_base_layer",
        f"{MANAGER}::test_layers_without_an_adapter_add_nothing_and_have_the_same_slots",
        f"{POOL}::test_later_loads_reuse_the_same_memory",
    )),
    "L16": Row("pairs grouped by adapter and expert; others are not read", (
        f"{STEPS}::test_pairs_of_one_adapter_and_expert_are_adjacent",
        f"{READS}::test_other_adapters_and_experts_are_not_read",
        f"{EXACT}::test_a_call_without_adapters_equals_the_layer_without_adapters",
    )),
    "L17": Row("a benchmark of two configurations", (
        "test_adapter_cost::test_the_lora_branch_is_benchmarked_with_both_strategies",
        f"{BRANCH}::test_moe_lora_of_deepseek_sizes_equals_the_loop",
    )),
    "L18": Row("each step by itself, with a torch reference", (
        f"{STEPS}::test_each_step_equals_its_float64_loop",
        f"{STEPS}::test_fused_kernel_equals_the_loop",
    )),
    "L19": Row("in place, the same object, other rows bitwise unchanged", (
        f"{READS}::test_rows_without_an_adapter_or_an_expert_keep_their_bits",
        f"{LAYERS}::test_the_backend_uses_the_buffers_of_its_pool",
    )),
    "L20": Row("wrong buffers are named", (
        f"{REFUSED}::test_errors_name_the_invalid_argument",
        f"{EXACT}::test_bad_tensors_are_refused_by_name_before_anything_runs",
    )),
    "L21": Row("the strategy can be queried and set", (
        f"{BRANCH}::test_auto_uses_the_implementation_that_it_reports",
        f"{BRANCH}::test_auto_launches_one_implementation",
        f"{BRANCH}::test_auto_chooses_the_faster_kernel",
    )),
    "L22": Row("bytes of an adapter, also in the error of a full pool", (
        f"{POOL}::test_a_full_pool_states_the_bytes_of_a_slot",
        f"{POOL}::test_a_pool_that_exceeds_memory_states_its_bytes",
        "test_lora_rows::test_bytes_of_deepseek_v3",
    )),
    "L23": Row("LoRABackend, LoRAManager, MoELoRALayer, FusedMoEWithLoRA", (
        f"{LAYERS}::test_layer_without_adapters_equals_the_base_layer",
        f"{LAYERS}::test_merged_mode_equals_merged_weights",
        f"{SHARES}::test_tp_rank_outputs_sum_to_the_layer",
        f"{LAYERS}::test_invalid_arguments_are_refused",
    )),
}  # fmt: skip


def test_every_feature_has_a_row() -> None:
    assert list(ROWS) == [f"L{number}" for number in range(1, 24)]


@pytest.mark.parametrize("row", ROWS)
def test_tests_of_a_row_exist(row: str) -> None:
    assert ROWS[row].tests
    assert missing_tests(ROWS[row]) == []


def test_bytes_of_deepseek_v3() -> None:
    """One layer at rank 8 in bf16, with one A for gate and up: 29.4 + 16.8 + 8.4 + 29.4 MB."""
    import modular_kernel as mk
    from modular_kernel.measure.adapter_roofline import adapter_bytes

    problem = mk.Problem(1, 7168, 2048, 256, 8, lora="adapters=1,rank=8,a13=shared")
    assert adapter_bytes(problem) == 2 * 256 * 8 * (7168 + 2 * 2048 + 2048 + 7168) == 83_886_080
