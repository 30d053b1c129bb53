"""Check that tokens and layers without adapters have the same bits and memory as without LoRA."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from modular_kernel.catalog import load_catalog
from modular_kernel.testing.verify.invariance import count_differing_rows
from modular_kernel.testing.verify.trial import Trial
from modular_kernel.validate import ADAPTER_TENSORS


def check_without_adapters(trial: Trial) -> Iterator[str]:
    """Check that tokens without an adapter are not affected by adapters.

    Their bits do not depend on the adapters of other tokens, or on the matrices of unused slots. A
    call without any adapter gives the bits of `_output_without_adapters`. A layer without adapters
    allocates no workspace for them.
    """
    case, inputs = trial.case, trial.first.inputs
    if case.problem.adapters is None:
        specs = trial.kernel.workspace_specs(case.problem.tokens)
        lora_names = (name for name in specs if name.startswith("lora_") or "adapters" in name)
        for name in lora_names:
            if specs[name].numel:
                yield f"{specs[name].nbytes} bytes of {name} in a layer without adapters"
    slots_T = inputs.routing.slots_T
    # Depends on the problem's tokens, not the rank's, so that all ranks make the same calls.
    if case.problem.adapters is None or not trial.is_deterministic or not case.problem.tokens:
        return
    if slots_T is None:
        output = _output_without_adapters(trial)
        if count := count_differing_rows(output, trial.eager_output):
            yield f"{count} rows of a call without adapters differ from the layer without adapters"
        return
    scheme = case.problem.scheme
    if scheme.activation_granularity == "tensor" and not scheme.static:
        return  # all tokens share the scale of h, so adapters affect every token
    none_T = torch.full_like(slots_T, -1)
    output = trial.kernel(
        trial.first.x_TH(), inputs.weights, replace(inputs.routing, adapters_T=none_T)
    )
    is_base_T = slots_T < 0
    if count := count_differing_rows(output[is_base_T], trial.eager_output[is_base_T]):
        base = int(is_base_T.sum())
        yield f"{count} of {base} rows without an adapter depend on other tokens' adapters"


def check_alternating_adapters(trial: Trial) -> Iterator[str]:
    """Check that planned calls with and without adapters leave nothing in each other's buffers.

    A call without adapters has the bits of `_output_without_adapters`; a following call with
    adapters has the bits of the first call.
    """
    case, inputs = trial.case, trial.first.inputs
    slots_T = inputs.routing.slots_T
    if case.problem.adapters is None or not trial.is_deterministic or not case.problem.tokens:
        return
    if slots_T is None:
        return  # calls without adapters are compared by `without_adapters`
    expected = _output_without_adapters(trial)
    plan = trial.plan
    plan(trial.first.x_TH(), inputs.weights, inputs.routing)
    output = plan(trial.first.x_TH(), inputs.weights, replace(inputs.routing, adapters_T="none"))
    if count := count_differing_rows(output, expected):
        yield (
            f"{count} rows without adapters, after a call with adapters, differ from the layer "
            "without adapters"
        )
    output_with_adapters = plan(trial.first.x_TH(), inputs.weights, inputs.routing)
    if count := count_differing_rows(output_with_adapters, trial.eager_output):
        yield (
            f"{count} rows with adapters, after a call without adapters, differ from the first call"
        )


def _output_without_adapters(trial: Trial) -> torch.Tensor:
    """Return the output that the first call has if no token has an adapter.

    It is that of a layer without adapters, unless rows travel between ranks. Each row then has a
    slot, -1 for none, since tokens of other ranks may have adapters, and experts may take another
    path. In that case it is the output of an eager call of the layer with adapters.
    """
    case, inputs = trial.case, trial.first.inputs
    part = load_catalog().prepare_finalize(case.prepare_finalize)
    if case.problem.parallel.world_size > 1 and not part.requires.replicated_input:
        routing = replace(inputs.routing, adapters_T="none")
        return trial.kernel(trial.first.x_TH(), inputs.weights, routing).clone()
    no_adapters: dict[str, Any] = dict.fromkeys(ADAPTER_TENSORS)
    plain_case = replace(case, problem=replace(case.problem, lora="none"))
    kernel, weights = (
        trial.build(plain_case, trial.machine, True),
        replace(inputs.weights, **no_adapters),
    )
    return kernel(trial.first.x_TH(), weights, replace(inputs.routing, adapters_T=None)).clone()
