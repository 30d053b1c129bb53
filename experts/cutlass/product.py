"""block_gemm: the grouped product of fp8 rows and weights, with a scale for each block.

On a GPU it is one launch of experts.cutlass.kernels.block_gemm, compiled once a process and form;
on a CPU its twin in plain torch, which asks for the same shapes, strides and alignment.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from experts.cutlass.compiled_kernels import Kernel
from experts.cutlass.fake_tensors import any_matrix
from experts.triton.operands import TMA_BYTES, Product
from modular_kernel.errors import LayoutError, ShapeError
from modular_kernel.ops.activation import gated_activation_ref
from modular_kernel.ops.quantize import Quantized, dequantize_rows, quantize_rows_ref
from modular_kernel.ops.sort import Sorted
from modular_kernel.quant.quantized_weights import dequantize
from modular_kernel.spec.problem import Problem
from modular_kernel.utils.matmul import matmul

TILE_M = 128  # rows of a tile
BLOCK = 128  # values that share a scale, along the depth and across weight rows
_COLUMNS = {True: 128, False: 256}  # of a tile's results: of gate and up rows, and of plain ones
_CLUSTER = 2  # tiles side by side that share rows


def block_gemm(
    a: Quantized, product: Product, problem: Problem, order: Sorted, out: Quantized | torch.Tensor
) -> None:
    """out[r] = a[r] @ w[expert of r]^T for every row r of every tile of `order`, of 128 rows each.

    a: q (R, K) float8_e4m3fn, scale (R, K / 128) float32. product: w (e, N, K) float8_e4m3fn, scale
    (e, N / 128, K / 128) float32. All are contiguous, N and K multiples of 128. out: (R, N)
    bfloat16; or, of a product of gate and up rows, q (R, N / 2) and scale of h = silu(gate) * up,
    which is rounded to bfloat16 before it is quantized. Rows past the last tile's end are left as
    they are. Tensors without memory are checked, no more.
    ShapeError and LayoutError where something is otherwise.
    """
    check(a, product, out)
    if a.q_RK.is_meta:
        return
    if not a.q_RK.is_cuda:
        block_gemm_ref(a, product, problem, order, out)
        return
    gated = isinstance(out, Quantized)
    rows = out.q_RK if isinstance(out, Quantized) else out
    experts, rows_b, depth = product.w.shape
    scale = product.scale
    assert scale is not None
    wide = _COLUMNS[gated] * _CLUSTER
    columns = rows.shape[1]
    compiled(gated)(
        a.q_RK.view(torch.uint8),
        product.w.view(experts * rows_b, depth).view(torch.uint8),
        a.scale,
        scale.view(-1, scale.shape[2]),
        rows.view(torch.uint8) if gated else rows,
        out.scale if isinstance(out, Quantized) else a.scale,
        order.tiles,
        order.max_tiles,
        rows_b,
        product.up_row,
        -(-columns // wide) * _CLUSTER,
        _programs(rows.device.index),
    )


def check(a: Quantized, product: Product, out: Quantized | torch.Tensor) -> None:
    """Raise ShapeError unless every tensor lies as `block_gemm` wants it."""
    depth, rows_b = a.q_RK.shape[1], product.w.shape[1]
    groups = depth // BLOCK
    rows = out.q_RK if isinstance(out, Quantized) else out
    columns = rows_b // 2 if isinstance(out, Quantized) else rows_b
    wanted = [
        ("rows", a.q_RK, (rows.shape[0], depth)),
        ("scales of rows", a.scale, (rows.shape[0], groups)),
        ("weights", product.w, (product.w.shape[0], rows_b, depth)),
        ("scales of weights", product.scale, (product.w.shape[0], rows_b // BLOCK, groups)),
        ("results", rows, (rows.shape[0], columns)),
    ]
    if isinstance(out, Quantized):
        wanted.append(("scales of results", out.scale, (rows.shape[0], columns // BLOCK)))
    for name, tensor, shape in wanted:
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
    a: Quantized, product: Product, problem: Problem, order: Sorted, out: Quantized | torch.Tensor
) -> None:
    """Torch twin of `block_gemm`: one tile after the other, sums in float32."""
    named = order.tiles[: 3 * order.max_tiles].view(3, -1)[:, : int(order.tiles[-1])]
    weights: dict[int, torch.Tensor] = {}
    for expert, first, end in named.T.tolist():
        tile = slice(first, min(first + TILE_M, end))
        if expert not in weights:
            assert product.scale is not None
            one = slice(expert, expert + 1)
            (weights[expert],) = dequantize(
                product.w[one], product.scale[one], None, problem.scheme
            )
        x = dequantize_rows(a.q_RK[tile], a.scale[tile], problem.scheme)
        values = matmul(x, weights[expert].T)
        if isinstance(out, Quantized):
            h = gated_activation_ref(values, problem.act).to(problem.dtype)
            part = Quantized(out.q_RK[tile], out.scale[tile])
            quantize_rows_ref(h, problem.scheme, out=part)
        else:
            out[tile] = values.to(out.dtype)


def _compile(gated: bool, options: str) -> Any:
    """Compile the kernel, about two seconds; no GPU is needed for it.

    The result takes tensors of any size, and launches on torch's current stream.
    """
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream

    from experts.cutlass.kernels.block_gemm import BlockGemm

    rows, groups = cute.sym_int32(), cute.sym_int32()
    depth, columns = cute.sym_int32(divisibility=BLOCK), cute.sym_int32(divisibility=BLOCK)
    byte, number = cutlass.Uint8, cutlass.Float32
    arguments = (
        any_matrix(byte, rows, depth),
        any_matrix(byte, cute.sym_int32(), depth),
        any_matrix(number, rows, groups),
        any_matrix(number, cute.sym_int32(), groups),
        any_matrix(byte if gated else cutlass.BFloat16, rows, columns),
        any_matrix(number, rows, cute.sym_int32()),
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
def compiled(gated: bool) -> Callable[..., None]:
    """Return the kernel for this process, loaded or compiled."""
    return KERNELS[gated].get()


@cache
def _programs(device: int) -> int:
    """Return how many blocks run at a time: whole clusters, one block a multiprocessor."""
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return count // _CLUSTER * _CLUSTER
