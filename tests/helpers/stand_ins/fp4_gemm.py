"""The nvfp4 product as its kernel computes it, block by block, by the addresses that it takes.

Loads are TMA's: rows and columns behind a matrix are zeros. Scales are read from bytes where the
instruction looks for them. A result that is written twice, or by nobody, is an error; so is a tile
that reaches into another expert's rows, and what a launch would not be given.
"""

import torch

TILE_M, TILE_N, DEPTH, GROUP_M, PROGRAMS = 128, 128, 256, 8, 3
STEP_BYTES = 2048
VALUES = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def require(holds, what):
    if not holds:
        raise RuntimeError(f"fp4_gemm: {what}")


def fp4_gemm(a, b, tiles, out):
    """As experts.cutlass.fp4_product.fp4_gemm."""
    named = _described(a, b, tiles, out)
    experts, rows_b, half = b.w.shape
    flat, steps = b.w.view(experts * rows_b, half), -(-2 * half // DEPTH)
    matrix_rows = rows_b // b.factors.shape[1]
    times = torch.zeros(out.shape, dtype=torch.int8)
    num_m, num_n = len(named), -(-rows_b // TILE_N)
    for block in range(PROGRAMS):
        for index in range(block, num_m * num_n, PROGRAMS):
            m, n = tile_at(index, num_m, num_n)
            expert, row, end = named[m]
            row_b = expert * rows_b + n * TILE_N
            sums = torch.zeros(TILE_M, TILE_N)
            for k in range(steps):
                x = _values(a.q_RK, row, k) * _scales(a.scale[m], k)
                w = _values(flat, row_b, k) * _scales(b.scale[row_b // TILE_N], k)
                sums += x @ w.T
            factor = b.factors[expert, n * TILE_N // matrix_rows]
            rows, columns = slice(row, min(row + TILE_M, end)), slice(n * TILE_N, (n + 1) * TILE_N)
            out[rows, columns] = (sums * factor).bfloat16()[: rows.stop - row]
            times[rows, columns] += 1
    inside = torch.zeros(len(out), dtype=torch.int8)
    for _, row, end in named:
        inside[row : min(row + TILE_M, end)] = 1
    require(torch.equal(times, inside[:, None].expand_as(times)), "every result once")


def tile_at(index, num_m, num_n):
    """As the kernel walks."""
    per_group = GROUP_M * num_n
    first = index // per_group * GROUP_M
    size = min(num_m - first, GROUP_M)
    within = index % per_group
    return first + within % size, within // size


def _values(q, row, step):
    """(128, 256) values from a row and a step on, as one load of TMA brings them."""
    box = torch.zeros(TILE_M, DEPTH // 2, dtype=torch.uint8)
    part = q[row : row + TILE_M, step * DEPTH // 2 : (step + 1) * DEPTH // 2]
    box[: part.shape[0], : part.shape[1]] = part
    return VALUES[torch.stack([box & 15, box >> 4], 2).flatten(1).long()]


def _scales(line, step):
    """(128, 256): of each value its scale, which lies in one of four blocks of 512 bytes."""
    row, group = torch.arange(128)[:, None], torch.arange(DEPTH // 16)[None, :]
    at = group // 4 * 512 + row % 32 * 16 + row // 32 * 4 + group % 4
    part = line[step * STEP_BYTES : (step + 1) * STEP_BYTES]
    return part[at].view(torch.float8_e4m3fn).float().repeat_interleave(16, 1)


def _described(a, b, tiles, out):
    """Refuse what the kernel could not take. Returns experts, first rows and ends of the tiles."""
    require(b.w.dim() == 3, "weights by expert")
    experts, rows_b, half = b.w.shape
    require(2 * half % 128 == 0, "K is a multiple of 128")
    require(rows_b % TILE_N == 0, "N is a multiple of 128")
    steps, max_tiles = -(-2 * half // DEPTH), tiles.numel() // 3
    matrices = b.factors.shape[1]
    require(rows_b % (matrices * TILE_N) == 0, "a tile's columns are of one matrix")
    for name, tensor, dtype, shape in (
        ("rows", a.q_RK, torch.uint8, (len(out), half)),
        ("scales of rows", a.scale, torch.uint8, (max_tiles, steps * STEP_BYTES)),
        ("weights", b.w, torch.uint8, (experts, rows_b, half)),
        ("scales of weights", b.scale, torch.uint8,
         (experts * rows_b // TILE_N, steps * STEP_BYTES)),
        ("factors", b.factors, torch.float32, (experts, matrices)),
        ("results", out, torch.bfloat16, (len(out), rows_b)),
        ("tiles", tiles, torch.int32, (3 * max_tiles + 1,)),
    ):  # fmt: skip
        require(tensor.dtype is dtype, f"{name} are {dtype}, not {tensor.dtype}")
        require(tuple(tensor.shape) == shape, f"{name} are {shape}, not {tuple(tensor.shape)}")
        require(tensor.is_contiguous(), f"{name} are contiguous")
        least = 4 if name in ("factors", "tiles") else 16
        require(tensor.data_ptr() % least == 0, f"{name} begin on {least} bytes")
    require(not (b.scale & 0x80).any(), "scales of weights have no sign")
    count = int(tiles[-1])
    require(0 <= count <= max_tiles, f"at most {max_tiles} tiles, not {count}")
    named = tiles[: 3 * max_tiles].view(3, -1)[:, :count].T.tolist()
    of_expert, behind = {}, 0
    for expert, row, end in named:
        require(0 <= expert < experts, f"expert {expert} is one of {experts}")
        require(0 <= row < end <= len(out), f"rows {row} to {end} are some of {len(out)}")
        require(of_expert.setdefault(expert, end) == end, "one end of an expert")
        require(row >= behind, "tiles in order, none over another")
        behind = min(row + TILE_M, end)
    for tile, (_, row, end) in enumerate(named):
        _check_scales(a.scale[tile], min(TILE_M, end - row), 2 * half // 16)
    return named


def _check_scales(line, rows, groups):
    """No scale of a row or group that is not there may reach a product: it may be NaN."""
    row, group = torch.arange(128)[:, None], torch.arange(len(line) // 128)[None, :]
    at = group // 16 * STEP_BYTES + group % 16 // 4 * 512
    at = at + row % 32 * 16 + row // 32 * 4 + group % 4
    padding = (group >= groups).expand_as(at) | (row >= rows)
    require(not line[at[padding]].any(), "scales of padding are 0")
