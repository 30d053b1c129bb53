"""The feature checklist of layers, weight loading and TP-sharded experts names tests that exist.

Rows A40 to A66 are features of the layer and of its functional form. Rows E1 to E18 are features of
experts that are sharded over a tensor-parallel group. A row names tests as `file::function`,
followed by further coverage or by the reason why a part of the feature does not exist.
"""

import pytest
from checklist import Row, missing_tests

KEYWORDS, LOADING, LAYERS = "test_fused_moe_keywords", "test_weight_loading", "test_layers"
EP_LAYER, RANKS = "test_ep_moe_layer", "test_layer_ranks"
REQUIRED_ROWS = {f"A{n}" for n in (40, 44, 54, 55, 56, 57, 58, 60, 64, 66)}
REQUIRED_ROWS |= {f"E{n}" for n in (1, 2, 3, 8, 14, 15, 16, 17, 18)}
ROWS = {
    "A40": Row("fused_experts over a router's tuple; the examples of other libraries, corrected", (
        f"{KEYWORDS}::test_examples_of_other_libraries",
        f"{KEYWORDS}::test_one_scale_expanded_over_the_experts",
        f"{KEYWORDS}::test_router_weights_of_16_bits_are_widened",
        "test_fused_moe::test_every_field_of_the_config_has_an_effect",
    )),
    "A44": Row("chunks of 65536 tokens or as set, equal to one call", (
        f"{KEYWORDS}::test_default_chunks_have_65536_tokens",
        f"{KEYWORDS}::test_calls_are_split_into_chunks",
        f"{KEYWORDS}::test_chunked_calls_equal_unchunked_calls",
    )),
    "A54": Row("FusedMoE, w13_weight and w2_weight", (
        f"{LAYERS}::test_parameters_have_their_usual_names",
        f"{LAYERS}::test_state_dict_round_trip",
        "test_layers_bad_input::test_invalid_layer_arguments_are_refused",
    )),
    "A55": Row("weight_loader by shard and expert, TP x EP slices of the whole", (
        f"{LOADING}::test_shards_are_slices_of_the_weights",
        f"{LOADING}::test_destination_describes_a_slice",
        f"{LOADING}::test_invalid_loader_arguments_are_refused",
        "test_layer_loading::test_layers_are_loaded_tensor_by_tensor",
    )),
    "A56": Row("experts in blocks over EP ranks, each expert on one rank", (
        "test_placement::test_linear_assigns_blocks_and_the_remainder_to_the_first_ranks",
        f"{LAYERS}::test_experts_that_do_not_divide_evenly",
        f"{LAYERS}::test_describe_states_where_experts_are",
    )),
    "A57": Row("TP: rows of w1 and w3, columns of w2, b2 once", (
        f"{LOADING}::test_shards_are_slices_of_the_weights",
        "test_checkpoint_shares::test_b2_is_nonzero_on_one_tp_rank_only",
        f"{LAYERS}::test_rank_outputs_sum_to_the_reference",
        f"{RANKS}::test_sums_over_groups_equal_the_reference",
    )),
    "A58": Row("scales by kind, and zero points", (
        f"{LOADING}::test_loading_by_tensor_equals_loading_from_files",
        f"{LOADING}::test_input_scales_of_an_expert_must_be_equal",
        f"{LOADING}::test_a_scale_block_across_gate_and_up_is_refused",
        "test_layer_loading::test_input_scales_of_gate_and_up_must_be_equal",
    )),
    "A60": Row("dispatch, experts, combine, and an optional all-reduce", (
        f"{RANKS}::test_sums_over_groups_equal_the_reference",
        f"{RANKS}::test_exchanges_equal_the_reference",
        f"{LAYERS}::test_expected_output_equals_a_loop_over_pairs",
        "test_layers_bad_input::test_failed_reduction_is_a_typed_error",
    )),
    "A64": Row("fused_moe from logits equals its two steps", (
        "test_fused_moe::test_fused_moe_routes_by_softmax",
        "test_fused_moe::test_fused_moe_selects_up_to_32_experts",
        f"{KEYWORDS}::test_fused_moe_accepts_the_output_of_a_router",
    )),
    "A66": Row("describe() has the map of experts", (
        f"{LAYERS}::test_describe_states_where_experts_are",
        f"{EP_LAYER}::test_attributes_of_a_rank",
    )),
    "E1": Row("EPMoE with SGLang's arguments, EP over the TP group", (
        f"{EP_LAYER}::test_rank_outputs_sum_to_the_reference",
        f"{EP_LAYER}::test_tp_group_determines_the_local_experts",
        f"{EP_LAYER}::test_router_arguments_are_kept",
        f"{EP_LAYER}::test_invalid_arguments_are_refused",
    )),
    "E2": Row("the experts of a rank; grouped top-k needs both arguments", (
        f"{EP_LAYER}::test_attributes_of_a_rank",
        f"{EP_LAYER}::test_invalid_arguments_are_refused",
    )),
    "E3": Row("routing plain, renormalized, grouped, with a correction bias", (
        f"{LAYERS}::test_every_form_of_routing",
        "test_router_families::test_route_equals_the_router_of_the_family",
        "test_router::test_route_equals_the_reference",
    )),
    "E8": Row("GroupedGemmRunner over segments", (
        f"{EP_LAYER}::test_grouped_gemm_runner_multiplies_segments",
        "test_grouped_gemm::test_grouped_gemm_equals_float64",
        "test_grouped_gemm::test_grouped_gemm_supports_transposed_weights",
        "test_grouped_gemm::test_bad_arguments_are_refused_with_the_reason",
    ), "SGLang's FlashInfer branch is not implemented either; use_flashinfer=True is refused"),
    "E14": Row("the layer gives a partial sum", (
        f"{EP_LAYER}::test_rank_outputs_sum_to_the_reference",
        "test_ep_moe::test_the_example_on_two_ranks_sums_up_to_the_output",
    )),
    "E15": Row("make_expert_params_mapping: three for each expert", (
        f"{LOADING}::test_the_mapping_has_three_entries_per_expert",
    )),
    "E16": Row("weight_loader: experts of other ranks are skipped, a bad shard is refused", (
        f"{LOADING}::test_shards_are_slices_of_the_weights",
        f"{LOADING}::test_invalid_loader_arguments_are_refused",
    )),
    "E17": Row("scales of float8: one input scale, separate weight scales", (
        f"{LOADING}::test_input_scales_of_an_expert_must_be_equal",
        "test_layer_loading::test_ep_moe_loads_float8_checkpoints",
        f"{EP_LAYER}::test_float8_with_one_scale_per_expert",
    )),
    "E18": Row("create_weights of the unquantized and the float8 method", (
        f"{LOADING}::test_quant_methods_create_the_parameters",
        f"{EP_LAYER}::test_quantization_by_config",
        f"{EP_LAYER}::test_quant_method_processes_loaded_weights",
        f"{LOADING}::test_fp8_method_scheme_from_config",
    )),
}  # fmt: skip


def test_every_feature_has_a_row() -> None:
    assert ROWS.keys() == REQUIRED_ROWS


@pytest.mark.parametrize("row", ROWS)
def test_tests_of_a_row_exist(row: str) -> None:
    assert ROWS[row].tests
    assert missing_tests(ROWS[row]) == []
