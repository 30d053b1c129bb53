"""Activation and quantization between the two GEMMs, for experts parts that call a library."""

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

# The libraries' GEMMs write gate and up in 16 bits, so both are rounded before the activation.
LIBRARY_ROUNDINGS = Roundings(gate_up=True)


def activation_specs(
    problem: Problem, num_rows: int, num_segments: int = 1
) -> Mapping[str, BufferSpec]:
    """Return the workspace buffers of `activate_and_quantize`, by name.

    num_rows: the number of rows in all segments.
    num_segments: the number of segments, which all have the same size.
    """
    scheme, columns = problem.scheme, problem.intermediate
    unquantized = {"h": BufferSpec((num_rows, columns), problem.dtype)}
    if not scheme.quantizes_activations:
        return unquantized
    quantized = quantize_specs("h", scheme, num_rows, columns, segments=num_segments)
    return unquantized | quantized if _has_dynamic_tensor_scale(problem) else quantized


def activate_and_quantize(
    gate_up_RN: torch.Tensor,
    problem: Problem,
    counts_e: torch.Tensor,
    weights: ExpertWeights,
    workspace: Workspace,
    *,
    column_major_scales: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Apply the activation to the output of GEMM 1, and quantize the result for GEMM 2.

    gate_up_RN: (R, N), the output of GEMM 1: len(counts_e) segments of equal size.
    counts_e: (segments,) int32. Only the first counts_e[i] rows of segment i are valid; the results
        of other rows are undefined.
    column_major_scales: store the scales column-major, (R, groups) with stride(0) = 1.

    Return the rows (R, I) and their scales (`QuantizedRows.scale_of_rows`). The scales are None if
    the scheme has 16-bit activations.
    """
    scheme, shape = problem.scheme, (len(gate_up_RN), problem.intermediate)
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
        along_rows=column_major_scales,
    )
    if not _has_dynamic_tensor_scale(problem):
        with stages.stage(stages.fuse(stages.GEMM1, stages.QUANTIZE)):
            activation_and_quantize(gate_up_RN, problem.act, scheme, out=out, valid_rows=valid_rows)
        return _get_values_and_scale(out)
    h_RI = workspace.take("h", shape)
    with stages.stage(stages.GEMM1):
        gated_activation(gate_up_RN, problem.act, h_RI)
    with stages.stage(stages.QUANTIZE):
        quantize_rows(h_RI, scheme, out=out, valid_rows=valid_rows)
    return _get_values_and_scale(out)


def _get_values_and_scale(out: QuantizedRows) -> tuple[torch.Tensor, torch.Tensor]:
    return out.q_RK, out.scale_of_rows


def _has_dynamic_tensor_scale(problem: Problem) -> bool:
    """Return whether a single scale is computed from all of h, the output of the activation."""
    scheme = problem.scheme
    return scheme.activation_granularity == "tensor" and not scheme.static
