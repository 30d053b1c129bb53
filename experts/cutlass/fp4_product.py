"""fp4_gemm: a grouped GEMM over nvfp4 rows and weights, with block scales applied by the MMA.

On a GPU it is one launch of `kernels.fp4_gemm`, compiled once per process. On a CPU it is a torch
reference that requires the same shapes, strides and alignment.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from experts.cutlass.compiled_kernels import Kernel
from experts.cutlass.fake_tensors import fake_matrix
from experts.triton.operands import TMA_BYTES
from modular_kernel.errors import DtypeError, LayoutError, ShapeError
from modular_kernel.ops.fp4_rows import TILE_M, Fp4Rows, list_tiles
from modular_kernel.quant import nvfp4
from modular_kernel.quant.scale_layout import from_tiles, tiled_shape
from modular_kernel.quant.scale_tiles import unpack_pairs
from modular_kernel.spec.problem import dtype_name
from modular_kernel.utils.matmul import matmul

# N and K are multiples of 128: a tile has 128 weight rows, and a line of scales covers 128 values.
MULTIPLE = 128


@dataclass(frozen=True)
class Fp4Weights:
    """The weights of all experts in the layout of the GEMM.

    w: (e, N, K / 2) uint8, two e2m1 values per byte.
    scale: (e * N / 128, bytes) uint8, e4m3 in blocks of 128 rows
        (`modular_kernel.quant.scale_layout`).
    factors: (e, matrices) float32, which multiply the sums: one for all rows, or one each for gate
        and up.
    """

    w: torch.Tensor
    scale: torch.Tensor
    factors: torch.Tensor


def fp4_gemm(a: Fp4Rows, b: Fp4Weights, tiles: torch.Tensor, out: torch.Tensor) -> None:
    """out[r] = (a[r] @ w[expert of r]^T) * factor for every row r of every tile.

    a: rows as `quantize_tiles` writes them.
    b: the weights.
    tiles: (3 * max_tiles + 1,) int32, of at most 128 rows each.
    out: (R, N) bfloat16. Rows outside all tiles are not written.

    All tensors are contiguous; N, K and N / matrices are multiples of 128. Meta tensors are only
    checked. Raise ShapeError, LayoutError or DtypeError if a tensor does not meet these conditions.
    """
    check(a, b, tiles, out)
    if out.is_meta:
        return
    if not out.is_cuda:
        fp4_gemm_ref(a, b, tiles, out)
        return
    experts, rows_b, half = b.w.shape
    load_kernel()(
        a.q_RK,
        b.w.view(experts * rows_b, half),
        a.scale,
        b.scale,
        b.factors,
        out,
        tiles,
        tiles.numel() // 3,
        rows_b,
        rows_b // b.factors.shape[1],
        num_blocks(out.device.index),
    )


def check(a: Fp4Rows, b: Fp4Weights, tiles: torch.Tensor, out: torch.Tensor) -> None:
    """Raise ShapeError, LayoutError or DtypeError unless all tensors are as `fp4_gemm` requires."""
    if b.w.dim() != 3 or b.factors.dim() != 2:
        got, need = (tuple(b.w.shape), tuple(b.factors.shape)), "(e, N, K / 2) and (e, matrices)"
        raise ShapeError("weights and factors", got=got, need=need)
    experts, rows_b, half = b.w.shape
    depth, matrices, max_tiles = 2 * half, b.factors.shape[-1], tiles.numel() // 3
    blocks, size = tiled_shape(rows_b, depth // nvfp4.GROUP)
    for name, value in (("depth", depth), ("weight rows", rows_b)):
        if value % MULTIPLE:
            raise ShapeError(name, got=value, need=f"a multiple of {MULTIPLE}")
    if not matrices or rows_b % (matrices * MULTIPLE):
        need = f"{rows_b} rows in matrices of a multiple of {MULTIPLE}"
        raise ShapeError("factors", got=f"{matrices} for {rows_b} rows", need=need)
    u8, fp32 = torch.uint8, torch.float32
    for name, tensor, shape, dtype in (
        ("rows", a.q_RK, (out.shape[0], half), u8),
        ("scales of rows", a.scale, (max_tiles, size), u8),
        ("weights", b.w, (experts, rows_b, half), u8),
        ("scales of weights", b.scale, (experts * blocks, size), u8),
        ("factors", b.factors, (experts, matrices), fp32),
        ("results", out, (out.shape[0], rows_b), torch.bfloat16),
        ("tiles", tiles, (3 * max_tiles + 1,), torch.int32),
    ):
        if tuple(tensor.shape) != shape:
            raise ShapeError(name, got=tuple(tensor.shape), need=shape)
        if tensor.dtype is not dtype:
            raise DtypeError(name, got=dtype_name(tensor.dtype), need=dtype_name(dtype))
        if not tensor.is_contiguous():
            raise LayoutError(name, got=f"strides {tensor.stride()}", need="contiguous")
        alignment = TMA_BYTES if dtype.itemsize < fp32.itemsize else fp32.itemsize
        if tensor.data_ptr() % alignment:
            raise LayoutError(name, got=tensor.data_ptr(), need=f"an address on {alignment} bytes")


def fp4_gemm_ref(a: Fp4Rows, b: Fp4Weights, tiles: torch.Tensor, out: torch.Tensor) -> None:
    """Torch reference of `fp4_gemm`: one tile at a time, with float32 sums."""
    experts, rows_b, half = b.w.shape
    groups, matrices = 2 * half // nvfp4.GROUP, b.factors.shape[1]
    unit_scale = torch.ones(1, dtype=torch.float32, device=out.device)
    w_scale = from_tiles(b.scale.view(experts, -1, b.scale.shape[1]), rows_b, groups)
    values: dict[int, torch.Tensor] = {}
    for tile, (expert, first, end) in enumerate(list_tiles(tiles)):
        if expert not in values:
            codes = unpack_pairs(b.w[expert], 1)
            values[expert] = nvfp4.dequantize(codes, w_scale[expert].view(_E4M3), unit_scale)
        rows = slice(first, min(first + TILE_M, end))
        scale = from_tiles(a.scale[tile, None], rows.stop - first, groups).view(_E4M3)
        x = nvfp4.dequantize(unpack_pairs(a.q_RK[rows], 1), scale, unit_scale)
        factors = b.factors[expert].repeat_interleave(rows_b // matrices)
        out[rows] = (matmul(x, values[expert].T) * factors).to(out.dtype)


_E4M3 = torch.float8_e4m3fn


def _compile(options: str) -> Any:
    """Compile the kernel, which takes a few seconds and needs no GPU.

    The result takes tensors of any size and launches on torch's current stream.
    """
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream

    from experts.cutlass.kernels.fp4_gemm import Fp4Gemm

    rows, half, size = cute.sym_int32(), cute.sym_int32(divisibility=MULTIPLE // 2), cute.sym_int32
    u8, fp32 = cutlass.Uint8, cutlass.Float32
    scales = size(divisibility=2048)
    arguments = (
        fake_matrix(u8, rows, half),
        fake_matrix(u8, size(), half),
        fake_matrix(u8, size(), scales),
        fake_matrix(u8, size(), scales),
        fake_matrix(fp32, size(), size()),
        fake_matrix(cutlass.BFloat16, rows, size(divisibility=MULTIPLE)),
        cute.runtime.make_fake_tensor(cutlass.Int32, (size(),), (1,), assumed_align=4),
        *(cutlass.Int32(0) for _ in range(4)),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    return cute.compile(Fp4Gemm(), *arguments, options=options)


KERNEL = Kernel("fp4_gemm", "sm_100a", _compile)


@cache
def load_kernel() -> Callable[..., None]:
    """Return the kernel, which is loaded or compiled once per process."""
    return KERNEL.get()


@cache
def num_blocks(device: int) -> int:
    """Return the number of thread blocks: one per SM."""
    return torch.cuda.get_device_properties(device).multi_processor_count
