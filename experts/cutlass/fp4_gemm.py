"""fp4_gemm: a grouped GEMM over nvfp4 rows and weights. The MMA instructions apply block scales.

On a GPU, fp4_gemm launches the kernel `kernels.fp4_gemm`. On a CPU, it runs a PyTorch reference
that requires the same shapes, strides and alignment.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from experts.cutlass.compiled_kernels import CompiledKernel
from experts.cutlass.fake_tensors import make_fake_matrix
from experts.triton.operands import TMA_BYTES
from modular_kernel.errors import DtypeError, LayoutError, ShapeError
from modular_kernel.ops.fp4_rows import TILE_M, Fp4Rows, list_tiles
from modular_kernel.ops.sort import VALUES_PER_TILE
from modular_kernel.quant import nvfp4
from modular_kernel.quant.scale_layout import from_tiles, tiled_shape
from modular_kernel.quant.scale_tiles import unpack_pairs
from modular_kernel.spec.problem import dtype_name
from modular_kernel.utils.matmul import matmul

# N and K must be multiples of 128, because a tile has 128 weight rows, and a row of the scale
# layout covers 128 elements of K.
DIM_MULTIPLE = 128


@dataclass(frozen=True)
class Fp4Weights:
    """The weights of all experts in the layout of the GEMM.

    w: (e, N, K / 2) uint8, two e2m1 values per byte.
    scale: (e * N / 128, bytes) uint8, the bits of e4m3 scales in blocks of 128 rows
        (`modular_kernel.quant.scale_layout`).
    global_scales: (e, matrices) float32, factors of the accumulators. `matrices` is 2 if gate and
        up rows have separate factors, and 1 otherwise.
    """

    w: torch.Tensor
    scale: torch.Tensor
    global_scales: torch.Tensor


def fp4_gemm(a: Fp4Rows, b: Fp4Weights, tiles: torch.Tensor, out: torch.Tensor) -> None:
    """out[r] = (a[r] @ w[expert of r]^T) * global scale, for every row r of every tile.

    a: the rows, as written by `quantize_tiles`.
    tiles: (3 * max_tiles + 1,) int32, the encoded tile list (see `list_tiles`). A tile has at most
        128 rows.
    out: (R, N) bfloat16. Rows outside all tiles are not written.

    All tensors must be contiguous, and N, K and N / matrices must be multiples of 128. Meta tensors
    are checked, but no kernel is launched on them. Raise ShapeError, LayoutError or DtypeError if a
    requirement is violated.
    """
    check_operands(a, b, tiles, out)
    if out.is_meta:
        return
    if not out.is_cuda:
        fp4_gemm_ref(a, b, tiles, out)
        return
    experts, weight_rows, packed_k = b.w.shape
    load_kernel()(
        a.q_RK,
        b.w.view(experts * weight_rows, packed_k),
        a.scale,
        b.scale,
        b.global_scales,
        out,
        tiles,
        tiles.numel() // VALUES_PER_TILE,
        weight_rows,
        weight_rows // b.global_scales.shape[1],
        count_thread_blocks(out.device.index),
    )


def check_operands(a: Fp4Rows, b: Fp4Weights, tiles: torch.Tensor, out: torch.Tensor) -> None:
    """Raise an InputError if a tensor violates the requirements of `fp4_gemm`."""
    if b.w.dim() != 3 or b.global_scales.dim() != 2:
        got = f"{tuple(b.w.shape)} and {tuple(b.global_scales.shape)}"
        need = "(e, N, K / 2) and (e, matrices)"
        raise ShapeError("weights and global scales", got=got, need=need)
    experts, weight_rows, packed_k = b.w.shape
    k, matrices, max_tiles = (
        2 * packed_k,
        b.global_scales.shape[-1],
        tiles.numel() // VALUES_PER_TILE,
    )
    blocks, block_bytes = tiled_shape(weight_rows, k // nvfp4.GROUP)
    for name, value in (("K", k), ("number of weight rows", weight_rows)):
        if value % DIM_MULTIPLE:
            raise ShapeError(name, got=value, need=f"a multiple of {DIM_MULTIPLE}")
    if not matrices or weight_rows % (matrices * DIM_MULTIPLE):
        got = f"{matrices} per expert, for {weight_rows} weight rows"
        need = f"equal parts of the weight rows, each a multiple of {DIM_MULTIPLE} rows"
        raise ShapeError("global scales", got=got, need=need)
    u8, fp32 = torch.uint8, torch.float32
    for name, tensor, shape, dtype in (
        ("rows", a.q_RK, (out.shape[0], packed_k), u8),
        ("row scales", a.scale, (max_tiles, block_bytes), u8),
        ("weights", b.w, (experts, weight_rows, packed_k), u8),
        ("weight scales", b.scale, (experts * blocks, block_bytes), u8),
        ("global scales", b.global_scales, (experts, matrices), fp32),
        ("output", out, (out.shape[0], weight_rows), torch.bfloat16),
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
            got, need = f"address {tensor.data_ptr()}", f"an address aligned to {alignment} bytes"
            raise LayoutError(name, got=got, need=need)


def fp4_gemm_ref(a: Fp4Rows, b: Fp4Weights, tiles: torch.Tensor, out: torch.Tensor) -> None:
    """PyTorch reference for `fp4_gemm`, which accumulates in float32."""
    experts, weight_rows, packed_k = b.w.shape
    groups, matrices = 2 * packed_k // nvfp4.GROUP, b.global_scales.shape[1]
    unit_scale = torch.ones(1, dtype=torch.float32, device=out.device)
    w_scale = from_tiles(b.scale.view(experts, -1, b.scale.shape[1]), weight_rows, groups)
    weights: dict[int, torch.Tensor] = {}  # dequantized, by expert
    for tile_index, (expert, first, end) in enumerate(list_tiles(tiles)):
        if expert not in weights:
            codes = unpack_pairs(b.w[expert], 1)
            weights[expert] = nvfp4.dequantize(codes, w_scale[expert].view(_E4M3), unit_scale)
        rows = slice(first, min(first + TILE_M, end))
        scale = from_tiles(a.scale[tile_index, None], rows.stop - first, groups).view(_E4M3)
        x = nvfp4.dequantize(unpack_pairs(a.q_RK[rows], 1), scale, unit_scale)
        global_scales = b.global_scales[expert].repeat_interleave(weight_rows // matrices)
        out[rows] = (matmul(x, weights[expert].T) * global_scales).to(out.dtype)


_E4M3 = torch.float8_e4m3fn


def _compile(options: str) -> Any:
    """Compile the kernel, which takes a few seconds and needs no GPU.

    The returned function takes tensors of any size and launches on PyTorch's current stream.
    """
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream

    from experts.cutlass.kernels.fp4_gemm import Fp4Gemm

    sym = cute.sym_int32
    rows, packed_k = sym(), sym(divisibility=DIM_MULTIPLE // 2)
    u8, fp32 = cutlass.Uint8, cutlass.Float32
    scale_bytes = sym(divisibility=2048)
    arguments = (
        make_fake_matrix(u8, rows, packed_k),
        make_fake_matrix(u8, sym(), packed_k),
        make_fake_matrix(u8, sym(), scale_bytes),
        make_fake_matrix(u8, sym(), scale_bytes),
        make_fake_matrix(fp32, sym(), sym()),
        make_fake_matrix(cutlass.BFloat16, rows, sym(divisibility=DIM_MULTIPLE)),
        cute.runtime.make_fake_tensor(cutlass.Int32, (sym(),), (1,), assumed_align=4),
        *(cutlass.Int32(0) for _ in range(4)),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    return cute.compile(Fp4Gemm(), *arguments, options=options)


KERNEL = CompiledKernel("fp4_gemm", "sm_100a", _compile)


@cache
def load_kernel() -> Callable[..., None]:
    """Return the kernel. It is loaded or compiled once per process."""
    return KERNEL.load_or_compile()


@cache
def count_thread_blocks(device: int) -> int:
    """Return the number of thread blocks to launch: one per SM."""
    return torch.cuda.get_device_properties(device).multi_processor_count
