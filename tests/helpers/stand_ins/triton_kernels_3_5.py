"""A stand-in for the ragged GEMM of triton_kernels 3.5, computed in float32 on a CPU.

As in the library, each program computes the tile in its entry of a table, and rows outside of all
tiles are not written.
"""

from dataclasses import dataclass

import torch

BF16, INT32 = torch.bfloat16, torch.int32
BLOCK_SIZES = (16, 32, 64, 128)
launched_block_sizes = []


def require(condition, message):
    assert condition, message


@dataclass
class PrecisionConfig:
    weight_scale: torch.Tensor = None


@dataclass
class ExptData:
    hist: torch.Tensor
    token_offs_raw: torch.Tensor
    token_offs_pad: dict
    block_pid_map: dict

    def __post_init__(self):
        all_tables = (*self.token_offs_pad.values(), *self.block_pid_map.values())
        for table in (self.hist, self.token_offs_raw, *all_tables):
            require(table.dtype is INT32, "int32 tables")


@dataclass
class RoutingData:
    gate_scal: torch.Tensor
    expt_hist: torch.Tensor
    n_expts_tot: int
    n_expts_act: int
    expt_data: ExptData = None
    expected_tokens_per_expt: int = None

    def n_blocks(self, n_rows, block_m):
        if n_rows <= self.n_expts_tot:
            return n_rows
        return -(-max(n_rows - self.n_expts_tot + 1, 0) // block_m) + self.n_expts_tot - 1


def matmul_ogs(
    x, w, bias, routing_data=None, gather_indx=None, scatter_indx=None, precision_config=None,
    betas=None, gammas=None, out_alpha=None, y=None, fused_activation=None, epilogue=None,
):  # fmt: skip
    unused = (gather_indx, scatter_indx, betas, gammas, out_alpha, fused_activation, epilogue)
    require(all(argument is None for argument in unused), "no other options")
    require(x.dim() == 2 and w.dim() == 3, "x of (M, K) and w of (E, K, N)")
    require(
        x.data_ptr() % 16 == 0 and w.data_ptr() % 16 == 0,
        "base addresses aligned to 16 bytes for TMA",
    )
    if precision_config is not None:
        w = _dequantize_mxfp4(w, precision_config.weight_scale)
    require(x.dtype is BF16 and w.dtype is BF16, "bfloat16")
    (rows, depth), (experts, k, columns) = x.shape, w.shape
    require(k == depth, "x and w with the same K")
    require(x.stride(1) == 1, "values of a row side by side")
    require(1 in w.stride()[1:], "weights side by side along K or along N")
    require(y is not None and tuple(y.shape) == (1, rows, columns), "y of (1, M, N)")
    require(y.dtype is BF16 and y.stride(-1) == 1, "y of x's dtype")
    if bias is not None:
        _check_bias(bias, experts, columns)
    tables = routing_data.expt_data
    require(routing_data.n_expts_tot == experts, "as many experts as weights")
    require(routing_data.n_expts_act == 1, "a row for each pair")
    require(tuple(tables.hist.shape) == (experts,), "a count for each expert")
    require(
        tuple(tables.token_offs_raw.shape) == (experts + 1,),
        "a first row for each expert, and the end of the rows",
    )
    # The library selects one tile size. Here, successive calls use different sizes.
    block = BLOCK_SIZES[len(launched_block_sizes) % len(BLOCK_SIZES)]
    launched_block_sizes.append(block)
    require(
        set(tables.block_pid_map) == set(BLOCK_SIZES) == set(tables.token_offs_pad),
        "every tile size",
    )
    tiles, programs = tables.token_offs_pad[block], tables.block_pid_map[block]
    require(
        tuple(tiles.shape) == (experts + 1,),
        "a first tile for each expert, and the number of tiles",
    )
    grid = routing_data.n_blocks(rows, block)
    require(programs.numel() >= grid, "a packed tile for each program of the grid")
    _check_tables(tables, tiles, programs[:grid], rows, block)
    starts, counts = tables.token_offs_raw.tolist(), tables.hist.tolist()
    for packed_tile in programs[:grid].tolist():
        if packed_tile == -1:
            continue
        expert, tile = packed_tile & 0xFFFF, packed_tile >> 16
        first, last = tile * block, min((tile + 1) * block, counts[expert])
        selected = slice(starts[expert] + first, starts[expert] + last)
        sums = x[selected].float() @ w[expert].float()
        if bias is not None:
            sums += bias[expert]
        y[0, selected] = sums.bfloat16()
    return y[0]


def _check_bias(bias, experts, columns):
    """Check a bias (e, N), of which kernels only take the address and the stride of an expert."""
    require(bias.dtype is torch.float32, "biases of float32, without which kernels do not compile")
    require(tuple(bias.shape) == (experts, columns), "a bias for each expert and column")
    require(bias.stride(1) == 1, "biases of an expert side by side")


def _dequantize_mxfp4(w, scale):
    """Dequantize codes (e, K / 2, N), packed along K, with exponents (e, K / 32, N).

    Returns (e, K, N) bfloat16. As in kernels, a scale of 255 is infinity, not NaN.
    """
    require(w.dtype is torch.uint8 and scale is not None, "e2m1 codes in bytes, with scales")
    require(scale.dtype is torch.uint8, "E8M0 scales in bytes")
    require(w.stride(1) == 1, "codes packed along K")
    depth = 2 * w.shape[1]
    require(
        tuple(scale.shape) == (len(w), -(-depth // 32), w.shape[2]),
        "a scale for every 32 values along K",
    )
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = torch.stack((w & 15, w >> 4), 2).flatten(1, 2).long()
    dequantized = torch.where(codes > 7, -values[codes & 7], values[codes & 7])
    dequantized = dequantized * torch.exp2(scale.float() - 127).repeat_interleave(32, 1)[:, :depth]
    return dequantized.bfloat16()


def _check_tables(tables, tiles, programs, rows, block):
    """Check the tables, which kernels read without checks."""
    counts, starts = tables.hist.long(), tables.token_offs_raw.long()
    require(bool((counts >= 0).all()) and int(counts.sum()) <= rows, "counts within the rows")
    require(torch.equal(starts.diff(), counts) and starts[0] == 0, "starts from counts")
    expected_tiles = torch.nn.functional.pad((-(-counts // block)).cumsum(0), (1, 0))
    require(torch.equal(tiles.long(), expected_tiles), "tiles from counts")
    actual = sorted(packed_tile for packed_tile in programs.tolist() if packed_tile != -1)
    expected = sorted(
        (b << 16) | e for e, n in enumerate(counts.tolist()) for b in range(-(-n // block))
    )
    require(actual == expected, "each tile has one program")
