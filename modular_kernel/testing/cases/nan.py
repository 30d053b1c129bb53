"""Cases with NaN in the arguments of a call: which arguments can hold one, and at what position.

A NaN must reach every output value computed from it, and no other. The values computed from it are
those that `reference.recipe` makes NaN.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from modular_kernel.spec.problem import ActivationSpec, Combine, Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.cases.quantized import all_schemes
from modular_kernel.validate import ADAPTER_TENSORS

X, ROUTER = "x", "topk_weights"
_E8M0_NAN = 255
_MATRICES = ("w1", "w2", "b1", "b2")


def split_names(nan: str) -> tuple[str, ...]:
    """Return the argument names in `InputVariation.nan`."""
    return tuple(filter(None, nan.split("+")))


def nan_arguments(problem: Problem) -> tuple[str, ...]:
    """Return the arguments of a call that can hold a NaN, by the names of `Inputs`.

    Besides x and the router weights these are fields of ExpertWeights. E8M0 has a NaN, integers
    have none.
    """
    scheme = problem.scheme
    names = [X, ROUTER]
    if scheme.weight in ("none", "float8_e4m3fn"):
        names += ["w1", "w2"]
    if problem.bias:
        names += ["b1", "b2"]
    if scheme.quantized:
        names += ["w1_scale", "w2_scale"]
    if scheme.matrix_scales:
        names += ["w1_global_scale", "w2_global_scale"]
    if scheme.static:
        names += ["a1_scale", "a2_scale"]
    if problem.adapters is not None:
        names += ADAPTER_TENSORS
    return tuple(names)


def reaches_other_pairs(name: str, problem: Problem) -> bool:
    """Return whether a NaN of one pair's operand reaches pairs that do not read that operand.

    It does so through a shared scale: a static one of all activations, or one computed from the
    activations of the whole call.
    """
    scheme = problem.scheme
    if scheme.activation_granularity != "tensor":
        return False
    if scheme.static:
        return name in ("a1_scale", "a2_scale")
    before_gemm2 = name.startswith(("w1", "b1", "lora_a13", "lora_b13")) or name == X
    return before_gemm2 or (name == ROUTER and problem.apply_router_weight_on_input)


def nan_groups(problem: Problem) -> tuple[str, ...]:
    """Return values of `InputVariation.nan` that together cover each of `nan_arguments` once.

    Arguments whose NaN stays within its pair share one call; each of the others gets a separate
    call.
    """
    names = nan_arguments(problem)
    contained = tuple(name for name in names if not reaches_other_pairs(name, problem))
    return tuple(filter(None, ("+".join(contained), *(n for n in names if n not in contained))))


def pairs_needed(nan: str) -> int:
    """Return the number of (token, expert) pairs a call needs: one per name, one without NaN."""
    return len(split_names(nan)) + 1


def route_to_distinct_experts(routing: Routing, problem: Problem, nan: str) -> Routing:
    """Return a routing in which no expert occurs twice, as far as there are enough experts.

    The last token (with two tokens or fewer: its last pair) is skipped, with NaN router weights. If
    `nan` names the router weights, that of one more pair is NaN.
    """
    tokens, top_k = problem.tokens, problem.top_k
    order = torch.randperm(problem.experts, generator=torch.Generator().manual_seed(0))
    pair = torch.arange(tokens * top_k)
    ids_TK = order[pair % problem.experts].view(tokens, top_k)
    skipped = torch.zeros(tokens, top_k, dtype=torch.bool)
    if tokens > 2:
        skipped[-1] = True
    elif tokens and top_k > 1:
        skipped[-1, -1] = True
    weights_TK = routing.topk_weights_TK.masked_fill(skipped, torch.nan)
    if ROUTER in split_names(nan):
        weights_TK.view(-1)[_pair_of(ROUTER, problem, nan)] = torch.nan
    ids_TK = ids_TK.masked_fill(skipped, -1)
    return replace(routing, topk_weights_TK=weights_TK, topk_ids_TK=ids_TK)


def x_with_nan(x_TH: torch.Tensor, problem: Problem, nan: str) -> torch.Tensor:
    """Return x with a NaN in the first token, if `nan` names x, and in the skipped token.

    The skipped token gets none if one scale is computed from all tokens, which would become NaN.
    """
    x_TH, tokens, column = x_TH.clone(), len(x_TH), x_TH.shape[1] // 3
    if tokens and X in split_names(nan):
        x_TH[0, column] = torch.nan
    has_computed_scale = (
        problem.scheme.activation_granularity == "tensor" and not problem.scheme.static
    )
    if tokens > 2 and not has_computed_scale:
        x_TH[-1, column] = torch.nan
    return x_TH


def insert_nan(weights: ExpertWeights, routing: Routing, problem: Problem, nan: str) -> None:
    """Put a NaN into each field of `weights` that `nan` names, for the expert of `_pair_of`."""
    ids, slots_T = routing.topk_ids_TK.flatten(), routing.slots_T
    for name in split_names(nan):
        if name in (X, ROUTER) or not len(ids):
            continue
        pair, tensor = _pair_of(name, problem, nan), getattr(weights, name)
        if name in ADAPTER_TENSORS:
            if slots_T is None:
                continue
            tokens_with_adapter = (slots_T[:-1] >= 0).nonzero().flatten()
            if not len(tokens_with_adapter):
                continue
            token = int(tokens_with_adapter[pair % len(tokens_with_adapter)])
            expert = int(ids[token * problem.top_k].clamp(min=0))
            slot = int(slots_T[token])
            _set_nan(tensor[slot, min(expert, tensor.shape[1] - 1)])
            continue
        expert = int(ids[pair].clamp(min=0))
        if len(tensor) == problem.e:
            _set_nan(tensor[expert : expert + 1])
        else:
            _set_nan(tensor)


def _pair_of(name: str, problem: Problem, nan: str) -> int:
    """Return the index t * K + k of the pair reserved for a name; token 0 is reserved for x."""
    names = [n for n in split_names(nan) if n != X]
    first = problem.top_k if X in split_names(nan) and problem.tokens > 1 else 0
    return (first + names.index(name)) % max(1, problem.tokens * problem.top_k)


def _set_nan(tensor: torch.Tensor) -> None:
    """Set one value to NaN: last in the last dimension, two thirds along the others."""
    index = (*(size * 2 // 3 for size in tensor.shape[:-1]), -1)
    if tensor.dtype is torch.uint8:
        tensor[index] = _E8M0_NAN
    elif tensor.dtype.itemsize == 1:
        tensor.view(torch.uint8)[index] = 0x7F
    else:
        tensor[index] = torch.nan


# ------------------------------------------------------------------------------------- the cases

_BF16 = torch.bfloat16
_BASE = Problem(tokens=1, hidden=64, intermediate=64, experts=1, top_k=1, dtype=_BF16, bias=True)
_CLAMPED = ActivationSpec.parse("swiglu_oai:alpha=1.702,limit=1.0")

NanProblem = tuple[Problem, str]  # problem, `InputVariation.nan`


def nan_problems() -> Iterator[NanProblem]:
    """Yield every scheme with a NaN in each of its arguments, with many tokens and with few."""
    for quant in ("none", *all_schemes()):
        problem = replace(_BASE, quant=quant)
        for nan in nan_groups(problem):
            yield one_token_per_name(problem, nan)
        yield one_token(problem)
        if problem.scheme.dispatched_quantized:
            yield two_tokens(problem)
    for activation in (_CLAMPED, ActivationSpec.parse("relu2")):
        problem = replace(_BASE, activation=activation)
        yield one_token_per_name(problem, *nan_groups(problem))
    on_input = replace(_BASE, apply_router_weight_on_input=True, bias=False)
    for quant in ("none", "fp8_w8a8_tensor", "int8_w8a8_channel"):
        yield one_token_per_name(replace(on_input, quant=quant), ROUTER)
    for quant in ("none", "fp8_w8a8_channel"):
        problem = replace(_BASE, quant=quant, bias=False, lora="adapters=2,rank=16")
        yield one_token_per_name(problem, "+".join(ADAPTER_TENSORS))


def one_token_per_name(problem: Problem, nan: str) -> NanProblem:
    """Return a problem with one expert per token and one token per name."""
    tokens = pairs_needed(nan) + 1
    return replace(problem, tokens=tokens, experts=tokens), nan


def one_token(problem: Problem) -> NanProblem:
    """Return a problem with one token whose top-k rows are kept, so that each name has a row."""
    nan = "+".join(
        n for n in nan_arguments(problem) if n != X and not reaches_other_pairs(n, problem)
    )
    top_k = pairs_needed(nan) + 1
    unreduced = replace(problem, combine=Combine.TOPK_WEIGHTED, tokens=1, top_k=top_k)
    return replace(unreduced, experts=top_k), nan


def two_tokens(problem: Problem) -> NanProblem:
    """Return a problem with two tokens, one with a NaN in x.

    It has so many experts that parts process the tokens one by one.
    """
    return replace(problem, tokens=2, experts=17), X
