"""Writes the lines of a reproducer that call SGLang. This module does not import SGLang."""

from collections.abc import Mapping
from typing import Any

from modular_kernel.integrations.engine import EngineCase
from modular_kernel.integrations.reproducer import write_expert_map
from modular_kernel.spec.problem import Problem

_MOE = "sglang.srt.layers.moe"


def write_call(
    case: EngineCase, options: Mapping[str, Any], device: str, *, is_native: bool, is_core: bool
) -> tuple[list[str], list[str]]:
    """Return the import statements and the statements that set `out`.

    options: options of the activation.
    is_native: whether the class is a function of SGLang's module `fused_moe_native`.
    is_core: whether the class is the core of the Triton runner.
    """
    problem = case.problem
    config_fields = dict(options)
    if problem.apply_router_weight_on_input:
        config_fields["apply_router_weight_on_input"] = True
    config = f"MoeRunnerConfig({problem.experts}, {problem.e}"
    config += "".join(f", {name}={value!r}" for name, value in config_fields.items()) + ")"
    ids = f"{write_expert_map(problem, device)}[ids.long()]" if problem.expert_map else "ids"
    topk = f"StandardTopKOutput(router, {ids}, None)"
    if is_native:
        return _write_native(case, config, topk)
    imports = [
        f"from {_MOE} import MoeRunner, MoeRunnerBackend, MoeRunnerConfig",
        f"from {_MOE}.moe_runner.triton import TritonMoeQuantInfo",
        f"from {_MOE}.token_dispatcher import StandardDispatchOutput",
        f"from {_MOE}.topk import StandardTopKOutput",
        "from sglang.srt.runtime_context import SpawnRanks, publish",
        "from sglang.srt.server_args import ServerArgs",
    ]
    server_args = f'ServerArgs("dummy", device="{device}")'
    dispatch = f"StandardDispatchOutput(x.clone(), None, {topk})"
    return imports, [
        f'publish({server_args}, role="scheduler", ranks=SpawnRanks(0, 0, 0))',
        f"runner = MoeRunner(MoeRunnerBackend.TRITON, {config})",
        *(["runner.fused_func = None  # call the core"] if is_core else []),
        "out = runner.run(",
        f"    {dispatch},",
        f"    TritonMoeQuantInfo(w1, w2{_write_scales(problem)}),",
        ").hidden_states",
    ]


def _write_scales(problem: Problem) -> str:
    """Return the arguments of TritonMoeQuantInfo that follow the weights."""
    scheme, fields = problem.scheme, dict[str, str]()
    if problem.bias:
        fields |= {"b13": "b1.float()", "b2": "b2.float()"}
    if scheme.quantized:
        flag = scheme.name.rpartition("_")[0]  # such as fp8_w8a8
        fields |= {f"use_{flag}": "True", "w13_scale": "s1", "w2_scale": "s2"}
    if scheme.granularity == "channel":
        fields["per_channel_quant"] = "True"
    if scheme.granularity in ("block", "group"):
        fields["block_shape"] = str(
            list(scheme.group) if len(scheme.group) > 1 else [0, *scheme.group]
        )
    if scheme.static:
        fields |= {"a13_scale": "s1.new_tensor([0.0125])", "a2_scale": "s2.new_tensor([0.05])"}
    return "".join(f", {name}={value}" for name, value in fields.items())


def _write_native(case: EngineCase, config: str, topk: str) -> tuple[list[str], list[str]]:
    """Return the lines that call a function of torch code with a stand-in for the layer."""
    name, problem = case.experts, case.problem
    imports = [
        "from types import SimpleNamespace",
        f"from {_MOE} import MoeRunnerConfig",
        f"from {_MOE}.fused_moe_native import {name}",
        f"from {_MOE}.topk import StandardTopKOutput",
    ]
    fields = f"moe_runner_config={config}, w13_weight=w1, w2_weight=w2"
    if problem.bias:
        fields += ", w13_weight_bias=b1.float(), w2_weight_bias=b2.float()"
    layer = f"layer = SimpleNamespace(num_experts={problem.experts}, {fields})"
    if name == "moe_forward_native":
        return imports, [layer, f"out = {name}(layer, x, {topk}, layer.moe_runner_config)"]
    imports.append(f"from {_MOE}.token_dispatcher import StandardDispatchOutput")
    run = f"{name}(layer, StandardDispatchOutput(x, None, {topk})).hidden_states"
    return imports, [layer, f"out = {run}"]
