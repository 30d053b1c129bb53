"""Errors where rank 1 uses another problem; part of the fault scenario "misunderstood"."""

from collections.abc import Iterator
from typing import Any

import torch

from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.spec.problem import ActivationSpec, Combine
from modular_kernel.testing.verify.scenario_context import VICTIM, ScenarioContext, outcome_of

ONE_CALL = "one layer, call, pairing, step and order"

# Properties that must agree on all ranks; rank 1 changes them one at a time.
OTHERS: tuple[dict[str, Any], ...] = (
    {"routed_scaling_factor": 2.0},
    {"intermediate": 48},
    {"bias": True},
    {"activation": ActivationSpec("gelu")},
    {"apply_router_weight_on_input": True},
    {"combine": Combine.TOPK_WEIGHTED},
    {"dtype": torch.bfloat16},
    {"quant": "int8_w8a16_channel"},
)

# (outcome, expected outcome) of each call.
Lines = Iterator[tuple[str, str]]


def another_problem(on: ScenarioContext, first: FusedMoEModularKernel) -> Lines:
    """Call another layer on rank 1: the counts of the first call report it on all ranks."""
    got = "another dtype, scheme, placement, activation or pairing"
    others = on.other_problems(OTHERS)
    for number, (changes, inputs) in enumerate(others):
        other = on.beside(first, **changes)
        outcome = outcome_of(lambda: on.judged(on.call(other, **inputs)))  # noqa: B023
        yield outcome, on.counts_error(got, ONE_CALL, layer=3 + number, call=1, step=8 + number)
    smaller = on.beside(first, tokens=on.case.problem.tokens + 1)
    tokens = on.case.problem.tokens
    yield (
        outcome_of(lambda: on.judged(on.call(smaller))),
        on.counts_error(
            on.by_rank("tokens", tokens, tokens + 1),
            ONE_CALL, layer=3 + len(others), call=1, step=8 + len(others),
        ),
    )  # fmt: skip


def another_problem_at_construction(on: ScenarioContext, first: FusedMoEModularKernel) -> Lines:
    """Check the same for ranks that share memory: they report it when the part is made."""
    peers = on.others if on.at_fault else (VICTIM,)
    expected = on.error("ranks that share buffers", "", "", (0, 0, 0), peers, "construct")
    tokens = {"tokens": on.case.problem.tokens + 1}
    for changes in (*(each for each, _ in on.other_problems(OTHERS)), tokens):
        outcome = outcome_of(lambda: str(on.beside(first, **changes)))  # noqa: B023
        yield text_before(outcome, ": got"), text_before(expected, ": got")
        yield outcome.partition(", need ")[2].partition(" (")[0], "the same on all ranks"


def text_before(text: str, *ends: str) -> str:
    """Return `text` up to the first occurrence of each of `ends`, applied in order."""
    for end in ends:
        text = text.partition(end)[0]
    return text
