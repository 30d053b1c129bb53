"""Batch invariance: the same tokens in other calls, and which rows come out with other bits."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from modular_kernel.catalog import check
from modular_kernel.kernel import FusedMoEModularKernel, Plan
from modular_kernel.testing.cases.inputs import Inputs
from modular_kernel.testing.verify.trial import Trial

# The output of one call on these of a sample's tokens: (n,) indices -> (n, ...) rows.
Calls = Callable[[torch.Tensor], torch.Tensor]


def call_on(kernel: FusedMoEModularKernel | Plan, inputs: Inputs) -> Calls:
    """Call on some of the tokens of `inputs`, which stay as they are."""

    def on(tokens: torch.Tensor) -> torch.Tensor:
        where = tokens.to(inputs.x_TH.device)
        return kernel(inputs.x_TH[where], inputs.weights, inputs.routing.of(where)).clone()

    return on


def reversed_order(tokens: int) -> list[torch.Tensor]:
    """One call on all tokens, the last first."""
    return [torch.arange(tokens).flip(0)]


def doubling_calls(tokens: int, most: int | None = None) -> list[torch.Tensor]:
    """Call on 1, 2, 4, ... tokens, all of them once: each has other neighbors, another number.

    most: of any rank, so that all ranks make as many calls; the last ones may have no tokens.
    """
    parts, start, size = [], 0, 1
    while start < (tokens if most is None else most):
        parts.append(torch.arange(min(start, tokens), min(start + size, tokens)))
        start, size = start + size, 2 * size
    return parts


def gathered(call: Calls, parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return the rows of calls on `parts`, each in its token's place, in a tensor like `like`."""
    out = torch.empty_like(like)
    for part in parts:
        out[part.to(out.device)] = call(part)
    return out


def rows_that_differ(got: torch.Tensor, want: torch.Tensor) -> int:
    """How many rows have other bits: NaN equals itself, and -0.0 is not 0.0."""
    return int((as_bytes(got) != as_bytes(want)).any(1).sum())


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """(T, bytes of a row)."""
    rows = len(tensor)
    return tensor.contiguous().view(torch.uint8).reshape(rows, -1 if rows else 0)


def batch_invariant(trial: Trial) -> Iterator[str]:
    """Where the problem asks for it: a token's bits do not depend on the rest of its call."""
    if not trial.case.problem.batch_invariant:
        return
    for how, rows in regrouped(trial):
        count = rows_that_differ(rows, trial.eager)
        if count:
            yield f"{how}: {count} of {len(rows)} rows have other bits"


def regrouped(trial: Trial) -> Iterator[tuple[str, torch.Tensor]]:
    """(how, rows) for each other way of calling on the tokens of the trial's first call.

    Ranks make the same calls, whatever their own number of tokens.
    """
    given, want = trial.first.pristine, trial.eager
    tokens, most = len(want), trial.case.problem.tokens
    everything, call = [torch.arange(tokens)], call_on(trial.kernel, given)
    yield "in reverse order", gathered(call, reversed_order(tokens), want)
    yield "in calls of 1, 2, 4, ... tokens", gathered(call, doubling_calls(tokens, most), want)
    larger = _changed(trial, tokens=2 * most).plan()
    yield "in a plan for twice as many", gathered(call_on(larger, given), everything, want)
    split = otherwise_split(trial)
    if split is not None:
        yield "split otherwise", gathered(call_on(split, given), everything, want)


def otherwise_split(trial: Trial) -> FusedMoEModularKernel | None:
    """Return a kernel with chunks of a third of the tokens, or without the case's; None if
    refused.
    """
    case, third = trial.case, -(-trial.case.problem.tokens // 3) or 1
    chunk = third if case.problem.chunk_tokens is None else None
    problem = replace(case.problem, chunk_tokens=chunk)
    if not check(case.prepare_finalize, case.experts, problem, trial.machine).ok:
        return None
    return _changed(trial, chunk_tokens=chunk)


def _changed(trial: Trial, **changes: int | None) -> FusedMoEModularKernel:
    """Return the poisoned kernel of the case's problem with these changes."""
    problem = replace(trial.case.problem, **changes)  # type: ignore[arg-type]
    return trial.build(replace(trial.case, problem=problem), trial.machine, True)
