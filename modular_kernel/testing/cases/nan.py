"""Cases with NaN in the arguments of a call: which arguments can hold NaN, and at which positions.

A NaN must reach every output value that is computed from it, and no other. The output of
`reference.rounded_reference` is NaN at exactly these values.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from modular_kernel.spec.problem import ActivationSpec, Combine, Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.cases.quantized import list_schemes
from modular_kernel.validate import ADAPTER_TENSORS

X_NAME, ROUTER_NAME = "x", "topk_weights"
_E8M0_NAN = 255


def split_names(nan_names: str) -> tuple[str, ...]:
    """Return the argument names in `nan_names`, the value of an `InputVariation.nan`."""
    return tuple(filter(None, nan_names.split("+")))


def list_nan_arguments(problem: Problem) -> tuple[str, ...]:
    """Return the names, as in `Inputs.tensors`, of the arguments of a call that can hold NaN.

    Integers cannot hold NaN. E8M0 scales can.
    """
    scheme = problem.scheme
    names = [X_NAME, ROUTER_NAME]
    if scheme.weight in ("none", "float8_e4m3fn"):
        names += ["w1", "w2"]
    if problem.bias:
        names += ["b1", "b2"]
    if scheme.quantized:
        names += ["w1_scale", "w2_scale"]
    if scheme.matrix_scales:  # each matrix also has a float32 scale
        names += ["w1_global_scale", "w2_global_scale"]
    if scheme.static:
        names += ["a1_scale", "a2_scale"]
    if problem.adapters is not None:
        names += ADAPTER_TENSORS
    return tuple(names)


def reaches_other_pairs(name: str, problem: Problem) -> bool:
    """Return whether NaN in the argument `name` also reaches pairs that do not read the NaN value.

    NaN reaches them through a scale that all pairs share: a static scale of all activations, or a
    scale computed from the activations of the whole call.
    """
    scheme = problem.scheme
    if scheme.activation_granularity != "tensor":
        return False
    if scheme.static:
        return name in ("a1_scale", "a2_scale")
    is_used_before_gemm2 = name.startswith(("w1", "b1", "lora_a13", "lora_b13")) or name == X_NAME
    return is_used_before_gemm2 or (name == ROUTER_NAME and problem.apply_router_weight_on_input)


def group_nan_arguments(problem: Problem) -> tuple[str, ...]:
    """Return values of `InputVariation.nan` for several calls that together cover all arguments.

    An argument whose NaN reaches other pairs gets its own call. All other arguments share one call.
    """
    names = list_nan_arguments(problem)
    contained_names = tuple(name for name in names if not reaches_other_pairs(name, problem))
    return tuple(
        filter(None, ("+".join(contained_names), *(n for n in names if n not in contained_names)))
    )


def count_pairs_needed(nan_names: str) -> int:
    """Return the number of (token, expert) pairs that a call needs.

    Each argument in `nan_names` (see `InputVariation.nan`) needs a pair. One more pair has no NaN.
    """
    return len(split_names(nan_names)) + 1


def route_to_distinct_experts(routing: Routing, problem: Problem, nan_names: str) -> Routing:
    """Return a routing in which every pair has a different expert, if there are enough experts.

    All pairs of the last token are skipped, and their router weights are NaN. If there are at most
    two tokens, only the last pair of the last token is skipped. If `nan_names` includes the router
    weights, the router weight of one more pair is NaN.
    """
    tokens, top_k = problem.tokens, problem.top_k
    shuffled_experts = torch.randperm(problem.experts, generator=torch.Generator().manual_seed(0))
    pair = torch.arange(tokens * top_k)
    ids_TK = shuffled_experts[pair % problem.experts].view(tokens, top_k)
    is_skipped = torch.zeros(tokens, top_k, dtype=torch.bool)
    if tokens > 2:
        is_skipped[-1] = True
    elif tokens and top_k > 1:
        is_skipped[-1, -1] = True
    weights_TK = routing.topk_weights_TK.masked_fill(is_skipped, torch.nan)
    if ROUTER_NAME in split_names(nan_names):
        weights_TK.view(-1)[_find_pair(ROUTER_NAME, problem, nan_names)] = torch.nan
    ids_TK = ids_TK.masked_fill(is_skipped, -1)
    return replace(routing, topk_weights_TK=weights_TK, topk_ids_TK=ids_TK)


def insert_nan_into_x(x_TH: torch.Tensor, problem: Problem, nan_names: str) -> torch.Tensor:
    """Return x with NaN in the skipped token, and in the first token if `nan_names` includes x.

    If one scale is computed from all tokens, there is no NaN in the skipped token, because the
    scale would become NaN.
    """
    x_TH, tokens, column = x_TH.clone(), len(x_TH), x_TH.shape[1] // 3
    if tokens and X_NAME in split_names(nan_names):
        x_TH[0, column] = torch.nan
    has_dynamic_scale = (
        problem.scheme.activation_granularity == "tensor" and not problem.scheme.static
    )
    if tokens > 2 and not has_dynamic_scale:
        x_TH[-1, column] = torch.nan
    return x_TH


def insert_nan_into_weights(
    weights: ExpertWeights, routing: Routing, problem: Problem, nan_names: str
) -> None:
    """Put a NaN into each field of `weights` in `nan_names`, in the values for one expert.

    The expert is the one to which `_find_pair`'s pair is routed.
    """
    ids, slots_T = routing.topk_ids_TK.flatten(), routing.slots_T
    for name in split_names(nan_names):
        if name in (X_NAME, ROUTER_NAME) or not len(ids):
            continue
        pair, tensor = _find_pair(name, problem, nan_names), getattr(weights, name)
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


def _find_pair(name: str, problem: Problem, nan_names: str) -> int:
    """Return the index t * K + k of the pair that reads the NaN in the argument `name`.

    Token 0 is reserved for NaN in x.
    """
    names = [n for n in split_names(nan_names) if n != X_NAME]
    first_pair = problem.top_k if X_NAME in split_names(nan_names) and problem.tokens > 1 else 0
    return (first_pair + names.index(name)) % max(1, problem.tokens * problem.top_k)


def _set_nan(tensor: torch.Tensor) -> None:
    """Set one value to NaN: the last value of a row, at about 2/3 of the other dimensions."""
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

NanProblem = tuple[Problem, str]  # a problem, and the value of `InputVariation.nan`


def list_nan_problems() -> Iterator[NanProblem]:
    """Yield problems with every scheme and with NaN in every argument, for many and few tokens."""
    for quant in ("none", *list_schemes()):
        problem = replace(_BASE, quant=quant)
        for nan_names in group_nan_arguments(problem):
            yield make_problem_with_token_per_name(problem, nan_names)
        yield make_one_token_problem(problem)
        if problem.scheme.dispatched_quantized:
            yield make_two_token_problem(problem)
        if problem.scheme.packed:  # with float32, parts use kernels without packed words
            float32_problem = replace(problem, dtype=torch.float32)
            yield make_problem_with_token_per_name(float32_problem, group_nan_arguments(problem)[0])
    for activation in (_CLAMPED, ActivationSpec.parse("relu2")):
        problem = replace(_BASE, activation=activation)
        yield make_problem_with_token_per_name(problem, *group_nan_arguments(problem))
    on_input = replace(_BASE, apply_router_weight_on_input=True, bias=False)
    for quant in ("none", "fp8_w8a8_tensor", "int8_w8a8_channel"):
        yield make_problem_with_token_per_name(replace(on_input, quant=quant), ROUTER_NAME)
    for quant in ("none", "fp8_w8a8_channel"):
        problem = replace(_BASE, quant=quant, bias=False, lora="adapters=2,rank=16")
        yield make_problem_with_token_per_name(problem, "+".join(ADAPTER_TENSORS))


def make_problem_with_token_per_name(problem: Problem, nan_names: str) -> NanProblem:
    """Make a problem with a token for each argument with NaN, one without NaN, and a skipped one.

    There are as many experts as tokens.
    """
    tokens = count_pairs_needed(nan_names) + 1
    return replace(problem, tokens=tokens, experts=tokens), nan_names


def make_one_token_problem(problem: Problem) -> NanProblem:
    """Make a problem with one token, and NaN in every argument whose NaN stays within its pair.

    The output is not summed over top-k, so that each argument affects a separate row.
    """
    nan_names = "+".join(
        n
        for n in list_nan_arguments(problem)
        if n != X_NAME and not reaches_other_pairs(n, problem)
    )
    top_k = count_pairs_needed(nan_names) + 1
    unreduced = replace(problem, combine=Combine.TOPK_WEIGHTED, tokens=1, top_k=top_k)
    return replace(unreduced, experts=top_k), nan_names


def make_two_token_problem(problem: Problem) -> NanProblem:
    """Make a problem with two tokens, the first of which has NaN in x.

    With 17 experts, parts choose kernels that process each token separately.
    """
    return replace(problem, tokens=2, experts=17), X_NAME
