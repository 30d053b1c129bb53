"""Checks for the "misunderstood" fault scenario: rank 1 builds a layer from a changed Problem.

Every rank must report the mismatch.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.spec.problem import ActivationSpec, Combine
from modular_kernel.testing.verify.scenario_context import (
    FAULTY_RANK,
    ScenarioContext,
    capture_outcome,
)

NEED_SAME_CALL = "one layer, call, pairing, step and order"

# Fields of Problem that must agree on all ranks. Each entry is a separate change on rank 1.
PROBLEM_CHANGES: tuple[dict[str, Any], ...] = (
    {"routed_scaling_factor": 2.0},
    {"intermediate": 48},
    {"bias": True},
    {"activation": ActivationSpec("gelu")},
    {"apply_router_weight_on_input": True},
    {"combine": Combine.TOPK_WEIGHTED},
    {"dtype": torch.bfloat16},
    {"quant": "int8_w8a16_channel"},
)

# Yields (outcome, expected outcome) for each call.
Outcomes = Iterator[tuple[str, str]]


def check_problem_mismatch(
    context: ScenarioContext, first_layer: FusedMoEModularKernel
) -> Outcomes:
    """Call layers whose Problem differs on rank 1. Each call must fail on every rank.

    first_layer: a layer whose manager the changed layers use.
    """
    got = "another dtype, scheme, placement, activation, pairing or adapters"
    changed_problems = context.list_supported_changes(PROBLEM_CHANGES)
    for index, (changes, inputs) in enumerate(changed_problems):
        kernel = context.make_kernel_on_manager_of(first_layer, **changes)
        outcome = capture_outcome(lambda: context.compare(context.call(kernel, **inputs)))  # noqa: B023
        yield (
            outcome,
            context.format_call_number_error(
                got, NEED_SAME_CALL, layer=3 + index, call=1, step=8 + index
            ),
        )
    larger = context.make_kernel_on_manager_of(first_layer, tokens=context.case.problem.tokens + 1)
    tokens = context.case.problem.tokens
    yield (
        capture_outcome(lambda: context.compare(context.call(larger))),
        context.format_call_number_error(
            context.format_by_rank("tokens", tokens, tokens + 1),
            NEED_SAME_CALL, layer=3 + len(changed_problems), call=1, step=8 + len(changed_problems),
        ),
    )  # fmt: skip


def check_problem_mismatch_at_construction(
    context: ScenarioContext, first_layer: FusedMoEModularKernel
) -> Outcomes:
    """Like `check_problem_mismatch`, but for parts whose ranks share memory.

    These parts report the mismatch at construction, not in a call.
    """
    peers = context.peers if context.is_faulty_rank else (FAULTY_RANK,)
    expected = context.format_expected_error(
        "ranks that share buffers", "", "", (0, 0, 0), peers, "construct"
    )
    tokens = {"tokens": context.case.problem.tokens + 1}
    supported_changes = context.list_supported_changes(PROBLEM_CHANGES)
    for changes in (*(changes for changes, _ in supported_changes), tokens):
        make_kernel = partial(context.make_kernel_on_manager_of, first_layer, **changes)
        outcome = capture_outcome(lambda: str(make_kernel()))  # noqa: B023
        yield cut_before(outcome, ": got"), cut_before(expected, ": got")
        yield outcome.partition(", need ")[2].partition(" (")[0], "the same on all ranks"


def cut_before(text: str, *ends: str) -> str:
    """Return `text` up to the first occurrence of each of `ends`, applied in order."""
    for end in ends:
        text = text.partition(end)[0]
    return text
