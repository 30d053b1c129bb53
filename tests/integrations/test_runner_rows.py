"""The feature checklist of the runner, memory and metadata names tests that exist.

Rows R1 to R26 are features of the runner, A45 to A65 are features of its layer, and M10 is about
workspaces. A row names tests as `file::function`, followed by further coverage or by the reason why
a part of the feature does not exist.
"""

import pytest
import torch
from checklist import Row, missing_tests

from modular_kernel.ops.permute import permute_tokens
from modular_kernel.ops.reduce import gather_weight_and_sum
from modular_kernel.ops.sort import sort_pairs, sort_specs
from modular_kernel.spec.problem import IdSpace
from modular_kernel.tensors import DispatchedRouting
from modular_kernel.workspace import Workspace

RUNNER, WEIGHTS = "test_moe_runner", "test_runner_weights"
FORMATS, ROUTING = "test_runner_formats", "test_runner_routing"
STAGES, PARTS = "test_runner_stages", "test_runner_parts"
ROWS = {
    "R1": Row("MoeRunner.run, fused or staged", (
        f"{RUNNER}::test_fused_and_staged_parts_compute_the_same",
        f"{RUNNER}::test_calls_equal_calls_of_the_kernel",
    )),
    "R2": Row("a switch that turns fused operations off", (
        f"{RUNNER}::test_fused_and_staged_parts_compute_the_same",
        f"{RUNNER}::test_an_environment_variable_disables_fused_operations",
    )),
    "R3": Row("FusedOpPool, duplicates raise", (
        f"{STAGES}::test_registering_another_object_for_a_key_is_refused",
        f"{STAGES}::test_functions_of_the_same_name_in_a_module_are_distinguished",
    )),
    "R4": Row("PermuteMethodPool, a missing key lists what exists", (
        f"{STAGES}::test_registering_another_object_for_a_key_is_refused",
        f"{STAGES}::test_errors_about_unregistered_keys_list_the_registered_keys",
    )),
    "R5": Row("types have a backend, which is checked", (
        f"{PARTS}::test_results_of_another_backend_are_refused_with_both_names",
        f"{STAGES}::test_invalid_values_are_refused_at_registration",
    )),
    "R6": Row("typed state of one call", (f"{PARTS}::test_every_call_has_its_own_state",)),
    "R7": Row("every field of MoeRunnerConfig reaches the Problem or is refused", (
        f"{RUNNER}::test_both_interfaces_share_one_config",
        f"{RUNNER}::test_every_field_reaches_the_problem",
        f"{RUNNER}::test_contradicting_fields_are_refused",
        "test_runner_config::test_the_config_has_the_fields_of_sglang_and_chunk_tokens",
        "test_runner_config::test_unsupported_values_are_refused_by_name",
    )),
    "R8": Row("the Triton backend's input, all schemes", (
        f"{PARTS}::test_staged_triton_experts_equal_triton_experts",
        f"{WEIGHTS}::test_flags_or_a_name_determine_the_scheme",
    )),
    "R9": Row('the fused ("none", "triton") and its staged part', (
        f"{PARTS}::test_staged_triton_experts_have_the_requirements_of_triton_experts",
        f"{PARTS}::test_staged_triton_experts_equal_triton_experts",
    )),
    "R10": Row("triton_kernel: routing data, gather, scatter", (
        f"{ROUTING}::test_each_backend_accepts_one_routing_format",
        f"{ROUTING}::test_to_token_major_inverts_to_expert_major",
        f"{ROUTING}::test_triton_kernels_backend_with_a_stand_in",
        "test_triton_kernels::test_cases_are_proven",
    )),
    "R11": Row("DeepGEMM's input: fp8 rows, scales by 128, counts", (
        f"{ROUTING}::test_deep_gemm_backend_with_a_stand_in",
        "test_ops_permute_quantize::test_permute_and_quantize_equals_both_operations",
    ), "the input has no record type: notebook/decisions/09-runner-stages.md"),
    "R12": Row("contiguous mode: experts padded to whole blocks", (
        "test_deepgemm::test_contiguous_cases_are_proven",
        "test_deepgemm::test_aligned_rows_equal_the_reference",
    )),
    "R13": Row("masked mode: (e, C, H) with counts", (
        "test_deepgemm::test_masked_cases_are_proven",
        f"{ROUTING}::test_deep_gemm_backend_with_a_stand_in",
    ), "expected_m is only a hint, and is not read"),
    "R14": Row("GEMM, activation, quantize, GEMM", (
        "test_deepgemm::test_contiguous_cases_are_proven",
        "test_deepgemm::test_defects_in_masked_rows_are_detected",
        "test_ops_quantize::test_activation_and_quantize_equals_both_operations",
    ), "scales are float32; fast_act is refused: a part chooses launches itself"),
    "R15": Row("sort, quantize and back with weights and scaling", (
        f"{ROUTING}::test_deep_gemm_backend_with_a_stand_in",
        "test_deepgemm::test_contiguous_cases_are_proven",
        "test_ops_rows::test_gather_and_sum_reads_only_rows_of_pairs",
    )),
    "R16": Row("deepep_ll passes through, unweighted, with ids and weights", (
        f"{FORMATS}::test_batches_are_returned_unweighted_with_ids_and_weights",
        f"{ROUTING}::test_deep_gemm_backend_with_a_stand_in",
    )),
    "R17": Row("scatter and gather: x times the sum of its weights", (
        "test_runner_rows::test_gathering_scattered_rows_applies_router_weights",
        "test_ep_scatter::test_ep_scatter_sorts_rows_by_expert",
        "test_ep_scatter::test_gathering_scattered_rows_applies_router_weights",
        f"{FORMATS}::test_received_rows_are_weighted_and_summed",
    )),
    "R18": Row("the router's format is checked on entry", (
        f"{ROUTING}::test_each_backend_accepts_one_routing_format",
    )),
    "R19": Row("a new backend without changes of the core", (
        f"{STAGES}::test_a_backend_of_another_package_is_verified_by_its_entry_point",
    )),
    "R20": Row("unused buffers share memory; inplace only if allowed", (
        "interpreter/test_workspace_use::test_buffers_of_a_deepseek_prefill_share_memory",
        "test_memory_declared::test_a_call_allocates_its_declared_workspace_and_output",
        f"{RUNNER}::test_inplace_is_the_default_and_overwrites_x",
    )),
    "R21": Row("unsupported configs are refused at construction", (
        f"{RUNNER}::test_unsupported_configs_are_refused_at_construction",
        "test_matrix::test_every_other_pairing_is_refused_with_a_reason",
    ), "without sizes, only schemes that no part supports; other errors are raised by calls"),
    "R22": Row("fused and staged, formats, schemes, top-k, leaks", (
        f"{PARTS}::test_staged_triton_experts_equal_triton_experts",
        "test_matrix::test_every_two_axis_values_are_covered",
        "test_memory_declared::test_a_call_allocates_its_declared_workspace_and_output",
    )),
    "R23": Row("dispatch outputs and combine inputs by format", (
        f"{FORMATS}::test_formats_are_distinguished",
        f"{FORMATS}::test_wrong_formats_are_refused_with_both_names",
    )),
    "R24": Row("an incomplete pair is reported at start-up", (
        f"{STAGES}::test_incomplete_pairs_are_reported",
        f"{STAGES}::test_a_backend_of_another_package_is_verified_by_its_entry_point",
    )),
    "R25": Row("a plain torch core", ("test_matrix::test_case_is_proven",),
               "no HIP, AMX or NPU; aiter is refused by name"),
    "R26": Row("switches of SGLang as options", (
        f"{RUNNER}::test_environment_variables_of_sglang_are_switches",
    )),
    "A45": Row("a bound on workspaces", (
        "test_memory_declared::test_workspaces_stay_below_two_shared_caches",
    )),
    "A59": Row("transposed storage", (
        f"{WEIGHTS}::test_transposed_weights_give_the_same_result",
        "test_quant_torch_parts::test_strided_weights_give_equal_outputs",
        "test_layers::test_transposed_weights_are_used_without_a_copy",
    ), "FusedMoE has one layout: notebook/decisions/10-one-weight-layout.md"),
    "A61": Row("routing data of triton_kernels", (
        f"{ROUTING}::test_to_token_major_inverts_to_expert_major",
        f"{ROUTING}::test_triton_kernels_backend_with_a_stand_in",
    )),
    "A63": Row("metadata of a plain tuple", (
        f"{ROUTING}::test_metadata_types_are_constructed_from_tuples",
    )),
    "A65": Row("padded weights", (f"{WEIGHTS}::test_padded_weights_give_the_same_result",)),
    "M10": Row("the allocated memory equals the declared memory", (
        "test_memory_declared::test_a_call_allocates_its_declared_workspace_and_output",
        "test_memory_declared::test_undeclared_memory_is_detected",
        "test_workspace::test_a_write_past_the_end_is_reported_with_the_buffer",
        "test_workspace::test_a_buffer_is_poisoned_when_it_reuses_the_memory_of_another",
    )),
}  # fmt: skip


def test_every_feature_has_a_row() -> None:
    assert {f"R{number}" for number in range(1, 27)} <= ROWS.keys()


@pytest.mark.parametrize("row", ROWS)
def test_tests_of_a_row_exist(row: str) -> None:
    assert ROWS[row].tests
    assert missing_tests(ROWS[row]) == []


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_gathering_scattered_rows_applies_router_weights(top_k: int) -> None:
    """The result is x times the sum of its router weights, without the weights of skipped pairs."""
    generator = torch.Generator().manual_seed(top_k)
    x_TH = torch.randn(17, 32, generator=generator)
    weights_TK = torch.rand(17, top_k, generator=generator)
    ids_TK = torch.randint(-1, 4, (17, top_k), generator=generator, dtype=torch.int32)
    counter = torch.zeros(1, dtype=torch.int32)
    routing = DispatchedRouting(weights_TK, ids_TK, IdSpace.LOCAL, 4, None, counter)
    workspace = Workspace(sort_specs(17, top_k, 16, 4), torch.device("cpu"), poison=True)
    order = sort_pairs(routing, block_m=16, num_local=4, workspace=workspace)
    rows_RH, out_TH = torch.full((17 * top_k, 32), torch.nan), torch.full_like(x_TH, torch.nan)
    permute_tokens(x_TH, order.row_of_pair_TK, None, rows_RH=rows_RH)
    gather_weight_and_sum(rows_RH, order.row_of_pair_TK, weights_TK, scale=1.0, out=out_TH)
    sums = weights_TK.masked_fill(ids_TK < 0, 0).sum(1, keepdim=True)
    assert torch.allclose(out_TH, x_TH * sums, atol=1e-5)
