"""Compares our quantizers, activations and block alignment with another project's."""

from collections.abc import Callable

import torch

from modular_kernel.ops.activation import gated_activation, gated_activation_ref
from modular_kernel.ops.align import moe_align_block_size
from modular_kernel.ops.quantize import (
    QuantizedRows,
    dequantize_rows,
    quantize_rows,
    quantize_values,
)
from modular_kernel.quant.quantized_weights import MIN_SCALE, QMAX
from modular_kernel.reference import activation as exact_activation
from modular_kernel.spec.problem import ActivationSpec
from modular_kernel.spec.quantization import QuantScheme
from peer_suites_lib.outcomes import (
    AGREE,
    OURS,
    THEIRS,
    CaseOutcome,
    Tolerance,
    call_reference,
    compare_with_exact,
    find_worst_outcome,
)

ROWS, COLUMNS, KERNEL_ROWS = 64, 2048, 2
ALIGNED_TOKENS = 256
# Relative error of one rounding to the dtype. An activation rounds once.
_ROUNDING = {torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 2.5e-3}
Quantizer = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def shrink_rows(rows: int, columns: int, multiple: int = 1) -> tuple[int, int, str]:
    """Return sizes that are feasible on a CPU, and a description of the reduction or "".

    multiple: the returned number of columns is a multiple of this.
    """
    shrunk = min(rows, ROWS), min(columns, max(COLUMNS // multiple * multiple, multiple))
    description = f"rows to {ROWS}, columns to {COLUMNS}" if shrunk != (rows, columns) else ""
    return *shrunk, description


def draw_normal_rows(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return standard normal numbers, which are the same for the same sizes."""
    g = torch.Generator().manual_seed(rows * 7919 + columns)
    return torch.randn(rows, columns, generator=g).to(dtype)


def check_quantizer(
    x: torch.Tensor, quant: str, reference: Quantizer, shrunk: str, rtol: float = 1e-5
) -> CaseOutcome:
    """Compare quantized rows of the torch reference, and a few of the kernel, with `reference`.

    For a value between two adjacent codes, both codes are accepted.
    """
    scheme = QuantScheme.parse(quant)
    outcomes = {}
    for name, rows in (("quantizer's reference", x), ("quantizer's kernel", x[:KERNEL_ROWS])):
        their_result = call_reference(reference, rows.clone())
        assert isinstance(their_result, tuple)
        if name.endswith("reference"):
            q, scale = quantize_values(rows.float(), scheme)
        else:
            out = _make_empty_quantized(rows, scheme)
            quantize_rows(rows, scheme, out=out)
            q, scale = out.q_RK, out.scale
        outcomes[name] = _compare_codes(rows, (q, scale), their_result, scheme, rtol)
    return find_worst_outcome(outcomes, shrunk, (x.shape, x.dtype, quant))


def _make_empty_quantized(x: torch.Tensor, scheme: QuantScheme) -> QuantizedRows:
    q, scale = quantize_values(x.float(), scheme)
    per_tensor = scheme.activation_granularity == "tensor"
    partials = torch.zeros(1024) if per_tensor else None
    return QuantizedRows(torch.empty_like(q), torch.empty_like(scale), partials)


def _compare_codes(
    x: torch.Tensor,
    our_result: tuple[torch.Tensor, torch.Tensor],
    their_result: tuple[torch.Tensor, torch.Tensor],
    scheme: QuantScheme,
    rtol: float,
) -> CaseOutcome:
    (q, scale), (their_q, their_scale) = our_result, their_result
    their_scale = their_scale.float().view_as(scale)
    exact = x.double()
    are_scales_close = bool(((scale - their_scale).abs() <= rtol * their_scale.abs()).all())
    codes, their_codes = q.float(), their_q.float().view_as(q)
    code_distance = (
        torch.ones(()) if q.dtype is torch.int8 else (codes.abs() / 8).clamp(min=2.0**-9)
    )
    distance = (codes - their_codes).abs()
    are_codes_close = bool((distance <= code_distance * 1.01).all())
    worst_step = _compute_error_in_steps(dequantize_rows(q, scale, scheme), exact, scale, q.dtype)
    if not worst_step <= 0.501:
        return CaseOutcome(OURS, f"{worst_step:.3f} steps from the value")
    expected_scale = _compute_scale(exact, scale.shape, scheme)
    # Errors in steps are not comparable if the scales differ.
    if not bool(((scale - expected_scale).abs() <= 1e-5 * expected_scale).all()):
        return CaseOutcome(OURS, "the scale does not map the maximum to the largest code")
    their_values = dequantize_rows(their_q.view_as(q), their_scale, scheme)
    their_step = _compute_error_in_steps(their_values, exact, their_scale, q.dtype)
    if are_scales_close and are_codes_close:
        cause = "ties" if their_step < 0.501 else "they truncate"
        return CaseOutcome(AGREE, f"adjacent codes: {cause}" if bool(distance.any()) else "")
    outcome = THEIRS if their_step >= worst_step else OURS
    return CaseOutcome(
        outcome, f"largest error in steps: ours {worst_step:.2f}, theirs {their_step:.2f}"
    )


def _compute_scale(exact: torch.Tensor, shape: torch.Size, scheme: QuantScheme) -> torch.Tensor:
    """Return the scales that map the maximum of each group to the largest code."""
    magnitudes = exact.abs()
    if len(shape) == 1:
        amax = magnitudes.amax().reshape(1)
    else:
        group = -(-exact.shape[1] // shape[1])
        if scheme.activation_granularity == "group":
            group = min(scheme.group[-1], exact.shape[1])
        padded = torch.nn.functional.pad(magnitudes, (0, shape[1] * group - exact.shape[1]))
        amax = padded.view(*shape, group).amax(2)
    return (amax / QMAX[scheme.activation]).clamp(min=MIN_SCALE)


def _compute_error_in_steps(
    actual: torch.Tensor, exact: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> float:
    """Return the maximum error in units of the distance between adjacent codes."""
    scale_per_value = scale.double()
    if scale_per_value.dim() == 2 and scale_per_value.shape[1] > 1:
        scale_per_value = scale_per_value.repeat_interleave(
            -(-exact.shape[1] // scale_per_value.shape[1]), 1
        )[:, : exact.shape[1]]
    if dtype is torch.int8:
        step = scale_per_value.expand_as(exact)
    else:
        code = (exact / scale_per_value).abs().clamp(min=2.0**-6, max=447.9)
        step = scale_per_value * torch.exp2(code.log2().floor() - 3)
    if not exact.numel():
        return 0.0
    slack = 1e-5 * exact.abs()
    return float((((actual.double() - exact).abs() - slack).clamp(min=0) / step).max())


def check_activation(
    x: torch.Tensor,
    spec: ActivationSpec,
    reference: Callable[[torch.Tensor], torch.Tensor],
    tolerance: Tolerance,
    shrunk: str,
) -> CaseOutcome:
    """Compare an activation of (R, N) rows: torch reference on all rows, kernel on a few."""
    outcomes = {}
    limit = _ROUNDING[x.dtype]
    for name, rows in (("activation's reference", x), ("activation's kernel", x[:KERNEL_ROWS])):
        their_output = call_reference(reference, rows.clone())
        assert isinstance(their_output, torch.Tensor)
        exact = exact_activation(rows.double(), spec)
        if name.endswith("reference"):
            ours = gated_activation_ref(_put_gate_first(rows, spec), spec).to(x.dtype)
        else:
            ours = torch.empty(exact.shape, dtype=x.dtype)
            gated_activation(_put_gate_first(rows, spec), spec, ours)
        outcomes[name] = compare_with_exact(ours, their_output, exact, tolerance, limit)
    return find_worst_outcome(outcomes, shrunk, (x.shape, x.dtype, spec))


def _put_gate_first(x: torch.Tensor, spec: ActivationSpec) -> torch.Tensor:
    """Return rows with gate first, as operations expect. A layer reorders its weights instead."""
    if not spec.up_first:
        return x
    up, gate = x.chunk(2, dim=1)
    return torch.cat([gate, up], 1)


Aligned = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def check_align(
    ids: torch.Tensor,
    block: int,
    experts: int,
    reference: Callable[[torch.Tensor], Aligned],
    shrunk: str,
    expert_map: torch.Tensor | None = None,
) -> CaseOutcome:
    """Compare the token-expert pairs in the blocks of each expert, in any order."""
    ours = moe_align_block_size(ids, block, experts, expert_map=expert_map, ignore_invalid=True)
    their_result = call_reference(reference, ids.clone())
    assert isinstance(their_result, tuple)
    expected: dict[int, list[int]] = {}
    for pair, expert in enumerate(ids.flatten().tolist()):
        local = expert if expert_map is None else int(expert_map[expert])
        if local >= 0:
            expected.setdefault(local, []).append(pair)
    our_blocks, their_blocks = (
        _collect_pairs(aligned, block, ids.numel()) for aligned in (ours, their_result)
    )
    if our_blocks != expected:
        return CaseOutcome(OURS, "blocks contain pairs of another expert, or lack some")
    if their_blocks != expected:
        return CaseOutcome(THEIRS, "blocks contain pairs of another expert, or lack some")
    if int(ours[2]) != int(their_result[2]):
        padded = sum(-(-len(pairs) // block) * block for pairs in expected.values())
        return CaseOutcome(OURS if int(ours[2]) != padded else THEIRS, "padded lengths differ")
    key = (ids.shape, block, experts, expert_map is None)
    return CaseOutcome(AGREE, "", shrunk, ("align",), key)


def _collect_pairs(aligned: Aligned, block: int, padding: int) -> dict[int, list[int]]:
    sorted_ids, expert_ids, length = aligned
    pairs: dict[int, list[int]] = {}
    for number in range(int(length) // block):
        block_ids = sorted_ids[number * block : (number + 1) * block].tolist()
        valid = [pair for pair in block_ids if pair < padding]
        if valid:
            pairs.setdefault(int(expert_ids[number]), []).extend(valid)
    return {expert: sorted(pair_ids) for expert, pair_ids in pairs.items()}
