"""Reference implementation of the layer in plain torch; shares no code with any part.

- `oracle` computes in float64 from the dequantized weights.
- `recipe` rounds as plain torch does in the problem's dtype, and quantizes activations if the
  scheme does. Its distance from the oracle bounds the error of a correct part.
- `bitwise_reference` rounds exactly where a part declares that it rounds, so the two differ only by
  the order of float32 sums.

All three run the same loop over experts, `_moe`, each with its own arithmetic.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from modular_kernel.reference.adapters import Adapters
from modular_kernel.reference.nvfp4 import nvfp4_round_trip
from modular_kernel.reference.weights import matrix
from modular_kernel.spec.problem import ActivationSpec, Combine, Problem
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.spec.rounding import Roundings
from modular_kernel.tensors import ExpertWeights, Routing

Rounding = Callable[[torch.Tensor], torch.Tensor]
# (rows (R, K), local expert of each row, (R,) int64, -1 for none) -> quantized rows (R, K)
QuantizeRows = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# Lower bound of scales computed from activations, so that a row of zeros has a valid one.
_MIN_SCALE = 2.0**-33


@dataclass(frozen=True)
class _Arithmetic:
    """Arithmetic of one reference: dtypes and roundings.

    dtype: of every sum.
    round_to_dtype: rounds to the problem's dtype.
    weight: rounds a dequantized weight.
    operand: rounds an operand of a GEMM as tensor cores do.
    x, h: quantize activations as GEMM 1 and GEMM 2 read them.
    gate_up, rows: round the results of GEMM 1 and of GEMM 2.
    weighted: rounds x times router weights.
    product: maps rows (R, K) and a matrix (N, K) to (R, N).
    """

    dtype: torch.dtype
    round_to_dtype: Rounding
    weight: Rounding
    operand: Rounding
    x: QuantizeRows
    h: QuantizeRows
    gate_up: Rounding
    rows: Rounding
    weighted: Rounding
    product: Product


_ROUNDINGS = ("round_to_dtype", "weight", "operand", "gate_up", "rows", "weighted")


def oracle(
    x_TH: torch.Tensor, weights: ExpertWeights, routing: Routing, problem: Problem
) -> torch.Tensor:
    """Return the exact output, (T, H) or (T, K, H), float64.

    Pairs are skipped if their id is outside [0, E) or of an expert on another rank. Their router
    weights are not read.
    """
    no_rounding = dict.fromkeys(_ROUNDINGS, _exact)
    exact = _Arithmetic(
        dtype=torch.float64, product=_product, x=_exact_rows, h=_exact_rows, **no_rounding
    )
    return _moe(x_TH, weights, routing, problem, exact, weights_after_gemm1=False)


def recipe(
    x_TH: torch.Tensor,
    weights: ExpertWeights,
    routing: Routing,
    problem: Problem,
    *,
    input_weighted: bool = False,
) -> torch.Tensor:
    """Return the output of plain torch in the problem's dtype, as float64.

    Products accumulate in float32. These are rounded to the problem's dtype: x times the router
    weight (if it goes on the input), GEMM 1 with its bias, the activation, GEMM 2 with its bias,
    and the result. With tf32, operands of both GEMMs lose their last 13 mantissa bits, as in
    Hopper's tensor cores.

    If the scheme does not quantize activations, dequantized weights are rounded to the problem's
    dtype. If it does, x and h are quantized: with one scale for x and one for h of all valid pairs,
    with one per row, or with one per group of a row. nvfp4 has one per expert in addition.

    input_weighted: if activations are quantized, a router weight on the input multiplies x before
        that. Otherwise it multiplies the results of GEMM 1.
    """
    quantizes = problem.scheme.quantizes_activations
    arithmetic = _make_arithmetic(weights, problem, Roundings(weights=not quantizes, gate_up=True))
    weights_after_gemm1 = quantizes and not input_weighted
    return _moe(
        x_TH, weights, routing, problem, arithmetic, weights_after_gemm1=weights_after_gemm1
    ).double()


def bitwise_reference(
    x_TH: torch.Tensor,
    weights: ExpertWeights,
    routing: Routing,
    problem: Problem,
    roundings: Roundings,
    *,
    input_weighted: bool,
) -> torch.Tensor:
    """Return the output that a part rounding as `roundings` must produce, in the problem's dtype.

    Its shape is (T, H) or (T, K, H). It is computed as one chunk, even if the problem splits calls.

    input_weighted: a router weight on the input multiplies x itself, before it is quantized.
        Otherwise it multiplies the results of GEMM 1, before the bias.
    """
    arguments = x_TH, weights, routing, problem, roundings
    return bitwise_references(*arguments, input_weighted=input_weighted, jitters=(None,))[0]


def bitwise_references(
    x_TH: torch.Tensor,
    weights: ExpertWeights,
    routing: Routing,
    problem: Problem,
    roundings: Roundings,
    *,
    input_weighted: bool,
    jitters: Sequence[torch.Generator | None],
) -> torch.Tensor:
    """Return the bitwise reference of one call for each of `jitters`, (number of jitters, T, ...).

    All are computed as one call with repeated tokens.

    jitters: each perturbs every product randomly, by as much as another order of its float32 sums
        may; None perturbs nothing.
    """
    copies, tokens = len(jitters), len(x_TH)
    product = partial(_float32_product, jitters=jitters)
    arithmetic = _make_arithmetic(weights, problem, roundings, product, copies=copies)
    repeated = routing.of(torch.arange(tokens, device=x_TH.device).repeat(copies))
    x_TH = x_TH.repeat(copies, 1)
    value = _moe(
        x_TH, weights, repeated, problem, arithmetic, weights_after_gemm1=not input_weighted
    )
    return value.to(problem.dtype).view(copies, tokens, *value.shape[1:])


def _make_arithmetic(
    weights: ExpertWeights,
    problem: Problem,
    roundings: Roundings,
    product: Product | None = None,
    copies: int = 1,
) -> _Arithmetic:
    """Return float32 arithmetic that rounds to the problem's dtype where `roundings` declares.

    product: the product of a bitwise reference. Such a reference also quantizes by reciprocals of
        scales, as the parts do. None makes the arithmetic of `recipe`.
    copies: number of repeated calls. A scale of all pairs is computed for each copy separately.
    """
    scheme, reciprocal = problem.scheme, product is not None

    def round_to_dtype(value: torch.Tensor) -> torch.Tensor:
        return value.to(problem.dtype).to(torch.float32)

    def quantized(
        rows: torch.Tensor, experts_R: torch.Tensor, *, static_scale: torch.Tensor | None
    ) -> torch.Tensor:
        if scheme.scales_by_expert and static_scale is not None:
            return nvfp4_round_trip(rows, experts_R, static_scale, reciprocal=reciprocal)
        calls = rows.chunk(copies) if copies > 1 else (rows,)
        return torch.cat(
            [_round_trip(r, scheme, static_scale, reciprocal=reciprocal) for r in calls]
        )

    quantizes = scheme.quantizes_activations
    tf32 = problem.fp32_precision == "tf32" and problem.dtype is torch.float32
    return _Arithmetic(
        torch.float32,
        round_to_dtype=round_to_dtype,
        weight=round_to_dtype if roundings.weights else _exact,
        operand=_drop_13_bits if tf32 and not quantizes else _exact,
        x=partial(quantized, static_scale=weights.a1_scale) if quantizes else _exact_rows,
        h=partial(quantized, static_scale=weights.a2_scale) if quantizes else _exact_rows,
        gate_up=round_to_dtype if roundings.gate_up else _exact,
        rows=round_to_dtype if roundings.rows else _exact,
        weighted=_exact if scheme.dispatched_quantized else round_to_dtype,
        product=product or _product,
    )


def _product(a_RK: torch.Tensor, b_NK: torch.Tensor) -> torch.Tensor:
    return _contiguous(a_RK) @ _contiguous(b_NK).T


def _contiguous(matrix: torch.Tensor) -> torch.Tensor:
    """Copy a matrix so that its rows have no gaps, which float32 GEMMs on some CPUs would read."""
    return matrix.clone(memory_format=torch.contiguous_format)


def _float32_product(
    a_RK: torch.Tensor, b_NK: torch.Tensor, *, jitters: Sequence[torch.Generator | None]
) -> torch.Tensor:
    """Return a @ b.T, computed in float64 and rounded to float32.

    jitters: one for each copy of the rows. Each perturbs its copy before rounding, within the error
        bound of float32 sums.
    """
    a_RK, b_NK = a_RK.double(), b_NK.double()
    exact = a_RK @ b_NK.T
    if any(jitter is not None for jitter in jitters):
        bound = (a_RK.abs() @ b_NK.abs().T) * 2.0**-24
        copies = (matrix.chunk(len(jitters)) for matrix in (exact, bound))
        for jitter, values, bounds in zip(jitters, *copies, strict=True):
            if jitter is not None:
                noise = torch.randn(
                    values.shape, generator=jitter, dtype=torch.float64, device="cpu"
                )
                values += noise.to(values.device) * bounds
    return exact.float()


def _exact(value: torch.Tensor) -> torch.Tensor:
    return value


def _exact_rows(rows: torch.Tensor, experts_R: torch.Tensor) -> torch.Tensor:
    return rows


def _drop_13_bits(value: torch.Tensor) -> torch.Tensor:
    return (value.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def _moe(
    x_TH: torch.Tensor,
    weights: ExpertWeights,
    routing: Routing,
    problem: Problem,
    arithmetic: _Arithmetic,
    *,
    weights_after_gemm1: bool,
) -> torch.Tensor:
    """Compute the layer, (T, H) or (T, K, H), in the dtype of `arithmetic`.

    weights_after_gemm1: input router weights multiply GEMM 1's results instead of x.
    """
    dtype, round_to_dtype, operand = arithmetic.dtype, arithmetic.round_to_dtype, arithmetic.operand
    ids = _local_ids(routing, weights, problem)
    is_local = (ids >= 0) & (ids < weights.w1.shape[0])
    local = torch.where(is_local, ids, -1).flatten()
    router = torch.where(is_local, routing.topk_weights_TK.to(dtype), 0)
    on_input = problem.apply_router_weight_on_input
    x = x_TH.to(dtype)
    if on_input and not weights_after_gemm1:
        x_TKH = torch.where(is_local[..., None], x[:, None] * router[..., None], 0.0)
        x_TKH = arithmetic.x(arithmetic.weighted(x_TKH).flatten(0, 1), local).view_as(x_TKH)
    elif problem.scheme.scales_by_expert:
        x_TKH = x[:, None].expand(-1, ids.shape[1], -1)
        x_TKH = arithmetic.x(x_TKH.flatten(0, 1), local).view_as(x_TKH)
    else:
        x_TKH = arithmetic.x(x, local)[:, None].expand(-1, ids.shape[1], -1)
    # Only experts that have tokens.
    used_experts = sorted(set(local[local >= 0].tolist()))
    pairs = [(expert, (ids == expert).nonzero(as_tuple=True)) for expert in used_experts]
    h_TKI = torch.zeros(*ids.shape, problem.intermediate, dtype=dtype, device=x.device)
    adapters = Adapters(
        weights,
        routing,
        product=arithmetic.product,
        round_operand=operand,
        round_result=round_to_dtype,
    )
    for expert, (token, slot) in pairs:
        w1 = arithmetic.weight(matrix(weights, "w1", expert, problem, dtype))
        x_RH = x_TKH[token, slot]
        if weights.w1_order is not None:
            order = weights.w1_order[expert].long()
            in_range = (order >= 0) & (order < x_RH.shape[1])  # a column out of range reads 0
            x_RH = torch.where(in_range, x_RH[:, order.where(in_range, 0)], 0.0)
        h = arithmetic.product(operand(x_RH), operand(w1))
        unquantized = x[token]
        if on_input and not weights_after_gemm1:
            unquantized = round_to_dtype(unquantized * router[token, slot, None])
        h = h + adapters.of_w1(unquantized, token, expert, problem.act)
        if on_input and weights_after_gemm1:
            h = h * router[token, slot, None]
        if weights.b1 is not None:
            h = h + weights.b1[expert].to(dtype)
        h_TKI[token, slot] = round_to_dtype(activation(arithmetic.gate_up(h), problem.act))
    unquantized_TKI = h_TKI
    # Rows of skipped pairs are zero and do not affect any maximum.
    h_TKI = arithmetic.h(h_TKI.flatten(0, 1), local).view_as(h_TKI)
    rows_TKH = torch.zeros(*ids.shape, problem.hidden, dtype=dtype, device=x.device)
    for expert, (token, slot) in pairs:
        w2 = arithmetic.weight(matrix(weights, "w2", expert, problem, dtype))
        y = arithmetic.product(operand(h_TKI[token, slot]), operand(w2))
        y = y + adapters.of_w2(unquantized_TKI[token, slot], token, expert)
        if weights.b2 is not None:
            y = y + weights.b2[expert].to(dtype)
        rows_TKH[token, slot] = arithmetic.rows(y)
    return round_to_dtype(_combine(rows_TKH, router, problem))


def _round_trip(
    rows: torch.Tensor,
    scheme: QuantScheme,
    static_scale: torch.Tensor | None,
    *,
    reciprocal: bool = False,
) -> torch.Tensor:
    """Round float32 rows (R, K) to the nearest values of the scheme.

    static_scale: the scale; None computes it.
    reciprocal: multiply by the float32 reciprocal of the scale instead of dividing. Many 16-bit
        values are exactly between two 8-bit values, so the choice decides how they round.
    """
    if rows.numel() == 0:
        return rows
    is_int8 = scheme.activation == "int8"
    max_value = 127.0 if is_int8 else 448.0
    width = rows.shape[1]
    if scheme.activation_granularity == "group":
        width = min(width, scheme.group[1])
    groups = []
    for start in range(0, rows.shape[1], width):
        group = rows[:, start : start + width]
        amax = group.abs().amax(1, keepdim=True)
        if scheme.activation_granularity == "tensor":
            amax = amax.amax()
        # Divide by a tensor: on a GPU, torch turns division by a Python number into a
        # multiplication by its reciprocal, and a scale that is off by one bit changes how ties
        # round.
        divisor = amax.new_tensor(max_value)
        scale = (amax / divisor).clamp(min=_MIN_SCALE) if static_scale is None else static_scale
        scaled = group * (1 / scale) if reciprocal else group / scale
        scaled = scaled.clamp(-max_value, max_value)
        nearest = scaled.round() if is_int8 else scaled.to(torch.float8_e4m3fn).to(rows.dtype)
        groups.append(nearest * scale)
    return torch.cat(groups, dim=1)


def _combine(rows_TKH: torch.Tensor, router: torch.Tensor, problem: Problem) -> torch.Tensor:
    if problem.combine is Combine.TOPK_UNWEIGHTED:
        return rows_TKH
    if not problem.apply_router_weight_on_input:
        rows_TKH = rows_TKH * router[..., None]
    rows_TKH = rows_TKH * problem.routed_scaling_factor
    return rows_TKH if problem.combine is Combine.TOPK_WEIGHTED else rows_TKH.sum(1)


def _local_ids(routing: Routing, weights: ExpertWeights, problem: Problem) -> torch.Tensor:
    """Return the local expert of each pair, (T, K) int64, negative if the pair is skipped."""
    ids = routing.topk_ids_TK.long()
    valid = (ids >= 0) & (ids < problem.experts)
    if weights.expert_map is not None:
        local = weights.expert_map.long()[ids.clamp(0, problem.experts - 1)]
        return torch.where(valid, local, -1)
    return torch.where(valid, ids, -1)


def activation(value: torch.Tensor, spec: ActivationSpec) -> torch.Tensor:
    """Apply the activation, (R, N) -> (R, I). It does not use the code of ActivationSpec."""
    if spec.kind == "relu2":
        return value.clamp(min=0).square()
    if not spec.gated:
        return _pointwise_activation(value, spec.kind.removesuffix("_no_mul"))
    gate, up = _gate_and_up(value, spec)
    if spec.kind == "situ":
        assert spec.alpha is not None
        if spec.limit is not None:
            up = torch.tanh(up / spec.limit) * spec.limit
        return torch.tanh(gate / spec.alpha) * spec.alpha / (1 + torch.exp(-gate)) * up
    if spec.kind in ("silu", "gelu", "gelu_tanh"):
        if spec.limit is not None:
            gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
        return _pointwise_activation(gate, spec.kind) * up
    assert spec.limit is not None
    up = up.clamp(-spec.limit, spec.limit)
    if spec.kind == "swiglu_clamp_after":
        return (gate / (1 + torch.exp(-gate))).clamp(max=spec.limit) * up
    gate = gate.clamp(max=spec.limit)
    if spec.kind == "swiglu_clamp_before":
        return gate / (1 + torch.exp(-gate)) * up
    assert spec.kind == "swiglu_oai"
    assert spec.alpha is not None
    return gate / (1 + torch.exp(-spec.alpha * gate)) * (up + 1)


def _gate_and_up(value: torch.Tensor, spec: ActivationSpec) -> tuple[torch.Tensor, torch.Tensor]:
    if spec.interleaved:
        return value[:, 0::2], value[:, 1::2]
    first, second = value.chunk(2, dim=1)
    return (second, first) if spec.up_first else (first, second)


def _pointwise_activation(value: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "silu":
        return value / (1 + torch.exp(-value))
    if kind == "gelu":
        return value * 0.5 * (1 + torch.erf(value / 2**0.5))
    assert kind == "gelu_tanh"
    inner = (2 / torch.pi) ** 0.5 * (value + 0.044715 * value**3)
    return value * 0.5 * (1 + torch.tanh(inner))
