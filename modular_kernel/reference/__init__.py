"""Reference implementations of the layer in plain PyTorch, which share no code with any part.

- `float64_reference` computes in float64 from the dequantized weights.
- `rounded_reference` rounds where plain PyTorch rounds in the problem's dtype, and quantizes
  activations if the scheme does. A correct part may deviate from the float64 reference about as
  much as `rounded_reference` does.
- `bitwise_reference` rounds exactly where a part declares that it rounds, so its output differs
  from the part's output only because of the order of float32 sums.

All three call `_compute_layer`, with different functions for rounding (`_Arithmetic`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from modular_kernel.reference.adapters import Adapters
from modular_kernel.reference.nvfp4 import round_to_nvfp4
from modular_kernel.reference.weights import dequantize_matrix
from modular_kernel.spec.problem import ActivationSpec, Combine, Problem
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.spec.rounding import Roundings
from modular_kernel.tensors import ExpertWeights, Routing

Rounding = Callable[[torch.Tensor], torch.Tensor]
# (rows (R, K), local expert of each row (R,) int64, or -1) -> quantized rows (R, K)
QuantizeRows = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# (rows (R, K), matrix (N, K)) -> rows @ matrix.T, (R, N)
Matmul = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# Lower bound of scales computed from activations, so that the scale of a row of zeros is not 0.
_MIN_SCALE = 2.0**-33


@dataclass(frozen=True)
class _Arithmetic:
    """Arithmetic of one reference: the dtype of sums, and a function for each rounding.

    dtype: dtype of every sum.
    round_to_dtype: rounds to the problem's dtype.
    round_weight: rounds a dequantized weight.
    round_operand: rounds an operand of a GEMM as tensor cores do.
    quantize_x: quantizes the rows that GEMM 1 reads.
    quantize_h: quantizes the rows that GEMM 2 reads.
    round_gate_up: rounds the results of GEMM 1.
    round_rows: rounds the results of GEMM 2.
    round_weighted_x: rounds the product of x and a router weight.
    matmul: multiplies rows (R, K) by the transpose of a matrix (N, K).
    """

    dtype: torch.dtype
    round_to_dtype: Rounding
    round_weight: Rounding
    round_operand: Rounding
    quantize_x: QuantizeRows
    quantize_h: QuantizeRows
    round_gate_up: Rounding
    round_rows: Rounding
    round_weighted_x: Rounding
    matmul: Matmul


_ROUNDINGS = (
    "round_to_dtype",
    "round_weight",
    "round_operand",
    "round_gate_up",
    "round_rows",
    "round_weighted_x",
)


def float64_reference(
    x_TH: torch.Tensor, weights: ExpertWeights, routing: Routing, problem: Problem
) -> torch.Tensor:
    """Return the output without rounding, (T, H) or (T, K, H), float64.

    A pair is skipped if its id is outside [0, E) or belongs to an expert on another rank. The
    router weight of a skipped pair is not read.
    """
    no_rounding = dict.fromkeys(_ROUNDINGS, _keep_exact)
    exact = _Arithmetic(
        dtype=torch.float64,
        matmul=_matmul,
        quantize_x=_keep_exact_rows,
        quantize_h=_keep_exact_rows,
        **no_rounding,
    )
    return _compute_layer(
        x_TH, weights, routing, problem, exact, apply_router_weights_after_gemm1=False
    )


def rounded_reference(
    x_TH: torch.Tensor,
    weights: ExpertWeights,
    routing: Routing,
    problem: Problem,
    *,
    input_weighted: bool = False,
) -> torch.Tensor:
    """Return the output that plain PyTorch computes in the problem's dtype, as float64.

    GEMMs accumulate in float32. These values are rounded to the problem's dtype:

    - the product of x and the router weight, if the weight applies to the input;
    - the results of GEMM 1, with the bias;
    - the results of the activation;
    - the results of GEMM 2, with the bias;
    - the output.

    With tf32, the operands of both GEMMs lose their last 13 mantissa bits, as in Hopper's tensor
    cores.

    Weight-only schemes round dequantized weights to the problem's dtype. Other schemes quantize x
    and h, the output of the activation. Depending on the scheme, a scale covers all valid pairs, a
    row, or a group of a row. nvfp4 also has a scale per expert.

    input_weighted: what the router weights multiply if they apply to the input and the scheme
        quantizes activations: x before it is quantized (True), or the results of GEMM 1 (False).
    """
    quantizes = problem.scheme.quantizes_activations
    roundings = Roundings(weights=not quantizes, gate_up=True)
    arithmetic = _make_arithmetic(weights, problem, roundings, _matmul, reciprocal=False)
    apply_router_weights_after_gemm1 = quantizes and not input_weighted
    return _compute_layer(
        x_TH,
        weights,
        routing,
        problem,
        arithmetic,
        apply_router_weights_after_gemm1=apply_router_weights_after_gemm1,
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
    """Return the output of a part that rounds as `roundings` declares, in the problem's dtype.

    The output is (T, H) or (T, K, H). It is computed in one chunk, even if the problem splits
    calls.

    input_weighted: what the router weights multiply if they apply to the input: x before it is
        quantized (True), or the results of GEMM 1 before the bias (False).
    """
    arguments = x_TH, weights, routing, problem, roundings
    return bitwise_references(*arguments, input_weighted=input_weighted, generators=(None,))[0]


def bitwise_references(
    x_TH: torch.Tensor,
    weights: ExpertWeights,
    routing: Routing,
    problem: Problem,
    roundings: Roundings,
    *,
    input_weighted: bool,
    generators: Sequence[torch.Generator | None],
) -> torch.Tensor:
    """Return several bitwise references of a call, (len(generators), T, ...).

    Each reference is randomly perturbed, as if its float32 sums had another order. All references
    are computed in one call with repeated tokens.

    generators: the random number generator of each reference. None does not perturb the reference.
    """
    num_copies, num_tokens = len(generators), len(x_TH)
    matmul = partial(_matmul_float32, generators=generators)
    arithmetic = _make_arithmetic(
        weights, problem, roundings, matmul, reciprocal=True, num_copies=num_copies
    )
    repeated = routing.of(torch.arange(num_tokens, device=x_TH.device).repeat(num_copies))
    x_TH = x_TH.repeat(num_copies, 1)
    value = _compute_layer(
        x_TH,
        weights,
        repeated,
        problem,
        arithmetic,
        apply_router_weights_after_gemm1=not input_weighted,
    )
    return value.to(problem.dtype).view(num_copies, num_tokens, *value.shape[1:])


def _make_arithmetic(
    weights: ExpertWeights,
    problem: Problem,
    roundings: Roundings,
    matmul: Matmul,
    *,
    reciprocal: bool,
    num_copies: int = 1,
) -> _Arithmetic:
    """Return float32 arithmetic that rounds to the problem's dtype where `roundings` declares.

    matmul: computes the matrix products.
    reciprocal: multiply by the reciprocals of scales, as the parts do, instead of dividing.
    num_copies: number of copies of a call whose tokens are concatenated. A scale that covers all
        pairs of a call is computed for each copy separately.
    """
    scheme = problem.scheme

    def round_to_dtype(value: torch.Tensor) -> torch.Tensor:
        return value.to(problem.dtype).to(torch.float32)

    def quantize(
        rows: torch.Tensor, experts_R: torch.Tensor, *, static_scale: torch.Tensor | None
    ) -> torch.Tensor:
        if scheme.scales_by_expert and static_scale is not None:
            return round_to_nvfp4(rows, experts_R, static_scale, reciprocal=reciprocal)
        copies = rows.chunk(num_copies) if num_copies > 1 else (rows,)
        return torch.cat(
            [_round_to_scheme(copy, scheme, static_scale, reciprocal=reciprocal) for copy in copies]
        )

    quantizes = scheme.quantizes_activations
    tf32 = problem.fp32_precision == "tf32" and problem.dtype is torch.float32
    return _Arithmetic(
        torch.float32,
        round_to_dtype=round_to_dtype,
        round_weight=round_to_dtype if roundings.weights else _keep_exact,
        round_operand=_truncate_to_tf32 if tf32 and not quantizes else _keep_exact,
        quantize_x=(
            partial(quantize, static_scale=weights.a1_scale) if quantizes else _keep_exact_rows
        ),
        quantize_h=(
            partial(quantize, static_scale=weights.a2_scale) if quantizes else _keep_exact_rows
        ),
        round_gate_up=round_to_dtype if roundings.gate_up else _keep_exact,
        round_rows=round_to_dtype if roundings.rows else _keep_exact,
        round_weighted_x=_keep_exact if scheme.dispatched_quantized else round_to_dtype,
        matmul=matmul,
    )


def _matmul(a_RK: torch.Tensor, b_NK: torch.Tensor) -> torch.Tensor:
    return _copy_contiguous(a_RK) @ _copy_contiguous(b_NK).T


def _copy_contiguous(matrix: torch.Tensor) -> torch.Tensor:
    """Copy a matrix to contiguous rows: on some CPUs, float32 GEMMs read gaps between rows."""
    return matrix.clone(memory_format=torch.contiguous_format)


def _matmul_float32(
    a_RK: torch.Tensor, b_NK: torch.Tensor, *, generators: Sequence[torch.Generator | None]
) -> torch.Tensor:
    """Return a @ b.T, computed in float64 and rounded to float32.

    generators: the random number generator of each copy of the rows. It perturbs the copy before
        rounding, within the error bound of float32 sums. None does not perturb the copy.
    """
    a_RK, b_NK = a_RK.double(), b_NK.double()
    exact = a_RK @ b_NK.T
    if any(generator is not None for generator in generators):
        error_bound = (a_RK.abs() @ b_NK.abs().T) * 2.0**-24
        copies = (matrix.chunk(len(generators)) for matrix in (exact, error_bound))
        for generator, values, bounds in zip(generators, *copies, strict=True):
            if generator is not None:
                noise = torch.randn(
                    values.shape, generator=generator, dtype=torch.float64, device="cpu"
                )
                values += noise.to(values.device) * bounds
    return exact.float()


def _keep_exact(value: torch.Tensor) -> torch.Tensor:
    return value


def _keep_exact_rows(rows: torch.Tensor, experts_R: torch.Tensor) -> torch.Tensor:
    return rows


def _truncate_to_tf32(value: torch.Tensor) -> torch.Tensor:
    return (value.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def _compute_layer(
    x_TH: torch.Tensor,
    weights: ExpertWeights,
    routing: Routing,
    problem: Problem,
    arithmetic: _Arithmetic,
    *,
    apply_router_weights_after_gemm1: bool,
) -> torch.Tensor:
    """Compute the layer, (T, H) or (T, K, H), in the dtype of `arithmetic`.

    apply_router_weights_after_gemm1: multiply the results of GEMM 1 instead of x by router weights
        that apply to the input.
    """
    dtype, round_to_dtype = arithmetic.dtype, arithmetic.round_to_dtype
    round_operand = arithmetic.round_operand
    ids = _map_to_local_ids(routing, weights, problem)
    is_local = (ids >= 0) & (ids < weights.w1.shape[0])
    local_ids = torch.where(is_local, ids, -1).flatten()
    router_weights_TK = torch.where(is_local, routing.topk_weights_TK.to(dtype), 0)
    router_weights_on_input = problem.apply_router_weight_on_input
    x = x_TH.to(dtype)
    if router_weights_on_input and not apply_router_weights_after_gemm1:
        x_TKH = torch.where(is_local[..., None], x[:, None] * router_weights_TK[..., None], 0.0)
        weighted_x = arithmetic.round_weighted_x(x_TKH).flatten(0, 1)
        x_TKH = arithmetic.quantize_x(weighted_x, local_ids).view_as(x_TKH)
    elif problem.scheme.scales_by_expert:
        x_TKH = x[:, None].expand(-1, ids.shape[1], -1)
        x_TKH = arithmetic.quantize_x(x_TKH.flatten(0, 1), local_ids).view_as(x_TKH)
    else:
        x_TKH = arithmetic.quantize_x(x, local_ids)[:, None].expand(-1, ids.shape[1], -1)
    # Only experts that have tokens are computed.
    used_experts = sorted(set(local_ids[local_ids >= 0].tolist()))
    pairs_by_expert = [(expert, (ids == expert).nonzero(as_tuple=True)) for expert in used_experts]
    h_TKI = torch.zeros(*ids.shape, problem.intermediate, dtype=dtype, device=x.device)
    adapters = Adapters(
        weights,
        routing,
        matmul=arithmetic.matmul,
        round_operand=round_operand,
        round_u=round_to_dtype,
    )
    for expert, (token, k) in pairs_by_expert:
        w1 = arithmetic.round_weight(dequantize_matrix(weights, "w1", expert, problem, dtype))
        x_RH = x_TKH[token, k]
        if weights.w1_order is not None:
            order = weights.w1_order[expert].long()
            in_range = (order >= 0) & (order < x_RH.shape[1])  # a column out of range reads 0
            x_RH = torch.where(in_range, x_RH[:, order.where(in_range, 0)], 0.0)
        h = arithmetic.matmul(round_operand(x_RH), round_operand(w1))
        unquantized_RH = x[token]
        if router_weights_on_input and not apply_router_weights_after_gemm1:
            unquantized_RH = round_to_dtype(unquantized_RH * router_weights_TK[token, k, None])
        h = h + adapters.compute_w1_delta(unquantized_RH, token, expert, problem.act)
        if router_weights_on_input and apply_router_weights_after_gemm1:
            h = h * router_weights_TK[token, k, None]
        if weights.b1 is not None:
            h = h + weights.b1[expert].to(dtype)
        h_TKI[token, k] = round_to_dtype(activation(arithmetic.round_gate_up(h), problem.act))
    unquantized_TKI = h_TKI
    # Rows of skipped pairs are zero and do not affect any maximum.
    h_TKI = arithmetic.quantize_h(h_TKI.flatten(0, 1), local_ids).view_as(h_TKI)
    rows_TKH = torch.zeros(*ids.shape, problem.hidden, dtype=dtype, device=x.device)
    for expert, (token, k) in pairs_by_expert:
        w2 = arithmetic.round_weight(dequantize_matrix(weights, "w2", expert, problem, dtype))
        y = arithmetic.matmul(round_operand(h_TKI[token, k]), round_operand(w2))
        y = y + adapters.compute_w2_delta(unquantized_TKI[token, k], token, expert)
        if weights.b2 is not None:
            y = y + weights.b2[expert].to(dtype)
        rows_TKH[token, k] = arithmetic.round_rows(y)
    return round_to_dtype(_combine(rows_TKH, router_weights_TK, problem))


def _round_to_scheme(
    rows: torch.Tensor,
    scheme: QuantScheme,
    static_scale: torch.Tensor | None,
    *,
    reciprocal: bool = False,
) -> torch.Tensor:
    """Round float32 rows (R, K) to the nearest values that the scheme can represent.

    static_scale: the given scale; None computes scales from the rows.
    reciprocal: multiply by the float32 reciprocal of the scale instead of dividing by the scale.
        This matters because many 16-bit values lie exactly between two 8-bit values.
    """
    if rows.numel() == 0:
        return rows
    is_int8 = scheme.activation == "int8"
    max_value = 127.0 if is_int8 else 448.0
    group_width = rows.shape[1]
    if scheme.activation_granularity == "group":
        group_width = min(group_width, scheme.group[1])
    groups = []
    for start in range(0, rows.shape[1], group_width):
        group = rows[:, start : start + group_width]
        amax = group.abs().amax(1, keepdim=True)
        if scheme.activation_granularity == "tensor":
            amax = amax.amax()
        # The divisor is a tensor because torch on a GPU replaces a division by a Python number with
        # a multiplication by its reciprocal, which rounds differently.
        divisor = amax.new_tensor(max_value)
        scale = (amax / divisor).clamp(min=_MIN_SCALE) if static_scale is None else static_scale
        scaled = group * (1 / scale) if reciprocal else group / scale
        scaled = scaled.clamp(-max_value, max_value)
        nearest = scaled.round() if is_int8 else scaled.to(torch.float8_e4m3fn).to(rows.dtype)
        groups.append(nearest * scale)
    return torch.cat(groups, dim=1)


def _combine(
    rows_TKH: torch.Tensor, router_weights_TK: torch.Tensor, problem: Problem
) -> torch.Tensor:
    if problem.combine is Combine.TOPK_UNWEIGHTED:
        return rows_TKH
    if not problem.apply_router_weight_on_input:
        rows_TKH = rows_TKH * router_weights_TK[..., None]
    rows_TKH = rows_TKH * problem.routed_scaling_factor
    return rows_TKH if problem.combine is Combine.TOPK_WEIGHTED else rows_TKH.sum(1)


def _map_to_local_ids(routing: Routing, weights: ExpertWeights, problem: Problem) -> torch.Tensor:
    """Return the local expert of each pair, (T, K) int64, negative if the pair is skipped."""
    ids = routing.topk_ids_TK.long()
    valid = (ids >= 0) & (ids < problem.experts)
    if weights.expert_map is not None:
        local = weights.expert_map.long()[ids.clamp(0, problem.experts - 1)]
        return torch.where(valid, local, -1)
    return torch.where(valid, ids, -1)


def activation(value: torch.Tensor, spec: ActivationSpec) -> torch.Tensor:
    """Apply an activation to the results of GEMM 1, (R, N) -> (R, I).

    The formulas are written independently of every part.
    """
    if spec.kind == "relu2":
        return value.clamp(min=0).square()
    if not spec.gated:
        return _apply_pointwise_activation(value, spec.kind.removesuffix("_no_mul"))
    gate, up = _split_gate_up(value, spec)
    if spec.kind == "situ":
        assert spec.alpha is not None
        if spec.limit is not None:
            up = torch.tanh(up / spec.limit) * spec.limit
        return torch.tanh(gate / spec.alpha) * spec.alpha / (1 + torch.exp(-gate)) * up
    if spec.kind in ("silu", "gelu", "gelu_tanh"):
        if spec.limit is not None:
            gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
        return _apply_pointwise_activation(gate, spec.kind) * up
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


def _split_gate_up(value: torch.Tensor, spec: ActivationSpec) -> tuple[torch.Tensor, torch.Tensor]:
    if spec.interleaved:
        return value[:, 0::2], value[:, 1::2]
    first, second = value.chunk(2, dim=1)
    return (second, first) if spec.up_first else (first, second)


def _apply_pointwise_activation(value: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "silu":
        return value / (1 + torch.exp(-value))
    if kind == "gelu":
        return value * 0.5 * (1 + torch.erf(value / 2**0.5))
    assert kind == "gelu_tanh"
    inner = (2 / torch.pi) ** 0.5 * (value + 0.044715 * value**3)
    return value * 0.5 * (1 + torch.tanh(inner))
