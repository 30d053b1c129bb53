"""Activation and quantization between GEMM 1 and GEMM 2, for experts whose GEMMs a library runs."""

from collections.abc import Mapping

import torch

from modular_kernel.ops.activation import gated_activation
from modular_kernel.ops.quantize import (
    QuantizedRows,
    activation_and_quantize,
    quantize_rows,
    quantize_specs,
    take_quantized,
)
from modular_kernel.ops.valid_rows import BatchedRows
from modular_kernel.replay import stages
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.rounding import Roundings
from modular_kernel.tensors import ExpertWeights
from modular_kernel.workspace import BufferSpec, Workspace

# GEMM 1 of these libraries writes gate and up in 16 bits, which rounds them before the activation.
ROUNDINGS = Roundings(gate_up=True)


def hidden_specs(problem: Problem, rows: int, segments: int = 1) -> Mapping[str, BufferSpec]:
    """Return the buffers that `hidden_rows` takes for `rows` rows in `segments` segments."""
    scheme, columns = problem.scheme, problem.intermediate
    is_unquantized = {"h": BufferSpec((rows, columns), problem.dtype)}
    if not scheme.quantizes_activations:
        return is_unquantized
    quantized = quantize_specs("h", scheme, rows, columns, segments=segments)
    return is_unquantized | quantized if _has_tensor_scale(problem) else quantized


def hidden_rows(
    gate_up_RN: torch.Tensor,
    problem: Problem,
    counts_e: torch.Tensor,
    weights: ExpertWeights,
    workspace: Workspace,
    *,
    along_rows: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Apply the activation and quantize; return the rows (R, I) for GEMM 2 and their scales.

    The scales are `QuantizedRows.scale_of_rows`, or None for a scheme with 16-bit activations.

    gate_up_RN: (R, N), in segments of equal size, one for each element of counts_e.
    counts_e: (segments,) int32. Only the first counts_e[i] rows of segment i are valid; the results
        of other rows are undefined.
    along_rows: store the scales column-major, (R, groups) with stride(0) = 1.
    """
    rows, scheme = len(gate_up_RN), problem.scheme
    shape = (rows, problem.intermediate)
    valid_rows = BatchedRows(counts_e)
    if not scheme.quantizes_activations:
        h_RI = workspace.take("h", shape)
        with stages.stage(stages.GEMM1):
            gated_activation(gate_up_RN, problem.act, h_RI)
        return h_RI, None
    out = take_quantized(
        workspace,
        "h",
        scheme,
        shape,
        segments=counts_e.numel(),
        static_scale=weights.a2_scale,
        along_rows=along_rows,
    )
    if not _has_tensor_scale(problem):
        with stages.stage(stages.fused(stages.GEMM1, stages.QUANTIZE)):
            activation_and_quantize(gate_up_RN, problem.act, scheme, out=out, valid_rows=valid_rows)
        return _values_and_scale(out)
    h_RI = workspace.take("h", shape)
    with stages.stage(stages.GEMM1):
        gated_activation(gate_up_RN, problem.act, h_RI)
    with stages.stage(stages.QUANTIZE):
        quantize_rows(h_RI, scheme, out=out, valid_rows=valid_rows)
    return _values_and_scale(out)


def _values_and_scale(out: QuantizedRows) -> tuple[torch.Tensor, torch.Tensor]:
    return out.q_RK, out.scale_of_rows


def _has_tensor_scale(problem: Problem) -> bool:
    """Return whether one scale depends on all of h, which must then be computed first."""
    scheme = problem.scheme
    return scheme.activation_granularity == "tensor" and not scheme.static
