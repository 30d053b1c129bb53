"""block_gemm: a grouped GEMM over fp8 rows and weights, with one scale per block.

On a GPU it is one launch of `kernels.block_gemm`, compiled once per process and variant (gated or
plain). On a CPU it is a torch reference that requires the same shapes, strides and alignment.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from experts.cutlass.compiled_kernels import Kernel
from experts.cutlass.fake_tensors import fake_matrix
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
_COLUMNS = {True: 128, False: 256}  # output columns per tile, by `gated`
_CLUSTER = 2  # neighboring column tiles whose thread blocks share the loads of rows


def block_gemm(
    a: QuantizedRows,
    product: GemmOperands,
    problem: Problem,
    order: SortedPairs,
    out: QuantizedRows | torch.Tensor,
) -> None:
    """out[r] = a[r] @ w[expert of r]^T for every row r of every 128-row tile of `order`.

    a: q (R, K) float8_e4m3fn and scale (R, K / 128) float32.
    product: w (e, N, K) float8_e4m3fn and scale (e, N / 128, K / 128) float32.
    out: (R, N) bfloat16. Or, for gate and up rows, q (R, N / 2) and scale of h = silu(gate) * up,
        which is rounded to bfloat16 before it is quantized. Rows past the end of the last tile are
        not written.

    All tensors are contiguous; N and K are multiples of 128. Meta tensors are only checked. Raise
    ShapeError or LayoutError if a tensor does not meet these conditions.
    """
    check(a, product, out)
    if a.q_RK.is_meta:
        return
    if not a.q_RK.is_cuda:
        block_gemm_ref(a, product, problem, order, out)
        return
    gated = isinstance(out, QuantizedRows)
    rows = out.q_RK if isinstance(out, QuantizedRows) else out
    experts, rows_b, depth = product.w.shape
    scale = product.scale
    assert scale is not None
    cluster_columns = _COLUMNS[gated] * _CLUSTER
    columns = rows.shape[1]
    load_kernel(gated)(
        a.q_RK.view(torch.uint8),
        product.w.view(experts * rows_b, depth).view(torch.uint8),
        a.scale,
        scale.view(-1, scale.shape[2]),
        rows.view(torch.uint8) if gated else rows,
        out.scale if isinstance(out, QuantizedRows) else a.scale,
        order.tiles,
        order.max_tiles,
        rows_b,
        product.up_row,
        -(-columns // cluster_columns) * _CLUSTER,
        num_blocks(rows.device.index),
    )


def check(a: QuantizedRows, product: GemmOperands, out: QuantizedRows | torch.Tensor) -> None:
    """Raise ShapeError or LayoutError unless all tensors are as `block_gemm` requires."""
    depth, rows_b = a.q_RK.shape[1], product.w.shape[1]
    groups = depth // BLOCK
    rows = out.q_RK if isinstance(out, QuantizedRows) else out
    columns = rows_b // 2 if isinstance(out, QuantizedRows) else rows_b
    expected = [
        ("rows", a.q_RK, (rows.shape[0], depth)),
        ("scales of rows", a.scale, (rows.shape[0], groups)),
        ("weights", product.w, (product.w.shape[0], rows_b, depth)),
        ("scales of weights", product.scale, (product.w.shape[0], rows_b // BLOCK, groups)),
        ("results", rows, (rows.shape[0], columns)),
    ]
    if isinstance(out, QuantizedRows):
        expected.append(("scales of results", out.scale, (rows.shape[0], columns // BLOCK)))
    for name, tensor, shape in expected:
        if tensor is None or tuple(tensor.shape) != shape:
            raise ShapeError(name, got=None if tensor is None else tuple(tensor.shape), need=shape)
        if not tensor.is_contiguous():
            raise LayoutError(name, got=f"strides {tensor.stride()}", need="contiguous")
    for name, size in (("depth", depth), ("weight rows", rows_b)):
        if size % BLOCK:
            raise ShapeError(name, got=size, need=f"a multiple of {BLOCK}")
    for name, tensor in (("rows", a.q_RK), ("weights", product.w), ("results", rows)):
        if tensor.data_ptr() % TMA_BYTES:
            raise LayoutError(name, got=tensor.data_ptr(), need=f"an address on {TMA_BYTES} bytes")


def block_gemm_ref(
    a: QuantizedRows,
    product: GemmOperands,
    problem: Problem,
    order: SortedPairs,
    out: QuantizedRows | torch.Tensor,
) -> None:
    """Torch reference of `block_gemm`: one tile at a time, with float32 sums."""
    tiles = order.tiles[: 3 * order.max_tiles].view(3, -1)[:, : int(order.tiles[-1])]
    weights: dict[int, torch.Tensor] = {}
    for expert, first, end in tiles.T.tolist():
        tile = slice(first, min(first + TILE_M, end))
        if expert not in weights:
            assert product.scale is not None
            index = slice(expert, expert + 1)
            (weights[expert],) = dequantize(
                product.w[index], product.scale[index], None, problem.scheme
            )
        x = dequantize_rows(a.q_RK[tile], a.scale[tile], problem.scheme)
        values = matmul(x, weights[expert].T)
        if isinstance(out, QuantizedRows):
            h = gated_activation_ref(values, problem.act).to(problem.dtype)
            out_tile = QuantizedRows(out.q_RK[tile], out.scale[tile])
            quantize_rows_ref(h, problem.scheme, out=out_tile)
        else:
            out[tile] = values.to(out.dtype)


def _compile(gated: bool, options: str) -> Any:
    """Compile the kernel, which takes about two seconds and needs no GPU.

    The result takes tensors of any size and launches on torch's current stream.
    """
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream

    from experts.cutlass.kernels.block_gemm import BlockGemm

    rows, groups = cute.sym_int32(), cute.sym_int32()
    depth, columns = cute.sym_int32(divisibility=BLOCK), cute.sym_int32(divisibility=BLOCK)
    u8, fp32 = cutlass.Uint8, cutlass.Float32
    arguments = (
        fake_matrix(u8, rows, depth),
        fake_matrix(u8, cute.sym_int32(), depth),
        fake_matrix(fp32, rows, groups),
        fake_matrix(fp32, cute.sym_int32(), groups),
        fake_matrix(u8 if gated else cutlass.BFloat16, rows, columns),
        fake_matrix(fp32, rows, cute.sym_int32()),
        cute.runtime.make_fake_tensor(cutlass.Int32, (cute.sym_int32(),), (1,), assumed_align=4),
        *(cutlass.Int32(0) for _ in range(5)),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    return cute.compile(BlockGemm(gated=gated), *arguments, options=options)


KERNELS = {
    gated: Kernel(f"block_gemm_{name}", "sm_90a", partial(_compile, gated))
    for gated, name in ((True, "gated"), (False, "plain"))
}


@cache
def load_kernel(gated: bool) -> Callable[..., None]:
    """Return the kernel, which is loaded or compiled once per process."""
    return KERNELS[gated].get()


@cache
def num_blocks(device: int) -> int:
    """Return the number of thread blocks: one per SM, in whole clusters."""
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return count // _CLUSTER * _CLUSTER
