"""Arguments and calls of MoeRunner on a small layer."""

from typing import Any

import torch
from devices import DEVICE
from fused_samples import layer

from modular_kernel.integrations.moe_runner import MoeQuantInfo, MoeRunner, MoeRunnerConfig
from modular_kernel.integrations.runner_formats import StandardCombineInput, StandardDispatchOutput
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.router import StandardTopKOutput
from modular_kernel.tensors import ExpertWeights, Routing

OUT = MoeRunnerConfig(inplace=False)


def info_of(weights: ExpertWeights, **flags: Any) -> MoeQuantInfo:
    return MoeQuantInfo(
        weights.w1, weights.w2, weights.b1, weights.b2, expert_map=weights.expert_map,
        w13_scale=weights.w1_scale, w2_scale=weights.w2_scale, w13_zp=weights.w1_zero_point,
        w2_zp=weights.w2_zero_point, a13_scale=weights.a1_scale, a2_scale=weights.a2_scale,
        w13_global_scale=weights.w1_global_scale, w2_global_scale=weights.w2_global_scale, **flags,
    )  # fmt: skip


def standard(x_TH: torch.Tensor, routing: Routing) -> StandardDispatchOutput:
    return StandardDispatchOutput(
        x_TH, StandardTopKOutput(routing.topk_weights_TK, routing.topk_ids_TK, None)
    )


def ran(runner: MoeRunner, problem: Problem, **flags: Any) -> torch.Tensor:
    x_TH, weights, routing = layer(problem, DEVICE)
    output = runner.run(standard(x_TH, routing), info_of(weights, **flags))
    assert isinstance(output, StandardCombineInput)
    return output.hidden_states
