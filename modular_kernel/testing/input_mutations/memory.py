"""Input mutations of memory and state: unwritten, overwritten, stale or wrongly returned values."""

from functools import partial

from modular_kernel.testing.input_mutations import conditions as when
from modular_kernel.testing.input_mutations import inputs, outputs
from modular_kernel.testing.input_mutations.inject import CallMutant

_on_gpu = partial(CallMutant, device="cuda", pairs=when.capturable_pair)

MEMORY_MUTANTS: tuple[CallMutant, ...] = (
    # Output that is not written.
    CallMutant(
        "last_token_zero",
        "the last token's row is zero",
        when.all_routed,
        finished=outputs.zero_last_token,
    ),
    CallMutant(
        "last_token_unwritten",
        "the last token's row is not written",
        when.has_tokens,
        finished=outputs.leave_last_token,
    ),
    CallMutant(
        "last_column_unwritten",
        "the last column is not written",
        when.has_tokens,
        finished=outputs.leave_last_column,
    ),
    CallMutant(
        "smaller_plan_call",
        "a plan's call of fewer tokens than it is made for loses the last one",
        when.both(when.all_routed, lambda p: p.tokens > 1 and not p.inplace),
        finished=outputs.zero_last_token_of_smaller_plan,
    ),
    CallMutant(
        "last_chunk_unwritten",
        "the last chunk is not written",
        when.both(when.has_tokens, lambda p: p.tokens > (p.chunk_tokens or p.tokens)),
        finished=outputs.leave_last_chunk,
    ),
    CallMutant(
        "skipped_tokens_unwritten",
        "tokens without a valid id keep what the output held",
        lambda p, r: p.tokens > 1 and r in ("skips", "all_skipped"),
        finished=outputs.leave_skipped_tokens,
    ),
    CallMutant(
        "skipped_rows_unwritten",
        "rows of skipped pairs are left as they were",
        when.reads_remote_pairs,
        pairs=when.reads_every_row,
        rows=outputs.leave_skipped_rows,
    ),
    # Memory that is wrongly written, kept or returned.
    CallMutant(
        "accumulates",
        "the output is added to what was there",
        when.has_tokens,
        finished=outputs.accumulate,
    ),
    CallMutant(
        "workspace_overrun",
        "a byte after a workspace buffer is written",
        when.has_tokens,
        started=outputs.write_past_workspace,
    ),
    CallMutant(
        "output_overrun",
        "an element after the output is written",
        when.has_tokens,
        finished=outputs.write_past_output,
    ),
    CallMutant(
        "x_written",
        "x is written though the call is not inplace",
        when.both(when.has_tokens, lambda p: not p.inplace),
        finished=outputs.write_x,
    ),
    CallMutant(
        "ids_written", "the top-k ids are written", when.has_tokens, finished=outputs.write_ids
    ),
    CallMutant(
        "sentinel_written",
        "-1 in the caller's ids is replaced by E",
        when.on_routing("skips", "all_skipped"),
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
        "stale_tokens", "x of the call before is used", when.routed, arguments=inputs.reuse_tokens
    ),
    CallMutant(
        "stale_routing",
        "routing is cached by the number of tokens",
        when.several_experts,
        arguments=inputs.reuse_routing,
    ),
    CallMutant(
        "stale_output",
        "the output of the call before is returned",
        when.routed,
        finished=outputs.reuse_output,
    ),
    CallMutant(
        "dispatch_on_self",
        "a call in flight is finished with the tokens of a later one",
        when.several_tokens,
        receive=outputs.receive_latest,
    ),
    CallMutant(
        "nondeterministic",
        "a bit differs from call to call",
        when.routed,
        pairs=when.deterministic_pair,
        finished=outputs.flip_every_other_call,
    ),
    CallMutant(
        "depends_on_batch",
        "a bit of a token's row differs in calls of an even number of tokens",
        when.batch_invariant,
        finished=outputs.flip_in_even_calls,
    ),
    CallMutant(
        "empty_call_fails",
        "no tokens are an error",
        lambda p, _r: p.tokens == 0,
        arguments=inputs.fail_without_tokens,
    ),
    _on_gpu(
        "allocates",
        "a planned call allocates",
        when.has_tokens,
        arguments=inputs.allocate,
    ),
    _on_gpu(
        "synchronizes",
        "a planned call waits for the device",
        when.has_tokens,
        arguments=inputs.synchronize,
    ),
    _on_gpu(
        "graph_keeps_routing",
        "a captured graph keeps the ids it was captured with",
        when.several_experts,
        arguments=inputs.freeze_routing,
    ),
)
