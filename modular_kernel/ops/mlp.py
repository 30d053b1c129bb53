"""The two GEMMs and the activation of experts in plain torch, for parts that loop over experts.

GEMM 1 multiplies rows x by w1 (gate and up), and GEMM 2 multiplies h, the output of the activation,
by w2 (down). The functions dequantize weights, and round values at the same points as the fused
kernels, so that results can be compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from modular_kernel.ops.activation import gated_activation_ref
from modular_kernel.ops.quantize import dequantize_rows, quantize_values
from modular_kernel.quant import nvfp4
from modular_kernel.quant.quantized_weights import dequantize_weights
from modular_kernel.replay import stages
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.rounding import Roundings
from modular_kernel.tensors import ExpertWeights
from modular_kernel.utils.matmul import compact, matmul


@dataclass(frozen=True)
class ExpertTokens:
    """The rows of one local expert.

    expert: the local expert.
    x_RH: (R, H) in the problem's dtype, or quantized.
    scale: scale of quantized rows, (R, 1), (R, G) or (1,); None if unquantized.
    row_weights_R: (R,) float32, router weights that apply to the input. The result of GEMM 1 is
        multiplied by them before the bias is added.
    slots_R: (R,), the adapter slot of each row, or -1 for no adapter; None if no row has an
        adapter.
    plain_RH: (R, H) unquantized rows, which adapters read; None if no row has an adapter.
    """

    expert: int
    x_RH: torch.Tensor
    scale: torch.Tensor | None = None
    row_weights_R: torch.Tensor | None = None
    slots_R: torch.Tensor | None = None
    plain_RH: torch.Tensor | None = None


def expert_mlps(
    tokens: Sequence[ExpertTokens], weights: ExpertWeights, problem: Problem
) -> list[torch.Tensor]:
    """Return the output rows of each entry of `tokens`, (R, H) in the problem's dtype.

    - The activation is computed in float32.
    - The result of GEMM 1 is rounded once or stays float32 (`mlp_roundings`). The result of GEMM 2,
      with its bias, is rounded once to the problem's dtype.
    - If the scheme quantizes activations, h is quantized. A per-tensor scale is computed from all
      rows of `tokens`. With nvfp4_w4a4, the function also quantizes x.
    - The delta of an adapter is computed from unquantized rows, and added before the result of a
      GEMM is rounded.
    """
    with stages.stage(stages.GEMM1):
        h_by_expert = [_compute_hidden(rows, weights, problem) for rows in tokens]
    unquantized_h_by_expert = h_by_expert
    if h_by_expert and problem.scheme.quantizes_activations:
        with stages.stage(stages.QUANTIZE):
            h_by_expert = _quantize_hidden(tokens, h_by_expert, weights, problem)
    with stages.stage(stages.GEMM2):
        return [
            _compute_output(rows, h_RI, unquantized_RI, weights, problem)
            for rows, h_RI, unquantized_RI in zip(
                tokens, h_by_expert, unquantized_h_by_expert, strict=True
            )
        ]


def mlp_roundings(weights: ExpertWeights, problem: Problem, *, has_row_weights: bool) -> Roundings:
    """Return where `expert_mlps` rounds.

    has_row_weights: whether router weights apply to the input.
    """
    scheme = problem.scheme
    unquantized_activations = not scheme.quantizes_activations
    is_final = weights.b1 is None and not has_row_weights
    return Roundings(
        weights=scheme.quantized and unquantized_activations,
        gate_up=unquantized_activations and is_final,
    )


def _compute_hidden(rows: ExpertTokens, weights: ExpertWeights, problem: Problem) -> torch.Tensor:
    """Compute GEMM 1 and the activation, (R, H) -> (R, I), rounded to the problem's dtype."""
    x_RH = rows.x_RH
    if rows.scale is not None:
        x_RH = dequantize_rows(x_RH, rows.scale, problem.scheme)
    elif problem.scheme.scales_by_expert:
        x_RH = _round_to_nvfp4(x_RH, weights.a1_scale, rows.expert)
    is_final = weights.b1 is None and rows.row_weights_R is None
    w1_NH = _get_matrix(weights, "w1", rows.expert, problem)
    deltas = _compute_deltas(rows, rows.plain_RH, weights.lora_a13, weights.lora_b13, problem)
    h_RN = _multiply(x_RH, w1_NH, deltas, is_final=is_final)
    if rows.row_weights_R is not None:
        h_RN = h_RN * rows.row_weights_R[:, None]
    if weights.b1 is not None:
        h_RN = h_RN + weights.b1[rows.expert].float()
    return gated_activation_ref(h_RN, problem.act).to(problem.dtype)


def _compute_output(
    rows: ExpertTokens,
    h_RI: torch.Tensor,
    unquantized_RI: torch.Tensor,
    weights: ExpertWeights,
    problem: Problem,
) -> torch.Tensor:
    """Compute GEMM 2, (R, I) -> (R, H), rounded to the problem's dtype.

    unquantized_RI: h before quantization.
    """
    w2_HI = _get_matrix(weights, "w2", rows.expert, problem)
    deltas = _compute_deltas(rows, unquantized_RI, weights.lora_a2, weights.lora_b2, problem)
    y_RH = _multiply(h_RI, w2_HI, deltas, is_final=weights.b2 is None)
    if weights.b2 is not None:
        y_RH = y_RH + weights.b2[rows.expert].float()
    return y_RH.to(problem.dtype)


def _round_to_nvfp4(x_RK: torch.Tensor, scale_e: torch.Tensor | None, expert: int) -> torch.Tensor:
    """Quantize rows of one expert to nvfp4, and dequantize them to float32.

    scale_e: (e,) float32, the global scale of each expert.
    """
    assert scale_e is not None
    expert_scale = scale_e[expert]
    codes, scale = nvfp4.quantize(x_RK, 1 / expert_scale)
    return nvfp4.dequantize(codes, scale, expert_scale)


def _quantize_hidden(
    tokens: Sequence[ExpertTokens],
    h_by_expert: list[torch.Tensor],
    weights: ExpertWeights,
    problem: Problem,
) -> list[torch.Tensor]:
    """Quantize h, and dequantize it to float32."""
    if problem.scheme.scales_by_expert:
        tokens_and_h = zip(tokens, h_by_expert, strict=True)
        return [_round_to_nvfp4(h_RI, weights.a2_scale, rows.expert) for rows, h_RI in tokens_and_h]
    all_rows = torch.cat(h_by_expert).float()
    static = weights.a2_scale if problem.scheme.static else None
    q_RI, scale = quantize_values(all_rows, problem.scheme, static)
    values = dequantize_rows(q_RI, scale, problem.scheme)
    return list(torch.split(values, [len(h_RI) for h_RI in h_by_expert]))


def _get_matrix(weights: ExpertWeights, name: str, expert: int, problem: Problem) -> torch.Tensor:
    """Return w1 or w2 of one expert, dequantized if necessary.

    Dequantized values are float32 if activations are quantized. Otherwise, they have the problem's
    dtype.
    """
    weight: torch.Tensor = getattr(weights, name)
    scheme = problem.scheme
    if not scheme.quantized:
        return weight[expert]
    values = dequantize_weights(weights, name, problem, slice(expert, expert + 1))[0]
    return values if scheme.quantizes_activations else values.to(problem.dtype)


# For each adapter: the mask of its rows, (R,) bool, and the delta of these rows, (r, N).
Deltas = list[tuple[torch.Tensor, torch.Tensor]]


def _compute_deltas(
    rows: ExpertTokens,
    plain_RK: torch.Tensor | None,
    a_LeRK: torch.Tensor | None,
    b_LeNR: torch.Tensor | None,
    problem: Problem,
) -> Deltas:
    """Return the delta B (A x) in float32 for each adapter in use.

    A x is rounded to the problem's dtype.

    plain_RK: the unquantized rows x; None if no row has an adapter.
    a_LeRK, b_LeNR: the matrices A and B of each adapter slot and local expert. In
        these suffixes, R is the rank, or twice the rank for A if gate and up have separate
        matrices A.
    """
    slots_R = rows.slots_R
    if slots_R is None or plain_RK is None or a_LeRK is None or b_LeNR is None:
        return []
    deltas: Deltas = []
    for slot in sorted(set(slots_R.tolist())):
        if not 0 <= slot < len(a_LeRK):
            continue
        selected = slots_R == slot
        a_RK, b_NR = (m[slot, rows.expert % m.shape[1]].float() for m in (a_LeRK, b_LeNR))
        u_rR = matmul(plain_RK[selected].float(), a_RK.T).to(problem.dtype).float()
        if a_RK.shape[0] == b_NR.shape[1]:
            deltas.append((selected, matmul(u_rR, b_NR.T)))
            continue
        delta, rank = u_rR.new_empty(len(u_rR), len(b_NR)), b_NR.shape[1]
        interleaved, half = problem.act.interleaved, len(b_NR) // 2
        gates = slice(0, None, 2) if interleaved else slice(0, half)
        ups = slice(1, None, 2) if interleaved else slice(half, None)
        delta[:, gates] = matmul(u_rR[:, :rank], b_NR[gates].T)
        delta[:, ups] = matmul(u_rR[:, rank:], b_NR[ups].T)
        deltas.append((selected, delta))
    return deltas


def _multiply(
    x: torch.Tensor, weight: torch.Tensor, deltas: Deltas, *, is_final: bool
) -> torch.Tensor:
    """Return a @ matrix.T plus the deltas, which are added in float32.

    Rows without a delta are bitwise equal to the result without deltas.

    is_final: whether the caller adds nothing to the result. If so, the result has the dtype of the
        operands. Otherwise, it is float32.
    """
    x, weight = compact(x), compact(weight)  # once for all following matmuls
    result = matmul(x, weight.T) if is_final else matmul(x.float(), weight.float().T)
    for selected, delta in deltas:
        result[selected] = (matmul(x[selected].float(), weight.float().T) + delta).to(result.dtype)
    return result
