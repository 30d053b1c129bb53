"""GEMM 1, activation with quantization, and GEMM 2 over tiles of nvfp4 rows.

Before each GEMM, its weight scales are rearranged into the layout that the kernel reads, and its
global scales are computed.
"""

from collections.abc import Callable, Mapping

import torch

from experts.common.row_major import to_row_major
from experts.cutlass.fp4_gemm import Fp4Weights
from modular_kernel.ops.fp4_rows import (
    TILE_M,
    Fp4Rows,
    batched_tile_specs,
    fp4_specs,
    make_batched_tiles,
    quantize_tiles,
    take_fp4,
    tile_scales,
    tiled_scale_spec,
)
from modular_kernel.ops.sort import VALUES_PER_TILE
from modular_kernel.quant import nvfp4
from modular_kernel.quant.quantized_weights import count_matrices
from modular_kernel.replay import stages
from modular_kernel.spec.problem import ActivationSpec, Problem
from modular_kernel.tensors import ExpertWeights
from modular_kernel.workspace import BufferSpec, Workspace

# The signature of `fp4_gemm`: rows, weights, tiles, output.
Gemm = Callable[[Fp4Rows, Fp4Weights, torch.Tensor, torch.Tensor], None]


def mlp_specs(problem: Problem, num_rows: int, max_tiles: int) -> Mapping[str, BufferSpec]:
    """Return the buffers of x, h and the weight scales."""
    e = problem.e
    specs = {
        **fp4_specs("x", num_rows, problem.hidden, max_tiles),
        **fp4_specs("h", num_rows, problem.intermediate, max_tiles),
    }
    for name, n, k in (
        ("w1", problem.w1_rows, problem.hidden),
        ("w2", problem.hidden, problem.intermediate),
    ):
        specs[f"{name}_tiled"] = tiled_scale_spec(e, n, k // nvfp4.GROUP)
        matrices = count_matrices(name, problem)
        specs[f"{name}_global_scales"] = BufferSpec((e, matrices), torch.float32)
    return specs


def run_mlp(
    x: Fp4Rows,
    tiles: torch.Tensor,
    weights: ExpertWeights,
    problem: Problem,
    *,
    gemm: Gemm,
    workspace: Workspace,
    allocate_out: Callable[[], torch.Tensor],
) -> torch.Tensor:
    """Run both GEMMs; return the bfloat16 output rows (R, H). Rows outside all tiles are undefined.

    x: the quantized rows (R, H).
    tiles: the encoded tile list (see `ops.fp4_rows`).
    workspace: has the buffers of `mlp_specs`, and "workspace13", to which GEMM 1 writes.
    allocate_out: returns the buffer for the output rows. It is called after the last read of x, so
        the buffer may share memory with x.
    """
    num_rows = len(x.q_RK)
    gate_up_RN = workspace.take("workspace13", (num_rows, problem.w1_rows))
    with stages.stage(stages.GEMM1):
        gemm(x, _prepare_weights("w1", weights, problem, workspace), tiles, gate_up_RN)
    with stages.stage(stages.fuse(stages.GEMM1, stages.QUANTIZE)):
        h = take_fp4(
            workspace, "h", num_rows, problem.intermediate, tiles.numel() // VALUES_PER_TILE
        )
        assert weights.a2_scale is not None
        quantize_tiles(gate_up_RN, tiles, weights.a2_scale, out=h, act=problem.act)
    with stages.stage(stages.GEMM2):
        out = allocate_out()
        gemm(h, _prepare_weights("w2", weights, problem, workspace), tiles, out)
    return out


def _prepare_weights(
    name: str, weights: ExpertWeights, problem: Problem, workspace: Workspace
) -> Fp4Weights:
    """Return w1 or w2 with scales in the layout of the GEMM and combined global scales.

    A combined global scale is the product of the global scales of the weights and the activations.
    """
    is_w1 = name == "w1"
    w, scale, global_scale, activation_scale = (
        (weights.w1, weights.w1_scale, weights.w1_global_scale, weights.a1_scale)
        if is_w1
        else (weights.w2, weights.w2_scale, weights.w2_global_scale, weights.a2_scale)
    )
    assert scale is not None
    assert global_scale is not None
    assert activation_scale is not None
    tiled_spec = tiled_scale_spec(*scale.shape)
    tiled_scale = workspace.take(f"{name}_tiled", tiled_spec.shape)
    tile_scales(scale, tiled_scale)
    global_scales = workspace.take(f"{name}_global_scales", tuple(global_scale.shape))
    torch.mul(global_scale, activation_scale[:, None], out=global_scales)
    return Fp4Weights(to_row_major(w), tiled_scale, global_scales)


def compile_on_meta() -> None:
    """Call the operations around the GEMM on meta tensors to compile their Triton kernels."""

    def make_empty(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    experts, capacity, columns, bf16 = 4, 200, 256, torch.bfloat16
    num_rows, fp32 = experts * capacity, torch.float32
    specs = batched_tile_specs(experts, capacity) | fp4_specs("x", num_rows, columns, 2 * experts)
    workspace = Workspace(specs, torch.device("meta"))
    tiles = make_batched_tiles(make_empty(experts, dtype=torch.int32), capacity, workspace)
    out = take_fp4(workspace, "x", num_rows, columns, 2 * experts)
    scale_e, source_R = make_empty(experts, dtype=fp32), make_empty(num_rows, dtype=torch.int32)
    quantize_tiles(make_empty(64, columns, dtype=bf16), tiles, scale_e, out=out, source_R=source_R)
    quantize_tiles(make_empty(num_rows, columns, dtype=bf16), tiles, scale_e, out=out)
    for kind in ("silu", "swiglu_oai", "relu2"):
        act = ActivationSpec.parse(kind)
        gate_up = make_empty(num_rows, columns * (2 if act.gated else 1), dtype=bf16)
        quantize_tiles(gate_up, tiles, scale_e, out=out, act=act)
    spec = tiled_scale_spec(experts, 2 * TILE_M, columns // nvfp4.GROUP)
    tile_scales(make_empty(experts, 2 * TILE_M, columns // nvfp4.GROUP), make_empty(*spec.shape))
