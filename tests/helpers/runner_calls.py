"""Arguments for calls of MoeRunner, and a call on the small layer of `fused_experts_calls`."""

from typing import Any

import torch
from devices import DEVICE
from fused_experts_calls import make_layer

from modular_kernel.integrations.moe_runner import MoeQuantInfo, MoeRunner, MoeRunnerConfig
from modular_kernel.integrations.runner_formats import StandardCombineInput, StandardDispatchOutput
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.router import StandardTopKOutput
from modular_kernel.tensors import ExpertWeights, Routing

NOT_INPLACE = MoeRunnerConfig(inplace=False)


def make_quant_info(weights: ExpertWeights, **flags: Any) -> MoeQuantInfo:
    return MoeQuantInfo(
        weights.w1, weights.w2, weights.b1, weights.b2, expert_map=weights.expert_map,
        w13_scale=weights.w1_scale, w2_scale=weights.w2_scale, w13_zp=weights.w1_zero_point,
        w2_zp=weights.w2_zero_point, a13_scale=weights.a1_scale, a2_scale=weights.a2_scale,
        w13_global_scale=weights.w1_global_scale, w2_global_scale=weights.w2_global_scale, **flags,
    )  # fmt: skip


def make_dispatch_output(x_TH: torch.Tensor, routing: Routing) -> StandardDispatchOutput:
    return StandardDispatchOutput(
        x_TH, StandardTopKOutput(routing.topk_weights_TK, routing.topk_ids_TK, None)
    )


def run_layer(runner: MoeRunner, problem: Problem, **flags: Any) -> torch.Tensor:
    """Run a small layer and return its output."""
    x_TH, weights, routing = make_layer(problem, DEVICE)
    output = runner.run(make_dispatch_output(x_TH, routing), make_quant_info(weights, **flags))
    assert isinstance(output, StandardCombineInput)
    return output.hidden_states
