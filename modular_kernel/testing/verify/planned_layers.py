"""Calls of layers of model size on the Triton experts, whose launches `launch_plans` records.

A call runs on tensors without memory, with the launch configurations of a machine without a GPU.
Its record has the launches, each with its stage, and the buffers of the kernel. These buffers are
large enough for every configuration of the kernel. If the configuration of a call can be set
(`contracts.Tunable`), the record also has the buffers of a kernel for this configuration alone.

The record also has the rules that refuse a layer on older GPUs, because no other case covers them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from modular_kernel.catalog import (
    check,
    collect_packages,
    load_catalog,
    make_kernel,
    this_machine,
)
from modular_kernel.quant.quantized_weights import weight_specs
from modular_kernel.spec.problem import Combine, Machine, Problem, dtype_name
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.workspace import BufferSpec, Workspace

_META = torch.device("meta")
_PAIRINGS = (
    ("MoEPrepareAndFinalizeNoEP", "TritonExperts"),
    ("MoEPrepareAndFinalizeNoEP", "GroupedGemmExperts"),
    ("BatchedPrepareAndFinalize", "BatchedTritonExperts"),
)
# Numbers of tokens with different paths, tiles and numbers of programs.
_TOKENS = (1, 5, 64, 4096)
_BASE_PROBLEM = Problem(
    tokens=1, hidden=4096, intermediate=1536, experts=128, top_k=8, dtype=torch.bfloat16
)
_RAGGED: dict[str, Any] = {"hidden": 2880, "intermediate": 1440, "experts": 32, "top_k": 4}
_SCHEMES = (
    "fp8_w8a8_block",
    "fp8_w8a8_channel",
    "fp8_w8a8_tensor:static=true",
    "fp8_w8a16_block",
    "int8_w8a8_channel",
    "int8_w8a16_group",
    "int4_w4a16_group:zero_points=true",
    "int4_w4a16_act_order:group=64",
    "mxfp4_w4a16",
    "nvfp4_w4a16",
)
_CHANGES: tuple[dict[str, Any], ...] = (
    {},
    *({"quant": quant} for quant in _SCHEMES),
    {"dtype": torch.float32},
    {"hidden": 200, "intermediate": 136, "bias": True},  # K is not a multiple of any tile
    {**_RAGGED, "bias": True, "activation": "swiglu_oai"},
    {**_RAGGED, "bias": True, "activation": "swiglu_oai", "quant": "mxfp4_w4a16"},
    {"activation": "relu2", "expert_map": True, "local_experts": 16},
    {"combine": Combine.TOPK_WEIGHTED},
    {"top_k": 1, "apply_router_weight_on_input": True},
    {"batch_invariant": True, "lora": "adapters=4,rank=16"},
    {"lora": "adapters=4,rank=8"},
    {"lora": "adapters=4,rank=80", "dtype": torch.float32},
    {"lora": "adapters=24,rank=32", "quant": "fp8_w8a8_block"},
)

# Compute capabilities on both sides of the limits at which parts are refused, convert float8, or
# use wgmma.
_ARCHS = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0))

RecordLaunches = Callable[[Callable[[], object]], list[str]]


def list_layers() -> Iterator[tuple[str, tuple[str, str], Problem]]:
    """Yield (name, pairing, problem) of each call."""
    machine = this_machine(device="cpu")
    for pair in _PAIRINGS:
        for change in _CHANGES:
            for tokens in _TOKENS:
                problem = replace(_BASE_PROBLEM, **change, tokens=tokens)
                if check(*pair, problem, machine).ok:
                    yield _name_layer(pair, change, f"T={tokens}"), pair, problem


def list_refusals() -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each layer, and a line for each GPU on which it is refused."""
    packages = frozenset({"triton", *collect_packages(load_catalog())})
    for pair in _PAIRINGS:
        for change in _CHANGES:
            problem, lines = replace(_BASE_PROBLEM, **change), list[str]()
            for arch in _ARCHS:
                verdict = check(*pair, problem, Machine("cuda", arch, packages))
                rules = [f"{r.rule} of {r.parties[0]}" for r in verdict.rejections]
                lines += [f"sm_{arch[0]}{arch[1]}: refused by {', '.join(rules)}"] if rules else []
            yield _name_layer(pair, change, "refusals of"), lines


def _name_layer(pair: tuple[str, str], change: Mapping[str, object], prefix: str) -> str:
    return " ".join((prefix, pair[1], *(f"{n}={_format(v)}" for n, v in change.items())))


def _format(value: object) -> str:
    return dtype_name(value) if isinstance(value, torch.dtype) else str(value)


def plan_layer(
    pair: tuple[str, str], problem: Problem, record_launches: RecordLaunches
) -> list[str]:
    """Return lines that describe the buffers and the launches of a call.

    record_launches: runs a call, and returns a line for each of its launches.
    """
    machine = this_machine(device="cpu")
    make_layer_kernel = partial(make_kernel, *pair, problem, machine=machine, auto_prepare=False)
    kernel, lines = make_layer_kernel(), list[str]()
    specs = kernel.workspace_specs(problem.tokens)
    space = load_catalog().experts(pair[1]).tunable(problem)
    if space is not None:
        with space.using(space.untuned(problem.tokens)):
            specs_alone = make_layer_kernel().workspace_specs(problem.tokens)
        lines += [
            line for line in _describe_buffers(specs_alone, "alone: ") if specs_alone != specs
        ]
    lines += _describe_buffers(specs)
    inputs = _make_inputs(problem)
    out = torch.empty(problem.output_shape, dtype=problem.dtype, device=_META)
    workspace = Workspace(specs, _META)
    return lines + record_launches(lambda: kernel.start_checked(*inputs, out, workspace).finish())


def _describe_buffers(specs: Mapping[str, BufferSpec], prefix: str = "") -> list[str]:
    """Return one line with the shapes and dtypes of all buffers."""
    descriptions = (
        f"{name}{list(s.shape)} {dtype_name(s.dtype)}" for name, s in sorted(specs.items())
    )
    return [f"{prefix}{', '.join(descriptions)}"]


def _make_inputs(problem: Problem) -> tuple[torch.Tensor, ExpertWeights, Routing]:
    """Make the inputs of a call as tensors without memory."""

    def make_empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=_META)

    tokens, e, dtype = problem.tokens, problem.e, problem.dtype
    tensors = {name: make_empty(s.dtypes[0], *s.shape) for name, s in weight_specs(problem).items()}
    if problem.bias:
        tensors["b1"] = make_empty(dtype, e, problem.w1_rows)
        tensors["b2"] = make_empty(dtype, e, problem.hidden)
    if problem.expert_map:
        tensors["expert_map"] = make_empty(torch.int32, problem.experts)
    slots_T = None
    if (spec := problem.adapters) is not None:
        shapes = spec.shapes(e, problem.w1_rows, problem.hidden, problem.intermediate)
        tensors |= {name: make_empty(dtype, *shape) for name, shape in shapes.items()}
        slots_T = make_empty(torch.int32, tokens)
    routing = Routing(
        make_empty(torch.float32, tokens, problem.top_k),
        make_empty(torch.int32, tokens, problem.top_k),
        slots_T,
    )
    return make_empty(dtype, tokens, problem.hidden), ExpertWeights(**tensors), routing
