"""Random problems, most of them valid, and inputs for them."""

from dataclasses import dataclass, replace
from random import Random

import torch

from modular_kernel.machine import current_machine
from modular_kernel.quant.quantized_weights import quantize_weights, static_scale
from modular_kernel.spec.problem import ActivationSpec, Combine, Problem
from modular_kernel.tensors import ExpertWeights, Routing

# (prepare/finalize, torch experts, experts that need Triton)
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


def draw_parts(rng: Random) -> tuple[str, str]:
    """Return a PrepareAndFinalize and experts.

    They are almost always compatible with each other and with this machine.
    """
    prepare, torch_experts, triton_experts = rng.choice(_PARTS)
    if rng.random() < 0.05:
        _, torch_experts, triton_experts = rng.choice(_PARTS)
    is_interpreted = current_machine().interpreter
    return prepare, rng.choice(triton_experts) if rng.random() < (
        0.8 if is_interpreted else 0.05
    ) else torch_experts


def draw_problem(rng: Random) -> Problem:
    """Return a small problem. Some are inconsistent, which raises InputError."""
    experts = rng.choice((1, 2, 3, 4, 5, 8, 9))
    mapped = rng.random() < 0.15
    combine = rng.choice((*[Combine.SUM] * 6, Combine.TOPK_WEIGHTED, Combine.TOPK_UNWEIGHTED))
    return Problem(
        tokens=rng.choice((0, 1, 1, 2, 3, 4, 5, 8, 9)),
        hidden=rng.choice(_SIZES),
        intermediate=rng.choice(_SIZES),
        experts=experts,
        top_k=rng.choice((1, 1, 2, 2, 3, 5)),
        dtype=rng.choice((torch.float32, torch.float16, torch.bfloat16)),
        quant=rng.choice(_QUANTS) if rng.random() < 0.4 else "none",
        activation=rng.choice(_ACTIVATIONS) if rng.random() < 0.5 else "silu",
        local_experts=rng.randint(1, experts) if mapped else None,
        ids_dtype=rng.choice((None, None, torch.int32, torch.int64)),
        bias=rng.random() < 0.25,
        expert_map=mapped,
        apply_router_weight_on_input=combine is Combine.SUM and rng.random() < 0.15,
        routed_scaling_factor=rng.choice((1.0, 1.0, 2.5, -0.5)),
        combine=combine,
        inplace=rng.random() < 0.1,
        chunk_tokens=rng.choice((None, None, None, 1, 2, 4)),
    )


def generator_of(rng: Random) -> torch.Generator:
    """Return a tensor generator seeded from `rng`."""
    return torch.Generator().manual_seed(rng.getrandbits(60))


def draw_inputs(problem: Problem, rng: Random) -> CallInputs:
    """Draw valid inputs for at most `problem.tokens` tokens."""
    generator = generator_of(rng)

    def normal(*shape: int, std: float = 1.0, dtype: torch.dtype = problem.dtype) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * std).to(dtype)

    e, h, i = problem.e, problem.hidden, problem.intermediate
    is_quantized = problem.scheme.quantized
    stored_dtype = torch.float32 if is_quantized else problem.dtype
    weights = ExpertWeights(
        w1=normal(e, problem.w1_rows, h, std=h**-0.5, dtype=stored_dtype),
        w2=normal(e, h, i, std=i**-0.5, dtype=stored_dtype),
        b1=normal(e, problem.w1_rows, dtype=torch.float32) if problem.bias else None,
        b2=normal(e, h) if problem.bias else None,
        expert_map=_draw_expert_map(problem, rng) if problem.expert_map else None,
    )
    if problem.scheme.static:
        scale = static_scale(problem, 28.0)
        weights = replace(weights, a1_scale=scale, a2_scale=scale.clone())
    if is_quantized:
        weights = quantize_weights(weights, problem)
    elif rng.random() < 0.2:
        weights = replace(weights, w1=_to_column_major(weights.w1), w2=_to_column_major(weights.w2))
    tokens = rng.randint(0, problem.tokens) if rng.random() < 0.3 else problem.tokens
    shape = (tokens, problem.top_k)
    ids = torch.randint(0, problem.experts, shape, generator=generator)
    if rng.random() < 0.4:  # skipped ids, and invalid ones, also beyond 32 bits
        wide = problem.ids_dtype is not torch.int32
        outside = (-1, -1, -2, problem.experts, problem.experts + 9)
        kind = rng.choice((-1, *outside, *((2**31, -(2**40)) if wide else ())))
        ids[torch.rand(shape, generator=generator) < 0.4] = kind
    ids = ids.to(problem.ids_dtype or rng.choice(_id_dtypes(ids)))
    router = torch.rand(shape, generator=generator) + 0.1
    if rng.random() < 0.3:
        router = router * torch.randn(shape, generator=generator)
    x_TH = normal(tokens, h)
    if rng.random() < 0.1 and not problem.inplace:
        x_TH = torch.cat([x_TH, torch.full_like(x_TH, torch.nan)], 1)[:, :h]
    if rng.random() < 0.1 and tokens:
        x_TH[0] = 0
    return CallInputs(x_TH, weights, Routing(router, ids))


def _id_dtypes(ids: torch.Tensor) -> tuple[torch.dtype, ...]:
    fits = not ids.numel() or int(ids.abs().max()) < 2**31
    return (torch.int32, torch.int64) if fits else (torch.int64,)


def _to_column_major(w_eNK: torch.Tensor) -> torch.Tensor:
    return w_eNK.mT.contiguous().mT


def _draw_expert_map(problem: Problem, rng: Random) -> torch.Tensor:
    local_ids = rng.sample(range(problem.experts), problem.e)
    expert_map = torch.full((problem.experts,), -1, dtype=torch.int32)
    expert_map[torch.tensor(local_ids)] = torch.arange(problem.e, dtype=torch.int32)
    return expert_map


def describe(problem: Problem) -> str:
    """Format a problem with the fields that differ from their defaults."""
    defaults = Problem(1, 1, 1, 1, 1)
    changed = {k: v for k, v in vars(problem).items() if v != getattr(defaults, k)}
    formatted = {k: str(v) if isinstance(v, ActivationSpec) else v for k, v in changed.items()}
    return "Problem(" + ", ".join(f"{k}={v!r}" for k, v in formatted.items()) + ")"
