"""Smoke cases: every value of small axes, and every family of schemes."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from modular_kernel.spec.problem import MAX_TOP_K, Combine, Problem
from modular_kernel.spec.quantization import list_external_schemes
from modular_kernel.testing.cases.inputs import ORDINARY, InputVariation

_FP32, _FP16, _BF16 = torch.float32, torch.float16, torch.bfloat16
_SWIGLU_OAI = "swiglu_oai:alpha=1.702,limit=1.0,interleaved=true"
_ZEROS = "group=32,zero_points=true"
_TIES = InputVariation(values="ties")

Variant = tuple[Problem, str, InputVariation]


def list_smoke_variants(base: Problem) -> tuple[Variant, ...]:
    """Return variants that touch every axis, then one or two for each family of schemes."""
    # Router weights of both signs, and NaN for skipped pairs.
    signed = (
        replace(base, dtype=_BF16, activation=_SWIGLU_OAI, bias=True),
        "skips",
        InputVariation(values="signed"),
    )
    return (
        *_list_unquantized(base),
        *_list_quantized(base),
        *_list_with_adapters(base),
        *_list_batch_invariant(base),
        signed,
    )


def _list_unquantized(base: Problem) -> Iterator[Variant]:
    weighted = replace(base, combine=Combine.TOPK_WEIGHTED, routed_scaling_factor=2.5)
    on_input = replace(base, apply_router_weight_on_input=True, top_k=1, bias=True)
    yield base, "uniform", ORDINARY
    yield base.with_tokens(0), "uniform", ORDINARY
    fp16 = replace(base, dtype=_FP16, routed_scaling_factor=2.5)
    yield replace(fp16, top_k=3, hidden=160, ids_dtype=torch.int64), "duplicates", ORDINARY
    yield on_input, "zipf", ORDINARY
    mapped = replace(base, expert_map=True, local_experts=3, activation="relu2")
    yield mapped, "out_of_range", ORDINARY
    yield replace(base, tokens=17, chunk_tokens=8, inplace=True), "all_to_one", ORDINARY
    yield weighted, "skips", ORDINARY
    yield replace(base, tokens=2, top_k=MAX_TOP_K, experts=33, dtype=_BF16), "zipf", ORDINARY
    yield replace(base, fp32_precision="tf32", tokens=7), "beyond_int32", ORDINARY


def _list_quantized(base: Problem) -> Iterator[Variant]:
    """Yield schemes, each with an option that affects its scales: chunks, interleaving, biases.

    Quantized activations consist of midpoints between values of the quantized dtype, because only
    midpoints reveal how a part rounds.
    """
    few_tokens = replace(base, tokens=7, dtype=_BF16)
    chunked = replace(few_tokens, chunk_tokens=4)
    yield replace(few_tokens, quant="fp8_w8a8_tensor", bias=True), "uniform", _TIES
    yield replace(few_tokens, quant="fp8_w8a8_tensor:static=true"), "skips", _TIES
    yield replace(chunked, quant="fp8_w8a8_channel", top_k=8), "skips", _TIES
    yield replace(few_tokens, quant="fp8_w8a8_block:block=48x64"), "duplicates", ORDINARY
    yield (
        replace(few_tokens, hidden=160, quant="fp8_w8a8_block:block=48x64"),
        "empty_experts",
        _TIES,
    )
    yield (
        replace(few_tokens, quant="fp8_w8a16_block:block=48x64", activation=_SWIGLU_OAI),
        "skips",
        ORDINARY,
    )
    yield replace(few_tokens, quant="int8_w8a8_channel", intermediate=40), "out_of_range", _TIES
    yield replace(chunked, quant="int8_w8a8_block:block=32x32"), "uniform", _TIES
    yield replace(few_tokens, quant="int8_w8a16_channel", dtype=_FP16), "zipf", ORDINARY
    yield (
        replace(few_tokens, quant=f"int8_w8a16_group:{_ZEROS}", activation=_SWIGLU_OAI),
        "uniform",
        ORDINARY,
    )
    yield (
        replace(few_tokens, quant=f"int4_w4a16_group:{_ZEROS}", activation=_SWIGLU_OAI),
        "uniform",
        ORDINARY,
    )
    yield (
        replace(few_tokens, quant="int4_w4a16_group:group=64", bias=True, hidden=50),
        "skips",
        ORDINARY,
    )
    yield (
        replace(few_tokens, quant="int4_w4a16_act_order:group=32", activation=_SWIGLU_OAI),
        "skips",
        ORDINARY,
    )
    yield (
        replace(few_tokens, quant="mxfp4_w4a16", activation=_SWIGLU_OAI, bias=True),
        "uniform",
        ORDINARY,
    )
    yield replace(few_tokens, quant="nvfp4_w4a16", activation=_SWIGLU_OAI), "zipf", ORDINARY
    # H and I are multiples of the packed words, for which parts have specialized paths. Gate and up
    # are not interleaved, so each has its own global scale.
    packable = replace(few_tokens, hidden=128, intermediate=64)
    yield replace(packable, quant="nvfp4_w4a16", bias=True), "skips", ORDINARY
    yield replace(packable, quant="nvfp4_w4a4", hidden=64), "skips", _TIES
    yield replace(packable, quant="mxfp4_w4a16:repacked=true"), "duplicates", ORDINARY
    # One token, for which some parts use other kernels.
    one_token = packable.with_tokens(1)
    yield replace(one_token, quant=f"int4_w4a16_group:{_ZEROS}", bias=True), "uniform", ORDINARY
    yield replace(one_token, quant="fp8_w8a8_channel", top_k=3), "uniform", _TIES
    yield replace(one_token, quant="fp8_w8a8_channel", top_k=22, experts=24), "skips", _TIES
    for quant in list_external_schemes():
        yield replace(few_tokens, quant=quant, hidden=160), "skips", ORDINARY
        yield replace(one_token, quant=quant, dtype=_FP16), "uniform", ORDINARY


def _list_with_adapters(base: Problem) -> Iterator[Variant]:
    """Yield layers with adapters.

    The layers cover a rank that is not a multiple of a block, shared matrices, unused slots, a call
    without adapters, and blocks of scales that contain rows with and without adapters.
    """
    with_adapters = replace(base, tokens=7, dtype=_BF16, lora="adapters=3,rank=7")
    yield replace(with_adapters, bias=True, activation=_SWIGLU_OAI), "skips", ORDINARY
    shared = replace(with_adapters, lora="adapters=4,rank=80,a13=shared,outer=shared", dtype=_FP32)
    yield (
        replace(shared, activation="gelu", hidden=80),
        "duplicates",
        InputVariation(slot_pattern="sequences"),
    )
    yield (
        replace(with_adapters, top_k=1, chunk_tokens=4),
        "uniform",
        InputVariation(slot_pattern="without"),
    )
    block = replace(with_adapters, hidden=160, intermediate=96, quant="fp8_w8a8_block:block=32x32")
    yield block, "out_of_range", ORDINARY
    packed = replace(with_adapters, hidden=128, intermediate=64, quant="int4_w4a16_group:group=32")
    yield replace(packed, dtype=_FP16), "zipf", ORDINARY


def _list_batch_invariant(base: Problem) -> Iterator[Variant]:
    """Yield batch-invariant problems whose sums take several steps, with and without LoRA."""
    wide = replace(base, tokens=9, hidden=160, intermediate=96, batch_invariant=True)
    yield replace(wide, dtype=_BF16, bias=True), "zipf", ORDINARY
    yield replace(wide, lora="adapters=3,rank=7", tokens=5), "skips", ORDINARY
    yield replace(wide, dtype=_BF16, quant="int4_w4a16_group:group=32"), "uniform", ORDINARY
    yield replace(wide, dtype=_BF16, quant="nvfp4_w4a16"), "duplicates", ORDINARY
    yield replace(wide, dtype=_BF16, quant="fp8_w8a8_channel"), "uniform", ORDINARY
