"""The cases of `smoke`: every value of the axes that have few, and every family of schemes."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from modular_kernel.testing.cases.inputs import ORDINARY, Manner
from modular_kernel.types import Combine, Problem

_FP32, _FP16, _BF16 = torch.float32, torch.float16, torch.bfloat16
_OAI = "swiglu_oai:alpha=1.702,limit=1.0,interleaved=true"
_ZEROS = "group=32,zero_points=true"

Variant = tuple[Problem, str]


def smoke(base: Problem) -> tuple[tuple[Problem, str, Manner], ...]:
    """Cases that touch every axis, then one or two of each family of schemes."""
    # Weights of either sign, and NaN where a pair is skipped.
    signed = (
        replace(base, dtype=_BF16, activation=_OAI, bias=True),
        "skips",
        Manner(values="signed"),
    )
    ordinary = (*_plain(base), *_quantised(base))
    return (*((problem, routing, ORDINARY) for problem, routing in ordinary), signed)


def _plain(base: Problem) -> Iterator[Variant]:
    weighted = replace(base, combine=Combine.TOPK_WEIGHTED, routed_scaling_factor=2.5)
    on_input = replace(base, apply_router_weight_on_input=True, top_k=1, bias=True)
    yield base, "uniform"
    yield base.with_tokens(0), "uniform"
    halves = replace(base, dtype=_FP16, routed_scaling_factor=2.5)
    yield replace(halves, top_k=3, hidden=160, ids_dtype=torch.int64), "duplicates"
    yield on_input, "zipf"
    yield (
        replace(base, expert_map=True, local_experts=3, activation="relu2"),
        "out_of_range",
    )
    yield replace(base, tokens=17, chunk_tokens=8, inplace=True), "all_to_one"
    yield weighted, "empty_experts"
    yield replace(base, fp32_precision="tf32", tokens=7), "beyond_int32"


def _quantised(base: Problem) -> Iterator[Variant]:
    """Each with something that meets its scales: chunks, alternating rows, ragged ends, biases."""
    few = replace(base, tokens=7, dtype=_BF16)
    chunked = replace(few, chunk_tokens=4)
    yield replace(few, quant="fp8_w8a8_tensor", bias=True), "uniform"
    yield replace(chunked, quant="fp8_w8a8_channel", top_k=8), "skips"
    yield replace(few, quant="fp8_w8a8_block:block=48x64"), "duplicates"
    yield replace(few, quant="fp8_w8a16_block:block=48x64", activation=_OAI), "skips"
    yield replace(few, quant="int8_w8a8_channel", intermediate=40), "out_of_range"
    yield replace(chunked, quant="int8_w8a8_block:block=32x32"), "uniform"
    yield replace(few, quant="int8_w8a16_channel", dtype=_FP16), "zipf"
    yield replace(few, quant=f"int8_w8a16_group:{_ZEROS}", activation=_OAI), "uniform"
    yield replace(few, quant=f"int4_w4a16_group:{_ZEROS}", activation=_OAI), "uniform"
    yield replace(few, quant="int4_w4a16_group:group=64", bias=True, hidden=50), "skips"
    yield replace(few, quant="int4_w4a16_act_order:group=32", activation=_OAI), "skips"
    yield replace(few, quant="mxfp4_w4a16", activation=_OAI, bias=True), "uniform"
    yield replace(few, quant="mxfp4_w4a16:repacked=true"), "duplicates"
    yield replace(few, quant="nvfp4_w4a16", activation=_OAI), "zipf"
