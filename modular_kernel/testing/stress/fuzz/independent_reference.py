"""Float64 reference of a layer for fuzzing, which computes each (token, expert) pair separately.

It follows the documentation alone and shares no code with `modular_kernel.reference`, so that a
mistake in one is not repeated in the other. The tolerance depends only on the number formats. It is
much larger than rounding errors, and much smaller than the effect of a wrong expert, weight, scale,
row or sign. `mk test` detects smaller errors.
"""

import math

import torch

from modular_kernel.spec.problem import ActivationSpec, Combine, Problem
from modular_kernel.tensors import ExpertWeights, Routing

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_DTYPE_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
# Errors of quantized activations, by dtype. The tolerance is relative to the value itself. The
# largest error (half a step next to zero) is relative to the largest value that has the same scale.
_QUANTIZED_TOLERANCES = {"float8_e4m3fn": 0.25, "int8": 0.12}
_LARGEST_ERRORS = {"float8_e4m3fn": 2**-10 / 448, "int8": 0.5 / 127}


def get_row_tolerance(problem: Problem) -> float:
    """Return the tolerance for the error of a row, relative to the norm from `_compute_output`."""
    tf32_tolerance = 2e-2 if problem.fp32_precision == "tf32" else 0.0
    return max(
        _DTYPE_TOLERANCES[problem.dtype],
        tf32_tolerance,
        _QUANTIZED_TOLERANCES.get(problem.scheme.activation, 0.0),
    )


def _unpack_nibbles(packed: torch.Tensor, dim: int) -> torch.Tensor:
    shape = list(packed.shape)
    shape[dim] *= 2
    pairs = torch.stack([packed % 16, packed // 16], dim=dim + 1)
    return pairs.reshape(shape)


def dequantize_matrix(
    stored: torch.Tensor,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    problem: Problem,
    matrix_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the values of quantized weights, (e, N, K) float64.

    stored, scale, zero: weights, scales and zero points, as in ExpertWeights.
    matrix_scale: the global scales of NVFP4, one or more per expert.
    """
    scheme = problem.scheme
    if scale is None:
        return stored.double()
    is_packed = scheme.weight in ("uint4", "float4_e2m1", "table4")
    codes = (_unpack_nibbles(stored, 2) if is_packed else stored).double()
    e, rows, depth = codes.shape
    if scheme.weight == "float4_e2m1":
        table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float64)
        codes, factor = table[codes.long()], scale.double()
        if matrix_scale is None:  # E8M0 scales, in which 255 means NaN
            factor = torch.exp2(factor - 127).masked_fill(factor == 255, torch.nan)
    else:
        factor = scale.double()
    if scheme.external:
        codes = torch.tensor(scheme.values, dtype=torch.float64)[codes.long()]
    block_n, block_k = scheme.group if scheme.granularity == "block" else (1, *scheme.group, 0)[:2]
    n = torch.arange(rows) // block_n
    k = torch.arange(depth) // block_k if block_k else torch.zeros(depth, dtype=torch.long)
    block_scales = factor.reshape(e, *[*factor.shape[1:], 1, 1][:2])
    if scheme.granularity == "tensor":
        n = torch.zeros(rows, dtype=torch.long)
    if scheme.weight in ("uint4", "uint8"):
        default_zero = {"uint4": 8.0, "uint8": 128.0}[scheme.weight]
        if zero is None:
            codes = codes - default_zero
        else:
            zero_points = (_unpack_nibbles(zero, 1) if scheme.weight == "uint4" else zero).double()
            codes = codes - zero_points[:, n][:, :, k]
    values = codes * block_scales[:, n][:, :, k]
    if matrix_scale is None:
        return values
    row_scales = matrix_scale.double().repeat_interleave(rows // matrix_scale.shape[1], 1)
    if problem.act.interleaved:
        row_scales = matrix_scale.double().repeat(1, rows // matrix_scale.shape[1])
    return values * row_scales[:, :, None]


def _apply_scalar_activation(v: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "silu":
        return v * v.sigmoid()
    if kind == "gelu":
        return 0.5 * v * torch.erfc(-v / math.sqrt(2))
    return v * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))


def _apply_activation(v: torch.Tensor, spec: ActivationSpec) -> torch.Tensor:
    kind, limit, alpha = spec.kind, spec.limit or math.inf, spec.alpha or 0.0
    if kind == "relu2":
        return v.relu() ** 2
    if kind.endswith("_no_mul"):
        return _apply_scalar_activation(v, kind.removesuffix("_no_mul"))
    half = len(v) // 2
    gate, up = (v[::2], v[1::2]) if spec.interleaved else (v[:half], v[half:])
    if kind == "situ":
        linear = up if spec.limit is None else limit * (up / limit).tanh()
        return alpha * (gate / alpha).tanh() * gate.sigmoid() * linear
    clipped_up = up.clip(-limit, limit)
    if kind in ("silu", "gelu", "gelu_tanh"):
        return _apply_scalar_activation(gate.minimum(torch.tensor(limit)), kind) * clipped_up
    if kind == "swiglu_oai":
        gate = gate.minimum(torch.tensor(limit))
        return gate * (alpha * gate).sigmoid() * (clipped_up + 1)
    if kind == "swiglu_clamp_after":
        return (gate * gate.sigmoid()).minimum(torch.tensor(limit)) * clipped_up
    gate = gate.minimum(torch.tensor(limit))
    return gate * gate.sigmoid() * clipped_up


class IndependentReference:
    """Expected output of one call and, for each row, the norm to which errors are relative."""

    def __init__(
        self, problem: Problem, x_TH: torch.Tensor, weights: ExpertWeights, routing: Routing
    ) -> None:
        self.problem = problem
        w1 = dequantize_matrix(
            weights.w1, weights.w1_scale, weights.w1_zero_point, problem, weights.w1_global_scale
        )
        w2 = dequantize_matrix(
            weights.w2, weights.w2_scale, weights.w2_zero_point, problem, weights.w2_global_scale
        )
        tokens, slots = routing.topk_ids_TK.shape
        rows = torch.zeros(tokens, slots, problem.hidden, dtype=torch.float64)
        norms = torch.zeros(tokens, slots, dtype=torch.float64)
        # Maps (token, slot) to (expert, h, typical size). All h are computed before the outputs,
        # because the activations of all pairs may share one scale.
        h_by_pair: dict[tuple[int, int], tuple[int, torch.Tensor, float]] = {}
        # One row per pair, because router weights may be applied before quantization.
        x_TKH = x_TH.double()[:, None].expand(tokens, slots, -1)
        if problem.apply_router_weight_on_input:
            x_TKH = x_TKH * routing.topk_weights_TK.double()[:, :, None]
        x_error = self._compute_shared_scale_error(x_TKH)
        for t in range(tokens):
            for k in range(slots):
                expert = int(routing.topk_ids_TK[t, k])
                if not 0 <= expert < problem.experts:
                    continue
                if weights.expert_map is not None:
                    expert = int(weights.expert_map[expert])
                if not 0 <= expert < problem.e:  # the expert is on another rank
                    continue
                h_by_pair[t, k] = (
                    expert,
                    *self._compute_activation(x_TKH[t, k], x_error, w1[expert], expert, weights),
                )
        h_error = 0.0
        if h_by_pair:
            h_error = self._compute_shared_scale_error(
                torch.stack([h for _, h, _ in h_by_pair.values()])
            )
        for (t, k), (expert, h, typical_h) in h_by_pair.items():
            weight = float(routing.topk_weights_TK[t, k])
            rows[t, k], norms[t, k] = self._compute_output(
                h, typical_h + h_error, w2[expert], expert, weight, weights
            )
        is_summed = problem.combine is Combine.SUM
        self.expected = rows.sum(1) if is_summed else rows
        self.norms = norms.sum(1) if is_summed else norms

    def _compute_shared_scale_error(self, activations: torch.Tensor) -> float:
        """Return the largest error from a scale that all rows share, in units of the tolerance.

        This error does not depend on the value: if another row has large values, all values of a
        row may be rounded to zero. It is 0.0 unless all rows share one dynamic scale.
        """
        scheme = self.problem.scheme
        finite = activations[activations.isfinite()]
        if scheme.activation_granularity != "tensor" or scheme.static or not finite.numel():
            return 0.0
        error = float(finite.abs().max()) * _LARGEST_ERRORS[scheme.activation]
        return error / _QUANTIZED_TOLERANCES[scheme.activation]

    def _compute_activation(
        self,
        x: torch.Tensor,
        x_error: float,
        w1: torch.Tensor,
        expert: int,
        weights: ExpertWeights,
    ) -> tuple[torch.Tensor, float]:
        """Return the activations h of one pair, and the typical size of a value of h.

        x: the row of the pair, multiplied by its router weight if that is applied on the input.
        x_error: the error of each value of x, in units of the tolerance.
        """
        problem = self.problem
        value = w1 @ x
        x_norm = float(x.norm()) + x_error * math.sqrt(len(x))
        typical_h = x_norm * float(w1.norm()) / math.sqrt(w1.numel())
        if weights.b1 is not None:
            value = value + weights.b1[expert].double()
        if problem.act.kind != "swiglu_oai":
            typical_h *= max(1.0, typical_h)
        return _apply_activation(value, problem.act), typical_h

    def _compute_output(
        self,
        h: torch.Tensor,
        typical_h: float,
        w2: torch.Tensor,
        expert: int,
        weight: float,
        weights: ExpertWeights,
    ) -> tuple[torch.Tensor, float]:
        """Return the output row of one pair, and a norm of the terms that are summed in it.

        typical_h: the typical size of a value of h.
        """
        problem = self.problem
        h_norm = max(float(h.norm()), math.sqrt(len(h)) * typical_h)
        y = w2 @ h
        norm = max(float(y.norm()), h_norm * float(w2.norm()) / math.sqrt(len(h)))
        if weights.b2 is not None:
            y = y + weights.b2[expert].double()
            norm += float(weights.b2[expert].double().norm())
        factor = 1.0
        if problem.combine is not Combine.TOPK_UNWEIGHTED:
            on_input = problem.apply_router_weight_on_input
            factor = problem.routed_scaling_factor * (1.0 if on_input else weight)
        return y * factor, norm * abs(factor)

    def find_mismatch(
        self, output: torch.Tensor, *, rows: slice | torch.Tensor = slice(None)
    ) -> str:
        """Describe how `output` differs from the expected output; "" if it does not.

        rows: the rows to compare.
        """
        if output.shape != self.expected.shape:
            return f"shape {tuple(output.shape)}, not {tuple(self.expected.shape)}"
        if output.dtype is not self.problem.dtype:
            return f"dtype {output.dtype}"
        error = (output.detach().double() - self.expected)[rows].norm(dim=-1)
        tolerance = get_row_tolerance(self.problem) * self.norms[rows] + 1e-7
        is_wrong = ~(error <= tolerance)
        if not bool(is_wrong.any()):
            return ""
        worst = float((error / tolerance).max())
        count = int(is_wrong.sum())
        return f"{count} of {is_wrong.numel()} rows differ, by up to {worst:.3g} tolerances"
