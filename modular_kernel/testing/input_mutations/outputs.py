"""Defects inside a call and in its output, one function each.

The lists of defects in `operators` and `memory` use these functions as hooks of a `CallMutant`.
`call.initial_out` is a copy of the output tensor, made before the call. A hook that copies rows
from it to `call.out` simulates a kernel that does not write these rows.
"""

from dataclasses import replace

import torch

from modular_kernel.tensors import BatchedTokens, Dispatched, Handle, StandardTokens
from modular_kernel.testing.input_mutations.inject import DefectState, PrepareResult, StartedCall
from modular_kernel.testing.input_mutations.inputs import find_local_ids, find_valid_pairs


def reuse_output(call: StartedCall) -> None:
    """Replace the first rows of the output with the rows of the previous call."""
    state, out = call.arguments.defect_state, call.out
    previous = state.get("out")
    state["out"] = out.clone()
    if previous is not None:
        count = min(len(out), len(previous))
        out[:count] = previous[:count]


def receive_latest(result: PrepareResult, defect_state: DefectState) -> "LatestResult":
    """Keep the dispatched tokens where a later call replaces them, instead of in the handle."""
    defect_state["prepared"] = result
    return LatestResult(defect_state)


class LatestResult:
    """A callable that returns the tokens of the latest dispatch."""

    def __init__(self, defect_state: DefectState) -> None:
        self.defect_state = defect_state

    def __call__(self) -> PrepareResult:
        result: PrepareResult = self.defect_state["prepared"]
        return result


def flip_every_other_call(call: StartedCall) -> None:
    """Flip the last bit of one value in every other call."""
    state, out = call.arguments.defect_state, call.out
    state["calls"] = state.get("calls", 0) + 1
    if state["calls"] % 2 == 0:
        int_dtype = torch.int32 if out.element_size() == 4 else torch.int16
        out.view(-1)[:1].view(int_dtype).bitwise_xor_(1)


def flip_for_even_token_count(call: StartedCall) -> None:
    """Flip the last bit of one value in calls with an even number of tokens."""
    if len(call.out) % 2 == 0:
        int_dtype = torch.int32 if call.out.element_size() == 4 else torch.int16
        call.out.view(-1)[:1].view(int_dtype).bitwise_xor_(1)


def shorten_counts(tokens: Dispatched) -> Dispatched:
    assert isinstance(tokens, BatchedTokens)
    return replace(tokens, counts_e=(tokens.counts_e - 1).clamp(min=0))


def shift_experts(tokens: Dispatched) -> Dispatched:
    assert isinstance(tokens, BatchedTokens)
    return replace(tokens, x_eCH=tokens.x_eCH.roll(1, 0), counts_e=tokens.counts_e.roll(1, 0))


def skip_writing_skipped_rows(output: torch.Tensor, tokens: Dispatched) -> None:
    """Write NaN to the rows of pairs without a local expert, as if they were not written."""
    assert isinstance(tokens, StandardTokens)
    routing = tokens.routing
    ids = routing.topk_ids_TK.long()
    has_local_expert = (ids >= 0) & (ids < routing.num_experts)
    if routing.expert_map is not None:
        local_rows = routing.expert_map.long()[ids.clamp(0, routing.num_experts - 1)]
        has_local_expert &= local_rows >= 0
    output[~has_local_expert] = torch.nan


def shift_handle(handle: Handle, name: str) -> Handle:
    """Shift the tensor `name` of the handle by one token."""
    shifted = {name: getattr(handle, name).roll(1, 0)}
    return replace(handle, **shifted)


def write_zeros(call: StartedCall) -> None:
    call.out.zero_()


def skip_writing_last_token(call: StartedCall) -> None:
    call.out[-1] = call.initial_out[-1]


def zero_last_token(call: StartedCall) -> None:
    call.out[-1] = 0


def zero_last_token_of_smaller_plan(call: StartedCall) -> None:
    """Zero the last token if `out` is a slice of the larger output buffer of a plan."""
    rows = call.arguments.problem.tokens
    row_bytes = call.out[0].numel() * call.out.element_size()
    if len(call.out) < rows and call.out.untyped_storage().nbytes() == rows * row_bytes:
        call.out[-1] = 0


def skip_writing_last_column(call: StartedCall) -> None:
    call.out[..., -1] = call.initial_out[..., -1]


def skip_writing_last_chunk(call: StartedCall) -> None:
    chunk = call.arguments.problem.chunk_tokens
    assert chunk is not None
    start = (len(call.out) - 1) // chunk * chunk
    if start > 0:
        call.out[start:] = call.initial_out[start:]


def skip_writing_skipped_tokens(call: StartedCall) -> None:
    skipped_T = ~find_valid_pairs(call.arguments).any(1)
    call.out[skipped_T] = call.initial_out[skipped_T]


def permute_slots(call: StartedCall) -> None:
    call.out.copy_(call.out.flip(1))


def accumulate(call: StartedCall) -> None:
    call.out.add_(call.initial_out)


def add_unweighted_bias(call: StartedCall) -> None:
    """Change the output as if b2 were not multiplied by the router weight."""
    args = call.arguments
    assert args.weights.b2 is not None
    local_ids_TK = find_local_ids(args)
    missing_weight = (1 - args.routing.topk_weights_TK) * (local_ids_TK >= 0)
    bias_TKH = args.weights.b2.float()[local_ids_TK.clamp(min=0)] * missing_weight[..., None]
    call.out.add_(bias_TKH.sum(1) * args.problem.routed_scaling_factor)


def return_copy(call: StartedCall) -> torch.Tensor:
    return call.out.clone()


def write_x(call: StartedCall) -> None:
    call.arguments.x_TH[0, 0] += 1


def write_ids(call: StartedCall) -> None:
    call.arguments.routing.topk_ids_TK[0, 0] += 1


def write_sentinel(call: StartedCall) -> None:
    """Replace -1 in the caller's ids with E, with which some libraries mark skipped pairs."""
    ids = call.arguments.routing.topk_ids_TK
    ids.masked_fill_(ids == -1, call.arguments.problem.experts)


def write_weights(call: StartedCall) -> None:
    call.arguments.weights.w2[0, 0, 0] += 1


def write_past_output(call: StartedCall) -> None:
    end = call.out.storage_offset() + call.out.numel()
    if call.out.untyped_storage().nbytes() > end * call.out.element_size():
        call.out.as_strided((1,), (1,), end).zero_()


def write_past_workspace(call: StartedCall) -> None:
    """Write one byte after the last workspace buffer of the call."""
    name, spec = list(call.specs.items())[-1]
    buffer = call.workspace.take(name, spec.shape).view(-1).view(torch.uint8)
    buffer.as_strided((1,), (1,), buffer.storage_offset() + buffer.numel()).zero_()
