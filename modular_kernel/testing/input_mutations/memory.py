"""Injected defects ("mutants") that misuse memory or state.

Values are not written, overwritten, stale, or returned wrongly. Each mutant has a name, a
description, the condition under which the checks must detect it, and the function that injects it.
"""

from functools import partial

from modular_kernel.testing.input_mutations import conditions as when
from modular_kernel.testing.input_mutations import inputs, outputs
from modular_kernel.testing.input_mutations.inject import CallMutant

_make_gpu_mutant = partial(CallMutant, device="cuda", pairs=when.is_capturable_pair)

MEMORY_MUTANTS: tuple[CallMutant, ...] = (
    # Output that is not written.
    CallMutant(
        "last_token_zero",
        "the last token's row is zero",
        when.routes_all_pairs,
        finished=outputs.zero_last_token,
    ),
    CallMutant(
        "last_token_unwritten",
        "the last token's row is not written",
        when.has_tokens,
        finished=outputs.skip_writing_last_token,
    ),
    CallMutant(
        "last_column_unwritten",
        "the last column is not written",
        when.has_tokens,
        finished=outputs.skip_writing_last_column,
    ),
    CallMutant(
        "smaller_plan_call",
        "a plan called with fewer tokens than it was made for drops the last token",
        when.both(when.routes_all_pairs, lambda p: p.tokens > 1 and not p.inplace),
        finished=outputs.zero_last_token_of_smaller_plan,
    ),
    CallMutant(
        "last_chunk_unwritten",
        "the last chunk is not written",
        when.both(when.has_tokens, lambda p: p.tokens > (p.chunk_tokens or p.tokens)),
        finished=outputs.skip_writing_last_chunk,
    ),
    CallMutant(
        "skipped_tokens_unwritten",
        "output rows of tokens without a valid id are not written",
        lambda p, r: p.tokens > 1 and r in ("skips", "all_skipped"),
        finished=outputs.skip_writing_skipped_tokens,
    ),
    CallMutant(
        "skipped_rows_unwritten",
        "rows of skipped pairs are not written",
        when.reads_remote_pairs,
        pairs=when.reads_every_row,
        rows=outputs.skip_writing_skipped_rows,
    ),
    # Memory that is wrongly written, kept or returned.
    CallMutant(
        "accumulates",
        "the output is added to the previous contents of the tensor",
        when.has_tokens,
        finished=outputs.accumulate,
    ),
    CallMutant(
        "workspace_overrun",
        "a byte past the end of a workspace buffer is written",
        when.has_tokens,
        started=outputs.write_past_workspace,
    ),
    CallMutant(
        "output_overrun",
        "an element past the end of the output is written",
        when.has_tokens,
        finished=outputs.write_past_output,
    ),
    CallMutant(
        "x_written",
        "x is written although the call is not inplace",
        when.both(when.has_tokens, lambda p: not p.inplace),
        finished=outputs.write_x,
    ),
    CallMutant(
        "ids_written", "the top-k ids are written", when.has_tokens, finished=outputs.write_ids
    ),
    CallMutant(
        "sentinel_written",
        "-1 in the caller's ids is replaced by E",
        when.has_routing("skips", "all_skipped"),
        finished=outputs.write_sentinel,
    ),
    CallMutant("weights_written", "w2 is written", when.has_tokens, finished=outputs.write_weights),
    CallMutant(
        "another_tensor_returned",
        "a copy is returned instead of `out`",
        when.has_tokens,
        finished=outputs.return_copy,
    ),
    CallMutant(
        "stale_tokens",
        "x of the previous call is used",
        when.has_routed_pair,
        arguments=inputs.reuse_tokens,
    ),
    CallMutant(
        "stale_routing",
        "routing is cached by the number of tokens",
        when.has_several_experts,
        arguments=inputs.reuse_routing,
    ),
    CallMutant(
        "stale_output",
        "the output of the previous call is returned",
        when.has_routed_pair,
        finished=outputs.reuse_output,
    ),
    CallMutant(
        "dispatch_on_self",
        "a call in flight is finished with the tokens of a later call",
        when.has_several_tokens,
        receive=outputs.receive_latest,
    ),
    CallMutant(
        "nondeterministic",
        "a bit of the output differs from call to call",
        when.has_routed_pair,
        pairs=when.is_deterministic_pair,
        finished=outputs.flip_every_other_call,
    ),
    CallMutant(
        "depends_on_batch",
        "a bit of the output differs in calls with an even number of tokens",
        when.requires_batch_invariance,
        finished=outputs.flip_for_even_token_count,
    ),
    CallMutant(
        "empty_call_fails",
        "a call without tokens raises an error",
        lambda p, _r: p.tokens == 0,
        arguments=inputs.fail_without_tokens,
    ),
    _make_gpu_mutant(
        "allocates",
        "a planned call allocates memory",
        when.has_tokens,
        arguments=inputs.allocate,
    ),
    _make_gpu_mutant(
        "synchronizes",
        "a planned call waits for the device",
        when.has_tokens,
        arguments=inputs.synchronize,
    ),
    _make_gpu_mutant(
        "graph_keeps_routing",
        "a captured graph uses the ids with which it was captured",
        when.has_several_experts,
        arguments=inputs.freeze_routing,
    ),
)
