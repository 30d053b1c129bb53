"""Tokens without an adapter: they have the bits that they have where nobody has one, and a layer
without any takes no room for them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from modular_kernel.testing.verify.invariance import rows_that_differ
from modular_kernel.testing.verify.trial import Trial
from modular_kernel.validate import ADAPTER_TENSORS


def without_adapters(trial: Trial) -> Iterator[str]:
    """Other tokens' adapters, and the matrices of slots that nobody names, change no bit of theirs.

    A call that says that it has none is the layer without any, launch by launch. That layer has no
    room for any.
    """
    case, i = trial.case, trial.first.inputs
    if case.problem.adapters is None:
        specs = trial.kernel.workspace_specs(case.problem.tokens)
        of_adapters = (name for name in specs if name.startswith("lora_") or "adapters" in name)
        for name in of_adapters:
            if specs[name].numel:
                yield f"{specs[name].nbytes} bytes of {name} in a layer without adapters"
    slots_T = i.routing.slots_T
    # Ranks call alike, whatever their own number of tokens.
    if case.problem.adapters is None or not trial.deterministic or not case.problem.tokens:
        return
    if slots_T is None:
        names: dict[str, Any] = dict.fromkeys(ADAPTER_TENSORS)
        plain = replace(case, problem=replace(case.problem, lora="none"))
        kernel, weights = trial.build(plain, trial.machine, True), replace(i.weights, **names)
        routing = replace(i.routing, adapters_T=None)
        got = kernel(trial.first.x_TH(), weights, routing)
        if count := rows_that_differ(got, trial.eager):
            yield f"{count} rows of a call without adapters are not those of the layer without any"
        return
    scheme = case.problem.scheme
    if scheme.activation_granularity == "tensor" and not scheme.static:
        return  # one scale for the h of all tokens
    nobody = torch.full_like(slots_T, -1)
    got = trial.kernel(trial.first.x_TH(), i.weights, replace(i.routing, adapters_T=nobody))
    base = slots_T < 0
    if count := rows_that_differ(got[base], trial.eager[base]):
        yield f"{count} of {int(base.sum())} rows without an adapter are changed by the others'"


def adapters_by_turns(trial: Trial) -> Iterator[str]:
    """Check that calls with and without adapters leave nothing to each other in a plan's buffers.

    One without has the bits of a layer without any, the next one with some has its own again.
    """
    case, i = trial.case, trial.first.inputs
    slots_T = i.routing.slots_T
    if case.problem.adapters is None or not trial.deterministic or not case.problem.tokens:
        return
    if slots_T is None:
        return  # `without_adapters` compares these
    plain = replace(case, problem=replace(case.problem, lora="none"))
    names: dict[str, Any] = dict.fromkeys(ADAPTER_TENSORS)
    kernel, weights = trial.build(plain, trial.machine, True), replace(i.weights, **names)
    want = kernel(trial.first.x_TH(), weights, replace(i.routing, adapters_T=None)).clone()
    plan = trial.plan
    plan(trial.first.x_TH(), i.weights, i.routing)
    got = plan(trial.first.x_TH(), i.weights, replace(i.routing, adapters_T="none"))
    if count := rows_that_differ(got, want):
        yield f"{count} rows without adapters, behind a call with some, are not the plain layer's"
    again = plan(trial.first.x_TH(), i.weights, i.routing)
    if count := rows_that_differ(again, trial.eager):
        yield f"{count} rows with adapters, behind a call without any, are others"
