"""Check that LoRA support costs nothing when it is unused.

The output of tokens without an adapter must be bitwise independent of the adapters of other tokens,
and layers without adapters must not allocate LoRA workspace.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from modular_kernel.catalog import load_catalog
from modular_kernel.testing.verify.invariance import count_differing_rows
from modular_kernel.testing.verify.trial import Trial
from modular_kernel.validate import ADAPTER_TENSORS


def check_without_adapters(trial: Trial) -> Iterator[str]:
    """Check that adapters do not affect tokens without an adapter.

    Outputs of these tokens must be bitwise independent of other tokens' adapters and of the
    matrices in unused slots. A call without any adapter must be bitwise equal to
    `_compute_output_without_adapters`. A layer without adapters must not allocate workspace for
    adapters.
    """
    case, inputs = trial.case, trial.first.inputs
    if case.problem.adapters is None:
        specs = trial.kernel.workspace_specs(case.problem.tokens)
        lora_names = (name for name in specs if name.startswith("lora_") or "adapters" in name)
        for name in lora_names:
            if specs[name].numel:
                yield f"{specs[name].nbytes} bytes of {name} in a layer without adapters"
    slots_T = inputs.routing.slots_T
    # `case.problem.tokens` is the same on all ranks, so all ranks return here or none does.
    if case.problem.adapters is None or not trial.is_deterministic or not case.problem.tokens:
        return
    if slots_T is None:
        output = _compute_output_without_adapters(trial)
        if count := count_differing_rows(output, trial.eager_output):
            yield f"{count} rows of a call without adapters differ from the layer without adapters"
        return
    scheme = case.problem.scheme
    if scheme.activation_granularity == "tensor" and not scheme.static:
        return  # all tokens share the scale of h, so an adapter of one token affects every token
    none_T = torch.full_like(slots_T, -1)
    output = trial.kernel(
        trial.first.x_TH(), inputs.weights, replace(inputs.routing, adapters_T=none_T)
    )
    is_base_T = slots_T < 0
    if count := count_differing_rows(output[is_base_T], trial.eager_output[is_base_T]):
        num_base_rows = int(is_base_T.sum())
        yield f"{count} of {num_base_rows} rows without an adapter depend on other tokens' adapters"


def check_alternating_adapters(trial: Trial) -> Iterator[str]:
    """Check that planned calls with and without adapters leave nothing in each other's buffers.

    A call without adapters must be bitwise equal to `_compute_output_without_adapters`, and a
    subsequent call with adapters must be bitwise equal to the first call.
    """
    case, inputs = trial.case, trial.first.inputs
    slots_T = inputs.routing.slots_T
    if case.problem.adapters is None or not trial.is_deterministic or not case.problem.tokens:
        return
    if slots_T is None:
        return  # `check_without_adapters` compares calls without adapters
    expected = _compute_output_without_adapters(trial)
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


def _compute_output_without_adapters(trial: Trial) -> torch.Tensor:
    """Return the output that the first call has if no token has an adapter.

    Without communication, this is the output of a layer built without LoRA. If ranks exchange rows,
    every row carries an adapter slot (-1 for none), which may select another code path in the
    experts. In that case, the reference is an eager call of the LoRA layer without adapters.
    """
    case, inputs = trial.case, trial.first.inputs
    part = load_catalog().prepare_finalize(case.prepare_finalize)
    if case.problem.parallel.world_size > 1 and not part.requires.replicated_input:
        routing = replace(inputs.routing, adapters_T="none")
        return trial.kernel(trial.first.x_TH(), inputs.weights, routing).clone()
    no_adapters: dict[str, Any] = dict.fromkeys(ADAPTER_TENSORS)
    case_without_lora = replace(case, problem=replace(case.problem, lora="none"))
    kernel, weights = (
        trial.build(case_without_lora, trial.machine, True),
        replace(inputs.weights, **no_adapters),
    )
    return kernel(trial.first.x_TH(), weights, replace(inputs.routing, adapters_T=None)).clone()
