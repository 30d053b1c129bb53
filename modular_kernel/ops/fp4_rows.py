"""nvfp4 quantization of rows for block-scaled GEMMs, with scales in their tiled layout.

nvfp4 stores e2m1 values, with an e4m3 scale per 16 adjacent columns and a float32 global scale per
expert. A tile has up to 128 rows of one expert. The scales of a tile are stored together, in the
order in which the tensor core reads them (`modular_kernel.quant.scale_layout`).

A list of tiles is an int32 tensor in the format of `modular_kernel.ops.sort.SortedPairs.tiles`:
three arrays with the local expert of each tile, its first row, and the end of the expert's rows,
followed by the number of tiles.
"""

from dataclasses import dataclass

import torch

from modular_kernel.errors import DtypeError, LayoutError, ShapeError
from modular_kernel.ops.activation import (
    activation_constants,
    gated_activation_ref,
    get_gate_up_layout,
)
from modular_kernel.ops.count import next_power_of_2
from modular_kernel.quant import nvfp4, scale_layout
from modular_kernel.quant.scale_tiles import pack_pairs
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.runtime import use_triton
from modular_kernel.spec.problem import ActivationSpec, dtype_name
from modular_kernel.workspace import BufferSpec, Workspace

TILE_M = scale_layout.ROWS
_COLUMNS_PER_PROGRAM = 256
_PROGRAMS_PER_TILE = 4  # each handles a quarter of the rows
_DTYPES = {
    "rows": torch.uint8,
    "scales": torch.uint8,
    "tiles": torch.int32,
    "scales of experts": torch.float32,
    "sources of rows": torch.int32,
}


@dataclass(frozen=True)
class Fp4Rows:
    """Rows that are quantized to nvfp4.

    q_RK: (R, K / 2) uint8, two e2m1 values per byte, the even value in the low nibble.
    scale: (max_tiles, bytes) uint8, the e4m3 scales of each tile.
    """

    q_RK: torch.Tensor
    scale: torch.Tensor


def fp4_specs(prefix: str, rows: int, columns: int, max_tiles: int) -> dict[str, BufferSpec]:
    """Return the specs of the buffers of `take_fp4`. Sizes grow with rows and max_tiles."""
    _, bytes_per_tile = scale_layout.tiled_shape(TILE_M, columns // nvfp4.GROUP)
    return {
        f"{prefix}_q": BufferSpec((rows, columns // 2), torch.uint8),
        f"{prefix}_scale": BufferSpec((max_tiles, bytes_per_tile), torch.uint8),
    }


def take_fp4(workspace: Workspace, prefix: str, rows: int, columns: int, max_tiles: int) -> Fp4Rows:
    """Return views of the workspace buffers that `fp4_specs` declares."""
    specs = fp4_specs(prefix, rows, columns, max_tiles)
    return Fp4Rows(*(workspace.take(name, spec.shape) for name, spec in specs.items()))


def quantize_tiles(
    x: torch.Tensor,
    tiles: torch.Tensor,
    scale_e: torch.Tensor,
    *,
    out: Fp4Rows,
    source_R: torch.Tensor | None = None,
    act: ActivationSpec | None = None,
) -> None:
    """Quantize the rows of every tile, in one launch on a GPU.

    Row r of the output is the quantized x[r], or x[source_R[r]] if source_R is given. If act is
    given, it is applied before quantization, and its result is rounded to the dtype of x. Output
    rows that do not belong to a tile are not changed. In the last tile of an expert, the scales of
    rows past the end are 0.

    x: (T, N) 16-bit or 32-bit floating-point values, with contiguous rows. N is 2 K before a gated
        activation, and K otherwise.
    tiles: (3 * max_tiles + 1,) int32, the list of tiles.
    scale_e: (e,) float32, the global scale of each expert.
    out: output, the quantized rows.
    source_R: (R,) int32, the row of x that each row is read from; None means the same row.
    act: an activation to apply before quantization, or None.

    Raises ShapeError, LayoutError or DtypeError for invalid arguments.
    """
    columns = 2 * out.q_RK.shape[1]
    max_tiles = _check_quantize_tiles(x, tiles, scale_e, out, source_R, act)
    if not max_tiles:
        return
    if not use_triton(x):
        quantize_tiles_ref(x, tiles, scale_e, out=out, source_R=source_R, act=act)
        return
    from modular_kernel.ops.kernels.fp4_rows import quantize_tiles_kernel

    constants: dict[str, object] = {
        "ACTIVATION": "identity",
        "ACTIVATION_ALPHA": 0.0,
        "ACTIVATION_LIMIT": 0.0,
    }
    gate_stride, up_offset = 1, 0
    if act is not None:
        constants = activation_constants(act)
        gate_stride, up_offset = get_gate_up_layout(act, columns)
    launch(
        quantize_tiles_kernel,
        (_PROGRAMS_PER_TILE * max_tiles, -(-columns // _COLUMNS_PER_PROGRAM)),
        x_ptr=x,
        source_row_ptr=tiles if source_R is None else source_R,
        tiles_ptr=tiles,
        global_scale_ptr=scale_e,
        q_ptr=out.q_RK,
        scale_ptr=out.scale,
        num_columns=columns,
        max_tiles=max_tiles,
        stride_x=x.stride(0),
        stride_q=out.q_RK.stride(0),
        stride_scale=out.scale.stride(0),
        up_offset=up_offset,
        GATE_STRIDE=gate_stride,
        HAS_SOURCE_ROWS=source_R is not None,
        **constants,
    )


def _check_quantize_tiles(
    x: torch.Tensor,
    tiles: torch.Tensor,
    scale_e: torch.Tensor,
    out: Fp4Rows,
    source_R: torch.Tensor | None,
    act: ActivationSpec | None,
) -> int:
    """Check the arguments of `quantize_tiles`. Returns the maximum number of tiles."""
    (rows, bytes_per_row), max_tiles = out.q_RK.shape, tiles.numel() // 3
    columns = 2 * bytes_per_row
    input_columns = 2 * columns if act is not None and act.gated else columns
    bytes_per_tile = scale_layout.tiled_shape(TILE_M, columns // nvfp4.GROUP)[1]
    if columns % nvfp4.GROUP:
        raise ShapeError("columns", got=columns, need=f"a multiple of {nvfp4.GROUP}")
    if x.shape[1] != input_columns:
        raise ShapeError(
            "rows to quantize", got=tuple(x.shape), need=f"(T, N) with N = {input_columns}"
        )
    if source_R is None and len(x) < rows:
        raise ShapeError("rows to quantize", got=len(x), need=f"at least {rows}")
    if tuple(out.scale.shape) != (max_tiles, bytes_per_tile):
        got = tuple(out.scale.shape)
        raise ShapeError("scales of tiles", got=got, need=(max_tiles, bytes_per_tile))
    for name, tensor in (("rows to quantize", x), ("rows", out.q_RK), ("scales", out.scale)):
        if tensor.shape[1] > 1 and tensor.stride(1) != 1:
            raise LayoutError(name, got=f"strides {tensor.stride()}", need="contiguous rows")
    _check_vectors(tiles, scale_e, out, source_R)
    return max_tiles


def _check_vectors(
    tiles: torch.Tensor, scale_e: torch.Tensor, out: Fp4Rows, source_R: torch.Tensor | None
) -> None:
    """Check the one-dimensional tensors, and the dtypes."""
    vectors, rows = {"tiles": tiles, "scales of experts": scale_e}, len(out.q_RK)
    if source_R is not None:
        vectors["sources of rows"] = source_R
        if tuple(source_R.shape) != (rows,):
            raise ShapeError("sources of rows", got=tuple(source_R.shape), need=(rows,))
    if tiles.numel() % 3 != 1:
        need = "3 * max_tiles + 1 values"
        raise ShapeError("tiles", got=tuple(tiles.shape), need=need)
    for name, tensor in vectors.items():
        if tensor.dim() != 1 or not tensor.is_contiguous():
            got = f"{tuple(tensor.shape)}, strides {tensor.stride()}"
            raise LayoutError(name, got=got, need="one contiguous dimension")
    for name, tensor in ({"rows": out.q_RK, "scales": out.scale} | vectors).items():
        dtype = _DTYPES[name]
        if tensor.dtype is not dtype:
            raise DtypeError(name, got=dtype_name(tensor.dtype), need=dtype_name(dtype))


def quantize_tiles_ref(
    x: torch.Tensor,
    tiles: torch.Tensor,
    scale_e: torch.Tensor,
    *,
    out: Fp4Rows,
    source_R: torch.Tensor | None = None,
    act: ActivationSpec | None = None,
) -> None:
    """Torch reference of `quantize_tiles`."""
    for tile, (expert, first, end) in enumerate(list_tiles(tiles)):
        rows = slice(first, min(first + TILE_M, end))
        values = x[rows] if source_R is None else x[source_R[rows].long()]
        if act is not None:
            values = gated_activation_ref(values, act).to(x.dtype)
        codes, scale = nvfp4.quantize(values, 1 / scale_e[expert])
        out.q_RK[rows] = pack_pairs(codes, 1)
        out.scale[tile] = scale_layout.to_tiles(scale)[0]


def list_tiles(tiles: torch.Tensor) -> list[tuple[int, int, int]]:
    """Return (expert, first row, end row) of every tile. Synchronizes with the GPU."""
    count, max_tiles = int(tiles[-1]), tiles.numel() // 3
    return [tuple(tile) for tile in tiles[: 3 * max_tiles].view(3, -1)[:, :count].T.tolist()]


# ------------------------------------------------------------------------------ scales of weights


def tiled_scale_spec(experts: int, rows: int, groups: int) -> BufferSpec:
    """Return the spec of the buffer that `tile_scales` writes for scales (e, N, G)."""
    tiles, bytes_per_tile = scale_layout.tiled_shape(rows, groups)
    return BufferSpec((experts * tiles, bytes_per_tile), torch.uint8)


def tile_scales(scale_eNG: torch.Tensor, out: torch.Tensor) -> None:
    """Convert scales of weights to the tiled layout, in tiles of 128 rows, in one launch.

    scale_eNG: (e, N, G), a one-byte dtype, contiguous.
    out: output, (e * tiles, bytes_per_tile) uint8, contiguous.

    Raises ShapeError, LayoutError or DtypeError for invalid arguments.
    """
    experts, rows, groups = scale_eNG.shape
    tiles, bytes_per_tile = scale_layout.tiled_shape(rows, groups)
    if tuple(out.shape) != (experts * tiles, bytes_per_tile):
        raise ShapeError(
            "tiled scales", got=tuple(out.shape), need=(experts * tiles, bytes_per_tile)
        )
    for name, tensor in (("scales", scale_eNG), ("tiled scales", out)):
        if not tensor.is_contiguous():
            raise LayoutError(name, got=f"strides {tensor.stride()}", need="contiguous")
        if tensor.element_size() != 1:
            raise DtypeError(name, got=dtype_name(tensor.dtype), need="a one-byte dtype")
    if not use_triton(out):
        out.copy_(scale_layout.to_tiles(scale_eNG).flatten(0, 1))
        return
    from modular_kernel.ops.kernels.fp4_rows import tile_scales_kernel

    launch(
        tile_scales_kernel,
        (experts * tiles, scale_layout.count_steps(groups)),
        scale_ptr=scale_eNG.view(torch.uint8),
        out_ptr=out,
        num_rows=rows,
        num_groups=groups,
        blocks_per_expert=tiles,
        stride_out=out.stride(0),
    )


# ------------------------------------------------------------------------- tiles of batched rows


def batched_tile_specs(experts: int, capacity: int) -> dict[str, BufferSpec]:
    """Return the spec of the buffer of `make_batched_tiles`."""
    tiles = experts * -(-capacity // TILE_M)
    return {"batched_tiles": BufferSpec((3 * tiles + 1,), torch.int32)}


def make_batched_tiles(counts_e: torch.Tensor, capacity: int, workspace: Workspace) -> torch.Tensor:
    """Return the list of tiles of batched rows (e, C), int32, in one launch on a GPU.

    The tiles of expert i cover its first counts_e[i] rows.
    """
    experts = counts_e.numel()
    (name, spec), *_ = batched_tile_specs(experts, capacity).items()
    tiles = workspace.take(name, spec.shape)
    if not use_triton(counts_e):
        make_batched_tiles_ref(counts_e, capacity, out=tiles)
        return tiles
    from modular_kernel.ops.kernels.fp4_rows import make_batched_tiles_kernel

    launch(
        make_batched_tiles_kernel,
        (experts,),
        counts_ptr=counts_e,
        tiles_ptr=tiles,
        num_experts=experts,
        capacity=capacity,
        max_tiles=tiles.numel() // 3,
        BLOCK_EXPERTS=next_power_of_2(experts),
        BLOCK_TILES=next_power_of_2(max(1, -(-capacity // TILE_M))),
    )
    return tiles


def make_batched_tiles_ref(counts_e: torch.Tensor, capacity: int, *, out: torch.Tensor) -> None:
    """Torch reference of `make_batched_tiles`."""
    tile_list = [
        (expert, first, expert * capacity + count)
        for expert, count in enumerate(counts_e.tolist())
        for first in range(expert * capacity, expert * capacity + count, TILE_M)
    ]
    tile_arrays = out[: out.numel() // 3 * 3].view(3, -1)
    tile_arrays[:, : len(tile_list)] = (
        torch.tensor(tile_list, dtype=torch.int32, device="cpu").reshape(-1, 3).T
    )
    out[-1] = len(tile_list)
