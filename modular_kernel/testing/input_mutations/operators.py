"""The input mutations of unquantized calls, all of which are defects that real kernels have had.

Each mutation has a name, a description, the condition under which the checks must detect it
(`conditions`), and the function that injects it (`inputs` and `outputs`).
"""

from dataclasses import replace
from functools import partial

import torch

from modular_kernel.spec.problem import Combine
from modular_kernel.testing.input_mutations import conditions as when
from modular_kernel.testing.input_mutations import inputs, outputs
from modular_kernel.testing.input_mutations.inject import CallMutant
from modular_kernel.testing.input_mutations.memory import MEMORY_MUTANTS

MUTANTS: tuple[CallMutant, ...] = (
    # Computation.
    CallMutant("zeros", "the output is zero", when.has_routed_pair, finished=outputs.write_zeros),
    CallMutant(
        "gate_up_swapped",
        "gate rows are read as up rows",
        when.is_gated,
        arguments=inputs.swap_gate_and_up,
    ),
    CallMutant(
        "interleave_ignored",
        "interleaved rows are read as halves, or vice versa",
        when.is_gated,
        problem=lambda p: inputs.change_activation(p, interleaved=not p.act.interleaved),
    ),
    CallMutant(
        "activation_replaced",
        "another activation: gelu for silu, silu for gelu",
        when.has_activation("silu", "gelu", "gelu_tanh"),
        problem=inputs.replace_activation,
    ),
    CallMutant(
        "gelu_variant",
        "the tanh approximation of gelu instead of gelu, or vice versa",
        when.has_activation("gelu", "gelu_tanh", exact=True),
        problem=inputs.replace_gelu,
    ),
    CallMutant(
        "clamp_ignored",
        "the limit has no effect",
        when.clamps_many_values,
        problem=lambda p: inputs.change_activation(p, limit=1e4),
    ),
    CallMutant(
        "clamp_rule_swapped",
        "the limit is applied before silu instead of after it, or vice versa",
        when.both(when.clamps_many_values, lambda p: p.act.kind.startswith("swiglu_clamp")),
        problem=inputs.swap_clamp_rule,
    ),
    CallMutant(
        "alpha_ignored",
        "swiglu_oai or situ with alpha 1",
        when.has_activation("swiglu_oai", "situ"),
        problem=lambda p: inputs.change_activation(p, alpha=1.0),
    ),
    CallMutant(
        "plus_one_forgotten",
        "swiglu_oai without the 1 that is added to the up values (and alpha 1)",
        when.has_activation("swiglu_oai"),
        problem=lambda p: inputs.change_activation(p, kind="swiglu_clamp_before", alpha=None),
    ),
    CallMutant(
        "narrow_operands",
        "the operands of GEMMs are rounded to the next narrower dtype",
        when.both(when.has_routed_pair, lambda p: p.fp32_precision == "ieee"),
        arguments=inputs.narrow_operands,
    ),
    CallMutant(
        "hidden_tail",
        "GEMM 1 omits the last of H columns",
        when.has_routed_pair,
        arguments=inputs.omit_last_h,
    ),
    CallMutant(
        "inner_tail",
        "GEMM 2 omits the last of I columns",
        when.has_routed_pair,
        arguments=inputs.omit_last_i,
    ),
    CallMutant(
        "weight_strides_ignored",
        "transposed weights are read as contiguous",
        when.has_routed_pair,
        arguments=inputs.ignore_strides,
    ),
    CallMutant(
        "x_stride_ignored",
        "x is read as if its rows were contiguous",
        when.both(when.has_several_tokens, lambda p: not p.inplace and p.tokens > 2),
        arguments=inputs.ignore_row_stride,
    ),
    CallMutant(
        "b1_missing", "no b1", when.has_bias, arguments=partial(inputs.omit_bias, name="b1")
    ),
    CallMutant(
        "b2_missing", "no b2", when.has_bias, arguments=partial(inputs.omit_bias, name="b2")
    ),
    CallMutant(
        "b1_weighted",
        "b1 is multiplied by the router weight",
        when.both(when.has_bias, lambda p: p.apply_router_weight_on_input),
        arguments=inputs.multiply_bias_by_router_weight,
    ),
    CallMutant(
        "b2_unweighted",
        "b2 is added after the router weight",
        when.both(
            when.has_bias,
            lambda p: p.combine is Combine.SUM and not p.apply_router_weight_on_input,
        ),
        finished=outputs.add_unweighted_bias,
    ),
    # Choice of expert.
    CallMutant(
        "expert_dropped",
        "the busiest expert is skipped",
        when.has_routed_pair,
        arguments=inputs.drop_busiest_expert,
    ),
    CallMutant(
        "wrong_expert",
        "expert e + 1 computes the pairs of expert e",
        when.has_several_experts,
        arguments=inputs.use_next_expert,
    ),
    CallMutant(
        "last_slot_dropped",
        "the last of the K slots is skipped",
        lambda p, r: when.has_several_slots(p, r) and not (p.expert_map and r == "all_to_one"),
        arguments=inputs.drop_last_slot,
    ),
    CallMutant(
        "rank_offset",
        "the expert map is one expert off",
        when.both(when.has_several_experts, lambda p: p.expert_map),
        arguments=inputs.shift_expert_map,
    ),
    CallMutant(
        "minus_one_wraps",
        "-1 means the last expert, as in Python",
        lambda p, r: r in ("skips", "all_skipped") and p.tokens > 0 and not p.expert_map,
        arguments=inputs.wrap_minus_one,
    ),
    CallMutant(
        "out_of_range_wraps",
        "ids outside [-1, E) are taken modulo E",
        when.has_routing("out_of_range"),
        arguments=inputs.wrap_out_of_range,
    ),
    CallMutant(
        "out_of_range_uncounted",
        "ids outside [-1, E) are skipped silently",
        when.has_routing("out_of_range"),
        arguments=inputs.skip_uncounted,
    ),
    CallMutant(
        "skips_counted",
        "-1 is counted as an invalid id",
        when.has_routing("skips", "all_skipped"),
        arguments=inputs.count_skips,
    ),
    CallMutant(
        "duplicates_once",
        "an expert that a token selects twice is computed only once",
        lambda p, r: when.has_routed_pair(p, r) and p.top_k > 1 and r == "duplicates",
        arguments=inputs.drop_duplicates,
    ),
    CallMutant(
        "int64_misread",
        "int64 ids are read as int32",
        when.both(when.has_several_experts, lambda p: p.ids_dtype is torch.int64),
        arguments=inputs.misread_int64,
    ),
    # Router weights and scaling.
    CallMutant(
        "router_weight_twice",
        "the router weight is applied twice",
        when.uses_router_weights,
        arguments=inputs.square_router_weights,
    ),
    CallMutant(
        "router_weight_never",
        "the router weight is not applied",
        when.uses_router_weights,
        arguments=inputs.omit_router_weights,
    ),
    CallMutant(
        "router_weights_averaged",
        "each slot gets the mean router weight of its token",
        when.has_several_weights,
        arguments=inputs.average_router_weights,
    ),
    CallMutant(
        "router_weight_moved",
        "the router weight is applied to the output instead of the input, or vice versa",
        when.has_routed_pair,
        problem=lambda p: replace(
            p, apply_router_weight_on_input=not p.apply_router_weight_on_input
        ),
    ),
    CallMutant(
        "scale_twice",
        "the routed scaling factor is applied twice",
        when.uses_scaling,
        problem=lambda p: replace(p, routed_scaling_factor=p.routed_scaling_factor**2),
    ),
    CallMutant(
        "scale_never",
        "the routed scaling factor is not applied",
        when.uses_scaling,
        problem=lambda p: replace(p, routed_scaling_factor=1.0),
    ),
    # Order of tokens, slots and rows.
    CallMutant(
        "tokens_shifted",
        "token t gets the x of token t - 1",
        when.has_several_tokens,
        arguments=inputs.shift_tokens,
    ),
    CallMutant(
        "slots_permuted",
        "the kept top-k slots are returned in another order",
        when.both(when.has_several_slots, lambda p: p.combine is not Combine.SUM),
        finished=outputs.permute_slots,
    ),
    CallMutant(
        "batch_counts_short",
        "each expert omits its last row",
        when.has_routed_pair,
        pairs=when.is_batched_pair,
        dispatched=outputs.shorten_counts,
    ),
    CallMutant(
        "batch_experts_shifted",
        "expert e gets the rows of expert e - 1",
        when.both(when.has_routed_pair, lambda p: p.e > 1 and p.top_k < p.experts),
        pairs=when.is_batched_pair,
        dispatched=outputs.shift_experts,
    ),
    CallMutant(
        "batch_rows_shifted",
        "finalize gathers the rows of the previous token",
        when.has_several_tokens,
        pairs=when.is_batched_pair,
        handle=partial(outputs.shift_handle, name="row_of_pair_TK"),
    ),
    CallMutant(
        "finalize_weights_shifted",
        "finalize uses the router weights of the previous token",
        when.both(
            when.both(when.uses_router_weights, lambda p: p.tokens > 1),
            lambda p: not p.apply_router_weight_on_input,
        ),
        pairs=when.finalize_applies_weights,
        handle=partial(outputs.shift_handle, name="topk_weights_TK"),
    ),
    *MEMORY_MUTANTS,
)
