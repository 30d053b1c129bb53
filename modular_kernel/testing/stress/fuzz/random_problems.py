"""Hypothesis strategies for small problems, most of them valid, and for inputs of calls.

A problem has the shapes, dtypes and options of a layer. A pairing is an exchange (prepare/finalize)
class and an experts class. Most fuzz targets that make calls use these strategies.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from modular_kernel.machine import current_machine
from modular_kernel.quant.quantized_weights import (
    IMPLICIT_ZERO_POINT,
    quantize_weights,
    static_scale,
)
from modular_kernel.spec.problem import MAX_TOP_K, ActivationSpec, Combine, Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.stress.fuzz.target import biased_bool, seeds

# (PrepareAndFinalize, compatible experts in pure PyTorch, compatible experts in Triton)
_PARTS = (
    ("MoEPrepareAndFinalizeNoEP", "TorchExperts", ("TritonExperts", "GroupedGemmExperts")),
    ("BatchedPrepareAndFinalize", "NaiveBatchedExperts", ("BatchedTritonExperts",)),
)
_SIZES = (1, 2, 7, 8, 16, 24, 31, 32, 33, 40, 48, 64)
_ACTIVATIONS = (
    "silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai", "swiglu_oai:limit=1.0,interleaved=false",
    "swiglu_clamp_after", "swiglu_clamp_before:limit=1.0", "silu:interleaved=true",
    "situ:alpha=2.0,limit=1.0", "gelu_tanh:limit=1.0", "silu_no_mul", "gelu_no_mul",
)  # fmt: skip
_QUANTS = (
    "fp8_w8a8_tensor", "fp8_w8a8_tensor:static=true", "fp8_w8a8_channel",
    "fp8_w8a8_block:block=32x32", "fp8_w8a8_block:block=16x32", "int8_w8a8_channel",
    "fp8_w8a16_tensor", "fp8_w8a16_channel", "fp8_w8a16_block:block=16x32",
    "int8_w8a8_block:block=32x32", "int8_w8a16_channel", "int8_w8a16_group:group=32",
    "int8_w8a16_group:group=32,zero_points=true", "int4_w4a16_group:group=32",
    "int4_w4a16_group:group=32,zero_points=true", "mxfp4_w4a16",
    "nvfp4_w4a16",
)  # fmt: skip


@dataclass(frozen=True)
class CallInputs:
    """The arguments of a call."""

    x_TH: torch.Tensor
    weights: ExpertWeights
    routing: Routing
    out: torch.Tensor | None = None


@st.composite
def pairings(draw: st.DrawFn) -> tuple[str, str]:
    """Draw a pairing, which this machine almost always supports."""
    prepare, torch_experts, triton_experts = draw(_parts)
    if draw(biased_bool(percent_true=5)):
        _, torch_experts, triton_experts = draw(_parts)
    uses_triton = draw(biased_bool(80 if current_machine().interpreter else 5))
    return prepare, draw(st.sampled_from(triton_experts)) if uses_triton else torch_experts


_parts = st.sampled_from(_PARTS)
_sizes = st.sampled_from(_SIZES)
_quants = st.one_of(*[st.just("none")] * 3, st.sampled_from(_QUANTS), st.sampled_from(_QUANTS))
_combines = st.sampled_from((*[Combine.SUM] * 6, Combine.TOPK_WEIGHTED, Combine.TOPK_UNWEIGHTED))
_fields = st.fixed_dictionaries(
    {
        "tokens": st.sampled_from((1, 0, 1, 2, 3, 4, 5, 8, 9)),
        "hidden": _sizes,
        "intermediate": _sizes,
        "top_k": st.sampled_from((1, 1, 2, 2, 3, 5, 22, MAX_TOP_K)),
        "dtype": st.sampled_from((torch.float32, torch.float16, torch.bfloat16)),
        "quant": _quants,
        "activation": st.one_of(st.just("silu"), st.sampled_from(_ACTIVATIONS)),
        "ids_dtype": st.sampled_from((None, None, torch.int32, torch.int64)),
        "bias": biased_bool(percent_true=25),
        "routed_scaling_factor": st.sampled_from((1.0, 1.0, 2.5, -0.5)),
        "inplace": biased_bool(percent_true=10),
        "chunk_tokens": st.sampled_from((None, None, None, 1, 2, 4)),
    }
)


@st.composite
def problem_fields(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the fields of a small problem. For some draws, Problem raises InputError."""
    fields = dict(draw(_fields))
    experts, combine = draw(st.sampled_from((1, 2, 3, 4, 5, 8, 9))), draw(_combines)
    has_map = draw(biased_bool(percent_true=15))
    return fields | {
        "experts": experts,
        "combine": combine,
        "apply_router_weight_on_input": draw(biased_bool(percent_true=15))
        and combine is Combine.SUM,
        "expert_map": has_map,
        "local_experts": draw(st.integers(1, experts)) if has_map else None,
    }


@dataclass(frozen=True)
class InputChoices:
    """Parameters from which `make_inputs` makes valid inputs of a problem.

    Attributes:
        seed: seed of the values.
        tokens: number of tokens, modulo `problem.tokens` + 1; None means `problem.tokens`.
        column_major: whether unquantized weights are column-major.
        invalid_id: index in a list of ids that must be skipped. 40 % of all ids are replaced by
            that id. None means that all ids are valid.
        int32_ids: whether ids are int32, if the problem does not set their dtype and they fit.
        signed_weights: whether router weights have both signs.
        nan_padding: whether NaN follows each row of x in memory.
        zero_row: whether the first token is zero.
    """

    seed: int = 0
    tokens: int | None = None
    column_major: bool = False
    invalid_id: int | None = None
    int32_ids: bool = False
    signed_weights: bool = False
    nan_padding: bool = False
    zero_row: bool = False


def input_choices() -> st.SearchStrategy[InputChoices]:
    """Return a strategy for the parameters of the inputs of one call."""
    return st.builds(
        InputChoices,
        seed=seeds,
        tokens=st.one_of(st.none(), st.none(), st.integers(0, 9)),
        column_major=biased_bool(percent_true=20),
        invalid_id=st.one_of(st.none(), st.integers(0, 7)),
        int32_ids=st.booleans(),
        signed_weights=biased_bool(percent_true=30),
        nan_padding=biased_bool(percent_true=10),
        zero_row=biased_bool(percent_true=10),
    )


def make_inputs(problem: Problem, choices: InputChoices) -> CallInputs:
    """Make valid inputs for at most `problem.tokens` tokens."""
    generator = torch.Generator().manual_seed(choices.seed)

    def draw_normal(
        *shape: int, std: float = 1.0, dtype: torch.dtype = problem.dtype
    ) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * std).to(dtype)

    tokens = problem.tokens if choices.tokens is None else choices.tokens % (problem.tokens + 1)
    weights = _make_weights(problem, choices, generator)
    shape = (tokens, problem.top_k)
    ids = torch.randint(0, problem.experts, shape, generator=generator)
    if choices.invalid_id is not None:
        allows_int64 = problem.ids_dtype is not torch.int32
        out_of_range = (-1, -1, -2, problem.experts, problem.experts + 9)
        invalid_ids = (-1, *out_of_range, *((2**31, -(2**40)) if allows_int64 else ()))
        invalid_id = invalid_ids[choices.invalid_id % len(invalid_ids)]
        ids[torch.rand(shape, generator=generator) < 0.4] = invalid_id
    ids = ids.to(problem.ids_dtype or _choose_ids_dtype(ids, choices))
    weights_TK = torch.rand(shape, generator=generator) + 0.1
    if choices.signed_weights:
        weights_TK = weights_TK * torch.randn(shape, generator=generator)
    x_TH = draw_normal(tokens, problem.hidden)
    if choices.nan_padding and not problem.inplace:
        x_TH = torch.cat([x_TH, torch.full_like(x_TH, torch.nan)], 1)[:, : problem.hidden]
    if choices.zero_row and tokens:
        x_TH[0] = 0
    return CallInputs(x_TH, weights, Routing(weights_TK, ids))


def _make_weights(
    problem: Problem, choices: InputChoices, generator: torch.Generator
) -> ExpertWeights:
    def draw_normal(*shape: int, std: float = 1.0, dtype: torch.dtype) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * std).to(dtype)

    e, h, i = problem.e, problem.hidden, problem.intermediate
    is_quantized, has_bias = problem.scheme.quantized, problem.bias
    stored_dtype = torch.float32 if is_quantized else problem.dtype
    weights = ExpertWeights(
        w1=draw_normal(e, problem.w1_rows, h, std=h**-0.5, dtype=stored_dtype),
        w2=draw_normal(e, h, i, std=i**-0.5, dtype=stored_dtype),
        b1=draw_normal(e, problem.w1_rows, dtype=torch.float32) if has_bias else None,
        b2=draw_normal(e, h, dtype=problem.dtype) if has_bias else None,
        expert_map=_make_expert_map(problem, generator) if problem.expert_map else None,
    )
    if problem.scheme.static:
        scale = static_scale(problem, 28.0)
        weights = replace(weights, a1_scale=scale, a2_scale=scale.clone())
    if is_quantized:
        # Integer weights have scales of the default dtype or, if top_k is odd, of float32.
        is_integer = problem.scheme.weight in IMPLICIT_ZERO_POINT
        scale_dtype = torch.float32 if is_integer and problem.top_k % 2 else None
        return quantize_weights(weights, problem, scale_dtype=scale_dtype)
    if choices.column_major:
        return replace(weights, w1=_to_column_major(weights.w1), w2=_to_column_major(weights.w2))
    return weights


def _choose_ids_dtype(ids: torch.Tensor, choices: InputChoices) -> torch.dtype:
    fits = not ids.numel() or int(ids.abs().max()) < 2**31
    return torch.int32 if fits and choices.int32_ids else torch.int64


def _to_column_major(w_eNK: torch.Tensor) -> torch.Tensor:
    return w_eNK.mT.contiguous().mT


def _make_expert_map(problem: Problem, generator: torch.Generator) -> torch.Tensor:
    local_ids = torch.randperm(problem.experts, generator=generator)[: problem.e]
    expert_map = torch.full((problem.experts,), -1, dtype=torch.int32)
    expert_map[local_ids] = torch.arange(problem.e, dtype=torch.int32)
    return expert_map


def format_problem(problem: Problem) -> str:
    """Format the fields of a problem that differ from their defaults."""
    defaults = Problem(1, 1, 1, 1, 1)
    changed = {k: v for k, v in vars(problem).items() if v != getattr(defaults, k)}
    formatted = {k: str(v) if isinstance(v, ActivationSpec) else v for k, v in changed.items()}
    return "Problem(" + ", ".join(f"{k}={v!r}" for k, v in formatted.items()) + ")"
