"""block_gemm: a grouped GEMM over fp8 rows and weights, with one scale per block.

On a GPU, block_gemm launches the kernel `kernels.block_gemm`. On a CPU, it runs a PyTorch reference
that requires the same shapes, strides and alignment.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from experts.cutlass.compiled_kernels import CompiledKernel
from experts.cutlass.fake_tensors import make_fake_matrix
from experts.triton.operands import TMA_BYTES, GemmOperands
from modular_kernel.errors import LayoutError, ShapeError
from modular_kernel.ops.activation import gated_activation_ref
from modular_kernel.ops.quantize import QuantizedRows, dequantize_rows, quantize_rows_ref
from modular_kernel.ops.sort import SortedPairs
from modular_kernel.quant.quantized_weights import dequantize
from modular_kernel.spec.problem import Problem
from modular_kernel.utils.matmul import matmul

TILE_M = 128  # rows per tile
BLOCK = 128  # elements along K, and weight rows along N, that share a scale
_TILE_COLUMNS = {True: 128, False: 256}  # `gated` -> output columns per tile
_CLUSTER_SIZE = 2  # thread blocks per cluster, which compute adjacent column tiles of a row tile


def block_gemm(
    a: QuantizedRows,
    operands: GemmOperands,
    problem: Problem,
    order: SortedPairs,
    out: QuantizedRows | torch.Tensor,
) -> None:
    """out[r] = a[r] @ w[expert of r]^T for every row r of every 128-row tile of `order`.

    a: the rows, with q_RK (R, K) float8_e4m3fn and scale (R, K / 128) float32.
    operands: the weights, with w (e, N, K) float8_e4m3fn and scale (e, N / 128, K / 128) float32.
    order: the expert-sorted rows and their tiles.
    out: a bfloat16 tensor (R, N), or a QuantizedRows with q_RK (R, N / 2). If it is a
        QuantizedRows, w has gate and up rows, and h = silu(gate) * up is rounded to bfloat16 and
        then quantized. Rows past the end of the last tile are not written.

    All tensors must be contiguous, and N and K must be multiples of 128. Meta tensors are checked,
    but no kernel is launched on them. Raise ShapeError or LayoutError if a requirement is violated.
    """
    check_operands(a, operands, out)
    if a.q_RK.is_meta:
        return
    if not a.q_RK.is_cuda:
        block_gemm_ref(a, operands, problem, order, out)
        return
    gated = isinstance(out, QuantizedRows)
    out_values = out.q_RK if isinstance(out, QuantizedRows) else out
    experts, weight_rows, k = operands.w.shape
    scale = operands.scale
    assert scale is not None
    cluster_columns = _TILE_COLUMNS[gated] * _CLUSTER_SIZE
    columns = out_values.shape[1]
    load_kernel(gated)(
        a.q_RK.view(torch.uint8),
        operands.w.view(experts * weight_rows, k).view(torch.uint8),
        a.scale,
        scale.view(-1, scale.shape[2]),
        out_values.view(torch.uint8) if gated else out_values,
        out.scale if isinstance(out, QuantizedRows) else a.scale,
        order.tiles,
        order.max_tiles,
        weight_rows,
        operands.up_row_offset,
        -(-columns // cluster_columns) * _CLUSTER_SIZE,
        count_thread_blocks(out_values.device.index),
    )


def check_operands(
    a: QuantizedRows, operands: GemmOperands, out: QuantizedRows | torch.Tensor
) -> None:
    """Raise ShapeError or LayoutError if a tensor violates the requirements of `block_gemm`."""
    k, weight_rows = a.q_RK.shape[1], operands.w.shape[1]
    groups = k // BLOCK
    out_values = out.q_RK if isinstance(out, QuantizedRows) else out
    num_rows, experts = out_values.shape[0], operands.w.shape[0]
    columns = weight_rows // 2 if isinstance(out, QuantizedRows) else weight_rows
    expected = [
        ("rows", a.q_RK, (num_rows, k)),
        ("row scales", a.scale, (num_rows, groups)),
        ("weights", operands.w, (experts, weight_rows, k)),
        ("weight scales", operands.scale, (experts, weight_rows // BLOCK, groups)),
        ("output", out_values, (num_rows, columns)),
    ]
    if isinstance(out, QuantizedRows):
        expected.append(("output scales", out.scale, (num_rows, columns // BLOCK)))
    for name, tensor, shape in expected:
        if tensor is None or tuple(tensor.shape) != shape:
            raise ShapeError(name, got=None if tensor is None else tuple(tensor.shape), need=shape)
        if not tensor.is_contiguous():
            raise LayoutError(name, got=f"strides {tensor.stride()}", need="contiguous")
    for name, size in (("K", k), ("number of weight rows", weight_rows)):
        if size % BLOCK:
            raise ShapeError(name, got=size, need=f"a multiple of {BLOCK}")
    for name, tensor in (("rows", a.q_RK), ("weights", operands.w), ("output", out_values)):
        if tensor.data_ptr() % TMA_BYTES:
            got, need = f"address {tensor.data_ptr()}", f"an address aligned to {TMA_BYTES} bytes"
            raise LayoutError(name, got=got, need=need)


def block_gemm_ref(
    a: QuantizedRows,
    operands: GemmOperands,
    problem: Problem,
    order: SortedPairs,
    out: QuantizedRows | torch.Tensor,
) -> None:
    """PyTorch reference for `block_gemm`, which accumulates in float32."""
    tiles = order.tiles[: 3 * order.max_tiles].view(3, -1)[:, : int(order.tiles[-1])]
    weights: dict[int, torch.Tensor] = {}
    for expert, first, end in tiles.T.tolist():
        rows = slice(first, min(first + TILE_M, end))
        if expert not in weights:
            assert operands.scale is not None
            expert_slice = slice(expert, expert + 1)
            (weights[expert],) = dequantize(
                operands.w[expert_slice], operands.scale[expert_slice], None, problem.scheme
            )
        x = dequantize_rows(a.q_RK[rows], a.scale[rows], problem.scheme)
        values = matmul(x, weights[expert].T)
        if isinstance(out, QuantizedRows):
            h = gated_activation_ref(values, problem.act).to(problem.dtype)
            out_tile = QuantizedRows(out.q_RK[rows], out.scale[rows])
            quantize_rows_ref(h, problem.scheme, out=out_tile)
        else:
            out[rows] = values.to(out.dtype)


def _compile(gated: bool, options: str) -> Any:
    """Compile the kernel, which takes about two seconds and needs no GPU.

    The returned function takes tensors of any size and launches on PyTorch's current stream.
    """
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream

    from experts.cutlass.kernels.block_gemm import BlockGemm

    rows, groups = cute.sym_int32(), cute.sym_int32()
    k, columns = cute.sym_int32(divisibility=BLOCK), cute.sym_int32(divisibility=BLOCK)
    u8, fp32 = cutlass.Uint8, cutlass.Float32
    arguments = (
        make_fake_matrix(u8, rows, k),
        make_fake_matrix(u8, cute.sym_int32(), k),
        make_fake_matrix(fp32, rows, groups),
        make_fake_matrix(fp32, cute.sym_int32(), groups),
        make_fake_matrix(u8 if gated else cutlass.BFloat16, rows, columns),
        make_fake_matrix(fp32, rows, cute.sym_int32()),
        cute.runtime.make_fake_tensor(cutlass.Int32, (cute.sym_int32(),), (1,), assumed_align=4),
        *(cutlass.Int32(0) for _ in range(5)),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    return cute.compile(BlockGemm(gated=gated), *arguments, options=options)


KERNELS = {
    gated: CompiledKernel(f"block_gemm_{name}", "sm_90a", partial(_compile, gated))
    for gated, name in ((True, "gated"), (False, "plain"))
}


@cache
def load_kernel(gated: bool) -> Callable[..., None]:
    """Return the kernel. It is loaded or compiled once per process."""
    return KERNELS[gated].load_or_compile()


@cache
def count_thread_blocks(device: int) -> int:
    """Return the number of thread blocks to launch: one per SM, rounded down to whole clusters."""
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return num_sms // _CLUSTER_SIZE * _CLUSTER_SIZE
