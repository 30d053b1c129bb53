"""Make the inputs of a case: seeded, scaled so that errors are visible, and fenced.

Scale: x, the gate and up values, and the output rows of every expert have a standard deviation of
about 1. An activation clamp near 1 then affects many values, and an error of one part in a thousand
is detected. Router weights are positive and very unequal, so that the effect of a wrong, missing or
doubled weight is much larger than rounding errors.

Fences: each tensor is a view of a longer tensor whose ends are filled with one of
`workspace.FILLS`.
An out-of-bounds read changes the output, and `fences_intact` detects an out-of-bounds write. The
calls of a case use different fills. Values come from a CPU generator, so they are the same on every
machine.
"""

import math
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch

from modular_kernel.errors import ConfigurationError
from modular_kernel.quant.quantized_weights import quantize_weights, static_scale
from modular_kernel.reference import activation
from modular_kernel.spec.problem import ActivationSpec, Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.cases.adapters import SLOT_PATTERNS, draw_slots, make_adapters
from modular_kernel.testing.cases.expert_maps import draw_expert_map, replace_skip_values
from modular_kernel.testing.cases.nan import (
    insert_nan_into_weights,
    insert_nan_into_x,
    list_nan_arguments,
    route_to_distinct_experts,
    split_names,
)
from modular_kernel.testing.cases.quantized import choose_short_scale_dtype
from modular_kernel.testing.cases.value_kinds import (
    TIED_SCALE,
    VALUES,
    apply_values_to_routing,
    apply_values_to_x,
)
from modular_kernel.workspace import FILLS, Fill, poison_tensor

ROUTING_KINDS = (
    "uniform",  # distinct experts, all with the same probability
    "all_to_one",  # every token is routed to the same K experts, which get T rows each
    "zipf",  # probability of expert r proportional to r ** -1.2
    "empty_experts",  # every second expert gets no token
    "duplicates",  # most tokens have an expert twice, some K times
    "skips",  # some ids are -1, including all ids of one token
    "all_skipped",  # all ids are -1
    "out_of_range",  # ids below -1 and from E upwards, to be skipped and counted
    "beyond_int32",  # out of range, but the low 32 bits are valid ids; int64 only
)
# Memory layouts of the tensors of a call.
LAYOUTS = (
    "plain",  # contiguous, and aligned like a separate allocation
    "transposed",  # weights are contiguous along N; x has gaps between rows
    # Gaps between the rows of weights and of x, and between the matrices of experts. Rows of
    # quantized weights start at multiples of 16 bytes, which vector loads need.
    "spaced",
    "shifted",  # contiguous, but one element past an aligned address
)

# Ranges covered by the static scales of x and of h. If their ratio were a power of two, float8
# would round equally with either scale, and swapped scales would go unnoticed.
_X_RANGE, _H_RANGE = 5.0, 37.0
_FENCE_BYTES = 256  # a multiple of the alignment of an allocation
_BIAS_STD = 0.5
# Router weights of pairs with an invalid id, used cyclically. Parts must ignore them.
_UNUSED_WEIGHTS = (math.nan, 7.0, math.inf, -math.inf)


@dataclass(frozen=True)
class InputVariation:
    """Properties of inputs that the problem does not determine.

    Raises ConfigurationError for unknown values.

    Attributes:
        layout: one of LAYOUTS.
        values: one of VALUES.
        has_short_scales: whether weight scales are stored in 16 bits, if the scheme allows it.
        slot_pattern: one of SLOT_PATTERNS.
        nan: names of the arguments that contain NaN, joined by "+" (see `cases.nan`). If it is not
            empty, no expert is used twice.
    """

    layout: str = "plain"
    values: str = "ordinary"
    has_short_scales: bool = False
    slot_pattern: str = "mixed"
    nan: str = ""

    def __post_init__(self) -> None:
        for option, got, allowed in (
            ("layout", self.layout, LAYOUTS),
            ("values", self.values, VALUES),
            ("slot_pattern", self.slot_pattern, SLOT_PATTERNS),
        ):
            if got not in allowed:
                raise ConfigurationError(option, got=got, need=f"one of {', '.join(allowed)}")


ORDINARY = InputVariation()


@dataclass(frozen=True)
class Inputs:
    """The arguments of one call."""

    x_TH: torch.Tensor
    weights: ExpertWeights
    routing: Routing

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor by name, including all fields of the weights."""
        r = self.routing
        tensors = {
            "x": self.x_TH,
            **vars(self.weights),
            "topk_weights": r.topk_weights_TK,
            "topk_ids": r.topk_ids_TK,
            "adapters": r.slots_T,
        }
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def make_inputs(
    problem: Problem,
    routing_kind: str,
    device: torch.device,
    *,
    seed: int = 0,
    strided: bool = False,
    variation: InputVariation = ORDINARY,
) -> Inputs:
    """Make inputs for `problem.tokens` tokens; equal arguments give equal bits on every machine.

    routing_kind: one of ROUTING_KINDS.
    strided: if True, use transposed weights, gaps between the rows of x (unless inplace), int64
        ids, biases with swapped dtypes (b1 in the problem's dtype, b2 in float32), and values other
        than -1 for remote experts in the expert map, as far as the problem allows. If False,
        tensors are contiguous and ids int32, unless `variation` specifies something else.
    """
    generator = torch.Generator().manual_seed(seed)
    fence = FencedCopier(device, int(variation.layout == "shifted"), choose_fill(seed))
    expert_map = draw_expert_map(problem, generator)
    drawn_routing = apply_values_to_routing(
        _draw_routing(problem, routing_kind, expert_map, generator),
        problem,
        expert_map,
        variation.values,
    )
    use_int64 = strided or routing_kind == "beyond_int32"
    ids_dtype = problem.ids_dtype or (torch.int64 if use_int64 else torch.int32)
    x_TH = torch.randn(problem.tokens, problem.hidden, generator=generator)
    x_TH = apply_values_to_x(x_TH, problem, variation.values).to(problem.dtype)
    if variation.nan:
        _check_nan(problem, variation.nan)
        drawn_routing = route_to_distinct_experts(drawn_routing, problem, variation.nan)
        x_TH = insert_nan_into_x(x_TH, problem, variation.nan)
    has_gaps = strided or variation.layout in ("transposed", "spaced")
    weights = _make_weights(
        problem, expert_map, generator, fence, strided=strided, variation=variation
    )
    if strided and expert_map is not None:
        weights = replace(weights, expert_map=fence(replace_skip_values(expert_map, problem.e)))
    slots_T = draw_slots(problem, variation.slot_pattern, generator)
    matrices = make_adapters(
        problem, slots_T, generator, with_gaps=strided or variation.layout == "spaced"
    )
    inputs = Inputs(
        copy_with_gaps(x_TH, fence) if has_gaps and not problem.inplace else fence(x_TH),
        replace(weights, **{name: _copy_storage(t, fence) for name, t in matrices.items()}),
        Routing(
            fence(drawn_routing.topk_weights_TK),
            fence(drawn_routing.topk_ids_TK.to(ids_dtype)),
            fence(slots_T) if isinstance(slots_T, torch.Tensor) else slots_T,
        ),
    )
    insert_nan_into_weights(inputs.weights, inputs.routing, problem, variation.nan)
    return inputs


def _check_nan(problem: Problem, nan_arguments: str) -> None:
    allowed = list_nan_arguments(problem)
    for name in split_names(nan_arguments):
        if name not in allowed:
            raise ConfigurationError("nan", got=name, need=f"some of {', '.join(allowed)}")


def count_invalid_ids(routing: Routing, problem: Problem) -> int:
    """Return the number of ids outside [-1, E)."""
    ids = routing.topk_ids_TK
    return int(((ids < -1) | (ids >= problem.experts)).sum())


@cache
def routes_any_pair(problem: Problem, routing_kind: str, seed: int) -> bool:
    """Return whether `make_inputs` with these arguments routes any pair to a local expert."""
    generator = torch.Generator().manual_seed(seed)
    expert_map = draw_expert_map(problem, generator)
    ids_TK = _draw_routing(problem, routing_kind, expert_map, generator).topk_ids_TK
    valid_ids = ids_TK[(ids_TK >= 0) & (ids_TK < problem.experts)]
    return bool((valid_ids >= 0 if expert_map is None else expert_map[valid_ids] >= 0).any())


def choose_fill(seed: int) -> Fill:
    """Choose the fill around the tensors of a call, which differs between the calls of a case."""
    return FILLS[(seed % 1000 + seed // 1000 + 1) % len(FILLS)]


@dataclass(frozen=True)
class FencedCopier:
    """A callable that copies a tensor into fenced memory on `device`.

    shift, fill: as in `fenced`.
    """

    device: torch.device
    shift: int = 0
    fill: Fill = FILLS[0]

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return fenced(values.to(self.device), self.shift, self.fill)


def fenced(values: torch.Tensor, shift: int = 0, fill: Fill = FILLS[0]) -> torch.Tensor:
    """Return a contiguous copy in memory with `fill` on both sides.

    shift: number of elements between an aligned address and the start of the copy.
    """
    pad = _FENCE_BYTES // values.element_size()
    num_padded = -(-values.numel() // pad) * pad
    arena = torch.empty(pad + num_padded + pad + shift, dtype=values.dtype, device=values.device)
    poison_tensor(arena, fill)
    view = arena[pad + shift : pad + shift + values.numel()].view(values.shape)
    view.copy_(values)
    return view


def fences_intact(tensor: torch.Tensor) -> bool:
    """Return whether the fences of a tensor, made by `fenced` with FILLS[0], are intact."""
    storage = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    arena = storage.set_(tensor.untyped_storage())
    pad = _FENCE_BYTES // tensor.element_size()
    ends = torch.cat([arena[:pad], arena[pad + tensor.numel() :]])
    expected = torch.full_like(ends, FILLS[0].value(tensor.dtype))
    return torch.equal(ends.view(torch.uint8), expected.view(torch.uint8))


def _copy_storage(values: torch.Tensor, fence: FencedCopier) -> torch.Tensor:
    """Copy the whole storage into fenced memory; return a view equal to `values`."""
    if values.is_contiguous():
        return fence(values)
    storage = values.new_empty(0).set_(values.untyped_storage())
    return fence(storage).as_strided(values.shape, values.stride())


def copy_with_gaps(x_TH: torch.Tensor, fence: FencedCopier) -> torch.Tensor:
    """Copy x into fenced memory, with gaps between rows that are filled like the fences."""
    gap = x_TH.new_full((x_TH.shape[0], 16), fence.fill.real)
    return fence(torch.cat([x_TH, gap], dim=1))[:, : x_TH.shape[1]]


def _make_weights(
    problem: Problem,
    expert_map: torch.Tensor | None,
    generator: torch.Generator,
    fence: FencedCopier,
    *,
    strided: bool,
    variation: InputVariation,
) -> ExpertWeights:
    """Make weights in the problem's quantization scheme.

    Unquantized weights are transposed if `strided`. Quantized weights always use
    `variation.layout`.
    """
    if not problem.scheme.quantized:
        layout = "transposed" if strided else variation.layout
        return _make_unquantized_weights(
            problem, expert_map, generator, fence, strided=strided, layout=layout
        )
    unquantized = replace(problem, quant="none", dtype=torch.float32)
    cpu_fence = FencedCopier(torch.device("cpu"))
    weights = _make_unquantized_weights(
        unquantized, expert_map, generator, cpu_fence, strided=False, layout="plain"
    )
    uneven = {name: _make_uneven(getattr(weights, name), generator) for name in ("w1", "w2")}
    scales = {}
    if problem.scheme.static:
        ranges = {"a1_scale": _X_RANGE, "a2_scale": _H_RANGE}
        scales = {name: static_scale(problem, max_value) for name, max_value in ranges.items()}
        if variation.values == "ties":
            scales["a1_scale"] = _make_tied_scale(problem, scales["a1_scale"])
    biases = {name: getattr(weights, name) for name in ("b1", "b2")}
    if strided:
        biases = {n: b if b is None else b.to(problem.dtype) for n, b in biases.items()}
    quantized = quantize_weights(
        replace(weights, **uneven, **scales, **biases),
        problem,
        scale_dtype=choose_short_scale_dtype(problem)
        if variation.has_short_scales
        else torch.float32,
    )
    tensors = {f.name: getattr(quantized, f.name) for f in fields(quantized)}
    copies: dict[str, Any] = {n: t if t is None else fence(t) for n, t in tensors.items()}
    for name in ("w1", "w2"):
        copies[name] = _copy_with_layout(tensors[name], variation.layout, fence)
    return ExpertWeights(**copies)


def _make_tied_scale(problem: Problem, static_scale_e: torch.Tensor) -> torch.Tensor:
    """Return the power-of-two static scale of x for which the values of "ties" are midpoints."""
    tied_scale = TIED_SCALE[problem.scheme.activation]
    if problem.scheme.scales_by_expert:
        # These are global scales, which apply in addition to the computed scales of groups.
        experts = len(static_scale_e)
        return static_scale_e.new_tensor([2.0**-8, 2.0**-9]).repeat(experts)[:experts]
    return torch.full_like(static_scale_e, tied_scale)


def _copy_with_layout(w_eNK: torch.Tensor, layout: str, fence: FencedCopier) -> torch.Tensor:
    if layout == "transposed":
        return fence(w_eNK.mT).mT
    if layout != "spaced":
        return fence(w_eNK)
    e, rows, depth = w_eNK.shape
    spaced = torch.empty(e, rows + 1, 16 * (-(-depth // 16) + 1), dtype=w_eNK.dtype)
    poison_tensor(spaced, fence.fill)
    spaced[:, :rows, :depth] = w_eNK
    return fence(spaced)[:, :rows, :depth]


def _make_uneven(w_eNK: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Scale experts, rows and blocks of 32 columns unequally, so that a wrong scale is detected."""
    e, rows, depth = w_eNK.shape

    def factors(*shape: int) -> torch.Tensor:
        return torch.exp2(torch.randint(0, 3, shape, generator=generator) - 1.0)

    column_factors = factors(e, 1, -(-depth // 32)).repeat_interleave(32, 2)[..., :depth]
    uneven = w_eNK * factors(e, 1, 1) * factors(e, rows, 1) * column_factors
    normalized: torch.Tensor = uneven * (w_eNK.norm() / uneven.norm())
    return normalized


def _make_unquantized_weights(
    problem: Problem,
    expert_map: torch.Tensor | None,
    generator: torch.Generator,
    fence: FencedCopier,
    *,
    strided: bool,
    layout: str,
) -> ExpertWeights:
    """Make weights for which the output of each GEMM has a standard deviation of about 1."""

    def normal(*shape: int, std: float, dtype: torch.dtype) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * std).to(dtype)

    def matrices(*shape: int, std: float) -> torch.Tensor:
        return _copy_with_layout(normal(*shape, std=std, dtype=problem.dtype), layout, fence)

    e, h, i, dtype = problem.e, problem.hidden, problem.intermediate, problem.dtype
    w1 = matrices(e, problem.w1_rows, h, std=h**-0.5)
    w2 = matrices(e, h, i, std=i**-0.5 / _compute_activation_rms(problem.act))
    fenced_map = None if expert_map is None else fence(expert_map)
    if not problem.bias:
        return ExpertWeights(w1, w2, expert_map=fenced_map)
    b1_dtype, b2_dtype = (dtype, torch.float32) if strided else (torch.float32, dtype)
    b1 = fence(normal(e, problem.w1_rows, std=_BIAS_STD, dtype=b1_dtype))
    b2 = fence(normal(e, h, std=_BIAS_STD, dtype=b2_dtype))
    return ExpertWeights(w1, w2, b1, b2, fenced_map)


@cache
def _compute_activation_rms(spec: ActivationSpec) -> float:
    """Return the activation's RMS for independent standard normal gate and up values."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(20000, 2, dtype=torch.float64, generator=generator)
    return float(activation(values, spec).square().mean().sqrt())


def _draw_routing(
    problem: Problem, routing_kind: str, expert_map: torch.Tensor | None, generator: torch.Generator
) -> Routing:
    tokens, top_k = problem.tokens, problem.top_k
    # K + 1 logits, so that the weights of a row are unequal and do not sum to 1, even for K = 1.
    logits = 1.5 * torch.randn(tokens, top_k + 1, generator=generator)
    if problem.apply_router_weight_on_input:  # weights near 1 preserve the scale of x
        weights_TK = (logits[:, :top_k] / 4).exp()
    else:
        weights_TK = logits.softmax(-1)[:, :top_k]
    ids_TK = _draw_ids(problem, routing_kind, expert_map, generator)
    is_unused = (ids_TK < 0) | (ids_TK >= problem.experts)
    unused_weights = torch.tensor(_UNUSED_WEIGHTS)
    # The first weight depends on T, so that cases with one unused pair use different weights.
    offsets = torch.arange(int(is_unused.sum())) + tokens
    weights_TK[is_unused] = unused_weights[offsets % len(unused_weights)]
    return Routing(weights_TK, ids_TK)


def _draw_ids(
    problem: Problem, routing_kind: str, expert_map: torch.Tensor | None, generator: torch.Generator
) -> torch.Tensor:
    if routing_kind not in ROUTING_KINDS:
        raise ConfigurationError(
            "routing", got=routing_kind, need=f"one of {', '.join(ROUTING_KINDS)}"
        )
    if routing_kind == "beyond_int32" and problem.ids_dtype is torch.int32:
        raise ConfigurationError("routing", got=routing_kind, need="int64 ids")
    tokens, top_k, experts = problem.tokens, problem.top_k, problem.experts
    if routing_kind == "all_skipped":
        return torch.full((tokens, top_k), -1)
    if routing_kind == "all_to_one":
        first_expert = experts // 2 if expert_map is None else int((expert_map == 0).nonzero()[0])
        return ((first_expert + torch.arange(top_k)) % experts).repeat(tokens, 1)
    probabilities = torch.ones(experts)
    if routing_kind == "zipf":
        probabilities = torch.arange(1, experts + 1).float() ** -1.2
    if routing_kind == "empty_experts" and experts > 1:
        probabilities[1::2] = 0
    ids_TK = _draw_distinct_ids(probabilities, tokens, top_k, generator)
    if routing_kind == "duplicates":
        ids_TK[0::3, -1] = ids_TK[0::3, 0]
        ids_TK[1::3] = ids_TK[1::3, :1]
    elif routing_kind == "skips":
        _overwrite_random_ids(ids_TK, (-1,), generator)
        ids_TK[tokens // 2 :][: int(tokens > 1)] = -1
    else:
        _overwrite_random_ids(ids_TK, _list_invalid_ids(routing_kind, experts), generator)
    return ids_TK


def _list_invalid_ids(routing_kind: str, experts: int) -> tuple[int, ...]:
    """Return the invalid ids that a kind of routing contains."""
    if routing_kind == "out_of_range":
        return experts, -2, -1, 2**31 - 1, experts + 7, -5, -(2**31)
    if routing_kind == "beyond_int32":
        low_bits = experts // 2  # the low 32 bits of most ids
        return 2**32 + low_bits, -(2**32) + low_bits, 2**31, 2**40 + low_bits, -(2**63), 2**63 - 1
    return ()


def _draw_distinct_ids(
    probabilities: torch.Tensor, tokens: int, top_k: int, generator: torch.Generator
) -> torch.Tensor:
    """Draw (T, K) ids with the given probabilities of experts, (E,).

    The ids of a token are distinct, unless fewer than K experts have a nonzero probability.
    """
    if tokens == 0:
        return torch.empty(0, top_k, dtype=torch.int64)
    num_distinct = min(top_k, int((probabilities > 0).sum()))
    probabilities_TE = probabilities.expand(tokens, -1)
    ids = torch.multinomial(probabilities_TE, num_distinct, generator=generator)
    if num_distinct == top_k:
        return ids
    repeated = torch.multinomial(
        probabilities_TE, top_k - num_distinct, replacement=True, generator=generator
    )
    return torch.cat([ids, repeated], dim=1)


def _overwrite_random_ids(
    ids_TK: torch.Tensor, values: tuple[int, ...], generator: torch.Generator
) -> None:
    if ids_TK.numel() == 0 or not values:
        return
    mask = torch.rand(ids_TK.shape, generator=generator) < 0.3
    mask[-1, -1] = True
    count = int(mask.sum())
    ids_TK[mask] = torch.tensor(values).repeat(-(-count // len(values)))[:count]
