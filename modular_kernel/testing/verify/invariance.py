"""Check batch invariance: whether a token's output bits depend on the other tokens of its call.

`check_batch_invariant` runs for cases whose problem has `batch_invariant=True`. `invariance_table`
measures all pairings of parts. Both repeat a call with its tokens reordered, split or chunked
differently, and compare the bits of every output row.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from modular_kernel.catalog import check
from modular_kernel.kernel import FusedMoEModularKernel, Plan
from modular_kernel.testing.cases.inputs import Inputs
from modular_kernel.testing.verify.trial import Trial

# Calls a kernel on a subset of tokens: (n,) token indices -> (n, ...) output rows.
SubsetCall = Callable[[torch.Tensor], torch.Tensor]


def make_subset_call(kernel: FusedMoEModularKernel | Plan, inputs: Inputs) -> SubsetCall:
    """Return a function that calls `kernel` on a subset of the tokens of `inputs`.

    The inputs are copied and not changed.
    """

    def call(tokens: torch.Tensor) -> torch.Tensor:
        index = tokens.to(inputs.x_TH.device)
        return kernel(inputs.x_TH[index], inputs.weights, inputs.routing.of(index)).clone()

    return call


def reverse_tokens(tokens: int) -> list[torch.Tensor]:
    """Return the token indices of one call on all tokens in reverse order."""
    return [torch.arange(tokens).flip(0)]


def split_doubling(tokens: int, max_tokens: int | None = None) -> list[torch.Tensor]:
    """Split the tokens into calls on 1, 2, 4, ... tokens; return the token indices of each call.

    max_tokens: maximum number of tokens of any rank; None means `tokens`. With several ranks, it
        determines the number of calls, which must be equal on all ranks. A rank with fewer tokens
        ends with calls without tokens.
    """
    parts, start, size = [], 0, 1
    while start < (tokens if max_tokens is None else max_tokens):
        parts.append(torch.arange(min(start, tokens), min(start + size, tokens)))
        start, size = start + size, 2 * size
    return parts


def call_in_parts(
    call: SubsetCall, parts: list[torch.Tensor], template: torch.Tensor
) -> torch.Tensor:
    """Call on each of `parts`, (n,) token indices; return all output rows in token order.

    template: a tensor with the shape, dtype and device of the result.
    """
    out = torch.empty_like(template)
    for tokens in parts:
        out[tokens.to(out.device)] = call(tokens)
    return out


def count_differing_rows(actual: torch.Tensor, expected: torch.Tensor) -> int:
    return int((view_output_bytes(actual) != view_output_bytes(expected)).any(1).sum())


def view_output_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of floating-point outputs as (T, bytes per row). -0.0 and 0.0 differ.

    All NaNs are equal, because IEEE 754 does not specify the sign and the payload of a NaN that an
    operation returns. On a CPU, they depend on whether NumPy used a vector instruction.
    """
    rows = len(tensor)
    nan = torch.full_like(tensor, float("nan"))
    canonical = torch.where(tensor.isnan(), nan, tensor).contiguous()
    return canonical.view(torch.uint8).reshape(rows, -1 if rows else 0)


def check_batch_invariant(trial: Trial) -> Iterator[str]:
    """Check that output bits of a token do not depend on its call, if the problem requires that."""
    if not trial.case.problem.batch_invariant:
        return
    for description, rows in run_regrouped_calls(trial):
        count = count_differing_rows(rows, trial.eager_output)
        if count:
            yield f"{description}: the bits of {count} of {len(rows)} rows differ"


def run_regrouped_calls(trial: Trial) -> Iterator[tuple[str, torch.Tensor]]:
    """Repeat the trial's first call with its tokens split or ordered differently.

    Yields (description, output rows) for each variant. All ranks make the same number of calls,
    regardless of how many tokens they have.
    """
    inputs, expected = trial.first.original_inputs, trial.eager_output
    tokens, max_tokens = len(expected), trial.case.problem.tokens
    one_call, call = [torch.arange(tokens)], make_subset_call(trial.kernel, inputs)
    yield "in reverse order", call_in_parts(call, reverse_tokens(tokens), expected)
    yield (
        "in calls of 1, 2, 4, ... tokens",
        call_in_parts(call, split_doubling(tokens, max_tokens), expected),
    )
    larger_plan = _make_changed_kernel(trial, tokens=2 * max_tokens).plan()
    yield (
        "in a plan for twice as many",
        call_in_parts(make_subset_call(larger_plan, inputs), one_call, expected),
    )
    rechunked_kernel = make_rechunked_kernel(trial)
    if rechunked_kernel is not None:
        yield (
            "with other chunks",
            call_in_parts(make_subset_call(rechunked_kernel, inputs), one_call, expected),
        )


def make_rechunked_kernel(trial: Trial) -> FusedMoEModularKernel | None:
    """Make a kernel that splits a call into chunks differently from the case.

    If the case has no chunks, a chunk has a third of the tokens. Otherwise, the kernel has no
    chunks. Returns None if the pairing refuses the changed problem.
    """
    case, third_of_tokens = trial.case, -(-trial.case.problem.tokens // 3) or 1
    chunk = third_of_tokens if case.problem.chunk_tokens is None else None
    problem = replace(case.problem, chunk_tokens=chunk)
    if not check(case.prepare_finalize, case.experts, problem, trial.machine).ok:
        return None
    return _make_changed_kernel(trial, chunk_tokens=chunk)


def _make_changed_kernel(trial: Trial, **changes: int | None) -> FusedMoEModularKernel:
    problem = replace(trial.case.problem, **changes)  # type: ignore[arg-type]
    return trial.build(replace(trial.case, problem=problem), trial.machine, True)
