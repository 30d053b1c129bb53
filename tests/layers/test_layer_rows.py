"""Rows of layers, of their loading and of experts over a TP group: the tests of each.

A40 to A66 are features of the layer and of its one-call form, E1 to E18 those of experts that are
shared out over a tensor-parallel group. A row names tests as `file::function`; what a row has
beyond them, or why something of it is not there, stands behind.
"""

import pytest
from checklist import Row, missing_tests

KEYWORDS, LOADING, LAYERS = "test_fused_moe_keywords", "test_weight_loading", "test_layers"
EP_LAYER, RANKS = "test_ep_moe_layer", "test_layer_ranks"
ASKED = {f"A{n}" for n in (40, 44, 54, 55, 56, 57, 58, 60, 64, 66)}
ASKED |= {f"E{n}" for n in (1, 2, 3, 8, 14, 15, 16, 17, 18)}
ROWS = {
    "A40": Row("fused_experts over a router's tuple; the corrected examples", (
        f"{KEYWORDS}::test_the_field_s_examples",
        f"{KEYWORDS}::test_one_scale_expanded_over_the_experts",
        f"{KEYWORDS}::test_router_weights_of_16_bits_are_widened",
        "test_fused_moe::test_every_field_of_the_config_counts",
    )),
    "A44": Row("chunks of 65536 tokens or as set, equal to one call", (
        f"{KEYWORDS}::test_chunks_have_a_default",
        f"{KEYWORDS}::test_chunks_are_made",
        f"{KEYWORDS}::test_chunks_compute_the_same",
    )),
    "A54": Row("FusedMoE, w13_weight and w2_weight", (
        f"{LAYERS}::test_parameters_have_the_field_s_names",
        f"{LAYERS}::test_a_state_dict_goes_round",
        "test_layers_bad_input::test_bad_layers",
    )),
    "A55": Row("weight_loader by shard and expert, TP x EP slices of the whole", (
        f"{LOADING}::test_shares_are_slices_of_the_whole",
        f"{LOADING}::test_destination_is_data",
        f"{LOADING}::test_what_is_not_of_the_layer_is_refused",
        "test_layer_loading::test_tensor_by_tensor",
    )),
    "A56": Row("experts in blocks over EP ranks, each on exactly one", (
        "test_placement::test_linear_gives_blocks_and_the_rest_to_the_first_ranks",
        f"{LAYERS}::test_experts_that_do_not_divide",
        f"{LAYERS}::test_describe_tells_where_experts_are",
    )),
    "A57": Row("TP: rows of w1 and w3, columns of w2, b2 once", (
        f"{LOADING}::test_shares_are_slices_of_the_whole",
        "test_checkpoint_shares::test_b2_is_added_once",
        f"{LAYERS}::test_parts_of_ranks_sum_to_the_whole",
        f"{RANKS}::test_sums_over_groups_are_the_whole",
    )),
    "A58": Row("scales by kind, and zero points", (
        f"{LOADING}::test_every_format_loads_as_from_files",
        f"{LOADING}::test_input_scales_of_an_expert_are_one",
        f"{LOADING}::test_a_block_of_scales_over_gate_and_up_is_refused",
        "test_layer_loading::test_input_scales_of_gate_and_up_are_one",
    )),
    "A60": Row("dispatch, experts, combine, and an all-reduce where it is asked for", (
        f"{RANKS}::test_sums_over_groups_are_the_whole",
        f"{RANKS}::test_tokens_travel",
        f"{LAYERS}::test_the_whole_of_a_layer_is_what_a_kernel_computes",
        "test_layers_bad_input::test_a_sum_that_fails_is_a_typed_error",
    )),
    "A64": Row("fused_moe from logits equals its two steps", (
        "test_fused_moe::test_fused_moe_routes_by_softmax",
        f"{KEYWORDS}::test_fused_moe_takes_what_a_router_has_chosen",
    )),
    "A66": Row("describe() has the map of experts", (
        f"{LAYERS}::test_describe_tells_where_experts_are",
        f"{EP_LAYER}::test_it_says_which_experts_it_holds",
    )),
    "E1": Row("EPMoE by the field's arguments, EP over the TP group", (
        f"{EP_LAYER}::test_parts_sum_to_the_whole",
        f"{EP_LAYER}::test_the_group_says_where",
        f"{EP_LAYER}::test_it_keeps_the_router_s_arguments",
        f"{EP_LAYER}::test_bad_input",
    )),
    "E2": Row("which experts a rank holds; grouped top-k needs both arguments", (
        f"{EP_LAYER}::test_it_says_which_experts_it_holds",
        f"{EP_LAYER}::test_bad_input",
    )),
    "E3": Row("routing plain, renormalized, grouped, with a correction bias", (
        f"{LAYERS}::test_routing_of_every_kind",
        "test_router_families::test_it_routes_as_the_family_does",
        "test_router::test_it_is_the_oracle_s",
    )),
    "E8": Row("GroupedGemmRunner over segments", (
        f"{EP_LAYER}::test_the_runner_multiplies_segments",
        "test_grouped_gemm::test_grouped_gemm",
        "test_grouped_gemm::test_grouped_gemm_of_transposed_weights",
        "test_grouped_gemm::test_a_bad_grouped_gemm_says_why",
    ), "its FlashInfer branch has no body in the field either, and is refused by name"),
    "E14": Row("the layer gives a partial sum", (
        f"{EP_LAYER}::test_parts_sum_to_the_whole",
        "test_ep_moe::test_the_example_on_two_ranks",
    )),
    "E15": Row("make_expert_params_mapping: three for each expert", (
        f"{LOADING}::test_the_mapping_is_three_for_each_expert",
    )),
    "E16": Row("weight_loader: experts elsewhere are skipped, a bad shard is refused", (
        f"{LOADING}::test_shares_are_slices_of_the_whole",
        f"{LOADING}::test_what_is_not_of_the_layer_is_refused",
    )),
    "E17": Row("scales of float8: input scales are one, weight scales kept apart", (
        f"{LOADING}::test_input_scales_of_an_expert_are_one",
        "test_layer_loading::test_ep_moe_in_float8",
        f"{EP_LAYER}::test_float8_with_one_scale_an_expert",
    )),
    "E18": Row("create_weights of the unquantized and the float8 method", (
        f"{LOADING}::test_the_methods_of_the_seed_create_its_parameters",
        f"{EP_LAYER}::test_quantization_by_config",
        f"{EP_LAYER}::test_an_engine_that_walks_quant_methods_processes_the_weights",
        f"{LOADING}::test_the_float8_method_takes_what_ep_moe_takes",
    )),
}  # fmt: skip


def test_every_row_is_here() -> None:
    assert ROWS.keys() == ASKED


@pytest.mark.parametrize("row", ROWS)
def test_its_tests_exist(row: str) -> None:
    assert ROWS[row].tests
    assert missing_tests(ROWS[row]) == []
