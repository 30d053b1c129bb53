"""Quantization cases: every scheme, with ragged sizes and with options that affect its scales."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from modular_kernel.errors import ConfigurationError
from modular_kernel.quant.quantized_weights import IMPLICIT_ZERO_POINT
from modular_kernel.spec.problem import Combine, Problem
from modular_kernel.spec.quantization import list_external_schemes, load_external_schemes

Variant = tuple[Problem, str]

# Every built-in scheme. Groups are at most half as large as the rows of the cases below (except for
# default sizes), so that there are several groups, and the last group is incomplete.
SCHEMES = (
    "fp8_w8a8_tensor",
    "fp8_w8a8_tensor:static=true",
    "fp8_w8a8_channel",
    "fp8_w8a8_block",
    "fp8_w8a8_block:block=48x64",
    "fp8_w8a16_tensor",
    "fp8_w8a16_channel",
    "fp8_w8a16_block:block=48x64",
    "int8_w8a8_channel",
    "int8_w8a8_block:block=32x32",
    "int8_w8a16_channel",
    "int8_w8a16_group:group=64",
    "int8_w8a16_group:group=32,zero_points=true",
    "int4_w4a16_group:group=64",
    "int4_w4a16_group:group=32,zero_points=true",
    "int8_w8a16_act_order:group=64",
    "int4_w4a16_act_order:group=32,zero_points=true",
    "mxfp4_w4a16",
    "mxfp4_w4a16:repacked=true",
    "nvfp4_w4a16",
    "nvfp4_w4a4",
)


def list_schemes() -> tuple[str, ...]:
    """Return SCHEMES and the schemes of other packages."""
    return (*SCHEMES, *list_external_schemes())


def list_declared_problems() -> Iterator[Problem]:
    """Yield the cases that schemes of other packages declare (`TableScheme.cases`).

    A case names fields of Problem. Other fields have the values of a small layer in bfloat16.
    Raises ConfigurationError for a case that is not a valid problem.
    """
    base = Problem(tokens=7, hidden=160, intermediate=96, experts=5, top_k=2, dtype=torch.bfloat16)
    for external in load_external_schemes().usable:
        for changes in external.scheme.cases:
            argument = f"scheme {external.name}: case"
            if "quant" in changes:
                need = "fields other than quant"
                raise ConfigurationError(argument, got=repr(dict(changes))[:200], need=need)
            try:
                yield replace(base, quant=external.name, **changes)
            except TypeError as error:  # a field that Problem does not have
                need = "fields of Problem"
                raise ConfigurationError(argument, got=str(error)[:200], need=need) from error


def list_quantized_variants(base: Problem) -> Iterator[Variant]:
    """Yield a variant of each scheme in bf16, then variants with options that affect scales.

    The cases that schemes of other packages declare come last.
    """
    wide = replace(base, hidden=160, intermediate=96, dtype=torch.bfloat16)

    def make_variant(quant: str, routing: str = "uniform", **changes: Any) -> Variant:
        return replace(wide, quant=quant, **changes), routing

    for quant in list_schemes():
        yield make_variant(quant)
    block, channel = "fp8_w8a8_block:block=48x64", "int8_w8a8_channel"
    tensor, int4 = "fp8_w8a8_tensor", "int4_w4a16_group:group=32,zero_points=true"
    yield make_variant(block, "skips", top_k=3, bias=True)
    yield make_variant(block, "out_of_range", dtype=torch.float16, expert_map=True, local_experts=3)
    yield make_variant(block, top_k=8, tokens=9, activation="swiglu_oai:limit=1.2")
    yield make_variant(block, tokens=1, top_k=1)
    yield make_variant(block, "zipf", tokens=65, experts=2)
    yield make_variant(channel, "duplicates", top_k=3, activation="relu2")
    yield make_variant(channel, "all_to_one", top_k=1, apply_router_weight_on_input=True, bias=True)
    yield make_variant(channel, tokens=0)
    yield make_variant(channel, "all_skipped")
    yield make_variant(tensor, "skips", combine=Combine.TOPK_WEIGHTED, routed_scaling_factor=2.5)
    yield make_variant(tensor, "empty_experts", inplace=True, hidden=72, intermediate=40)
    yield make_variant(int4, "duplicates", top_k=8, tokens=9, bias=True)
    yield make_variant(int4, "skips", dtype=torch.float16, hidden=72, intermediate=40)
    yield make_variant("mxfp4_w4a16", "out_of_range", activation="swiglu_oai:limit=1.2", bias=True)
    yield make_variant("nvfp4_w4a16", "skips", activation="swiglu_oai:limit=1.2", bias=True)
    yield make_variant("nvfp4_w4a16", dtype=torch.float16, hidden=72, intermediate=40)
    yield make_variant("nvfp4_w4a4", "skips", top_k=3, activation="swiglu_oai:limit=1.2", bias=True)
    yield make_variant(
        "nvfp4_w4a4", "out_of_range", dtype=torch.float16, hidden=72, intermediate=40
    )
    yield make_variant("nvfp4_w4a4", "all_to_one", top_k=1, apply_router_weight_on_input=True)
    yield make_variant("int8_w8a16_group:group=64", dtype=torch.float32, tokens=7)
    for problem in list_declared_problems():
        yield problem, "skips"


def choose_short_scale_dtype(problem: Problem) -> torch.dtype:
    """Choose a 16-bit dtype for weight scales.

    Returns the dtype of the problem, or the other 16-bit dtype for integer weights with an odd
    top_k. Returns float32 for float32 problems, which have no 16-bit scales.
    """
    other_dtype = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16}
    use_other = problem.scheme.weight in IMPLICIT_ZERO_POINT and problem.top_k % 2
    return other_dtype.get(problem.dtype, problem.dtype) if use_other else problem.dtype
