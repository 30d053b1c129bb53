"""A stand-in for the nvfp4 GEMM kernel that computes the same tiles from the same addresses.

As in TMA loads, rows and columns outside of a matrix are zero. Scales are read at the addresses
that the MMA instruction reads. The stand-in raises if an element of the output is written twice or
never, if a tile contains rows of another expert, and for arguments that the kernel does not
support.
"""

import torch

TILE_M, TILE_N, DEPTH, GROUP_M, PROGRAMS = 128, 128, 256, 8, 3
STEP_BYTES = 2048
VALUES = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def require(condition, message):
    if not condition:
        raise RuntimeError(f"fp4_gemm: {message}")


def fp4_gemm(a, b, tiles, out):
    """Compute the same as `experts.cutlass.fp4_gemm.fp4_gemm`."""
    tile_rows = _check_arguments(a, b, tiles, out)
    experts, rows_b, half = b.w.shape
    w_rows, steps = b.w.view(experts * rows_b, half), -(-2 * half // DEPTH)
    matrix_rows = rows_b // b.global_scales.shape[1]
    writes = torch.zeros(out.shape, dtype=torch.int8)
    num_m, num_n = len(tile_rows), -(-rows_b // TILE_N)
    for block in range(PROGRAMS):
        for index in range(block, num_m * num_n, PROGRAMS):
            m, n = tile_at(index, num_m, num_n)
            expert, row, end = tile_rows[m]
            row_b = expert * rows_b + n * TILE_N
            sums = torch.zeros(TILE_M, TILE_N)
            for k in range(steps):
                x = _load_values(a.q_RK, row, k) * _load_scales(a.scale[m], k)
                w = _load_values(w_rows, row_b, k) * _load_scales(b.scale[row_b // TILE_N], k)
                sums += x @ w.T
            factor = b.global_scales[expert, n * TILE_N // matrix_rows]
            rows, columns = slice(row, min(row + TILE_M, end)), slice(n * TILE_N, (n + 1) * TILE_N)
            out[rows, columns] = (sums * factor).bfloat16()[: rows.stop - row]
            writes[rows, columns] += 1
    expected_writes = torch.zeros(len(out), dtype=torch.int8)
    for _, row, end in tile_rows:
        expected_writes[row : min(row + TILE_M, end)] = 1
    require(
        torch.equal(writes, expected_writes[:, None].expand_as(writes)),
        "every value is written once",
    )


def tile_at(index, num_m, num_n):
    """Return the tile (m, n) at position `index` in the order of the kernel."""
    per_group = GROUP_M * num_n
    first = index // per_group * GROUP_M
    size = min(num_m - first, GROUP_M)
    index_in_group = index % per_group
    return first + index_in_group % size, index_in_group // size


def _load_values(q, row, step):
    """Return the values (128, 256) that a TMA load at this row and step returns."""
    box = torch.zeros(TILE_M, DEPTH // 2, dtype=torch.uint8)
    valid = q[row : row + TILE_M, step * DEPTH // 2 : (step + 1) * DEPTH // 2]
    box[: valid.shape[0], : valid.shape[1]] = valid
    return VALUES[torch.stack([box & 15, box >> 4], 2).flatten(1).long()]


def _load_scales(scale_bytes, step):
    """Return the scale of each value, (128, 256).

    scale_bytes: scales of 128 rows. A step has four blocks of 512 bytes.
    """
    row, group = torch.arange(128)[:, None], torch.arange(DEPTH // 16)[None, :]
    offsets = group // 4 * 512 + row % 32 * 16 + row // 32 * 4 + group % 4
    step_scales = scale_bytes[step * STEP_BYTES : (step + 1) * STEP_BYTES]
    return step_scales[offsets].view(torch.float8_e4m3fn).float().repeat_interleave(16, 1)


def _check_arguments(a, b, tiles, out):
    """Raise for unsupported arguments. Returns [expert, first row, end] of each tile."""
    require(b.w.dim() == 3, "weights by expert")
    experts, rows_b, half = b.w.shape
    require(2 * half % 128 == 0, "K is a multiple of 128")
    require(rows_b % TILE_N == 0, "N is a multiple of 128")
    steps, max_tiles = -(-2 * half // DEPTH), tiles.numel() // 3
    matrices = b.global_scales.shape[1]
    require(rows_b % (matrices * TILE_N) == 0, "each tile has columns of one matrix")
    for name, tensor, dtype, shape in (
        ("rows", a.q_RK, torch.uint8, (len(out), half)),
        ("scales of rows", a.scale, torch.uint8, (max_tiles, steps * STEP_BYTES)),
        ("weights", b.w, torch.uint8, (experts, rows_b, half)),
        ("scales of weights", b.scale, torch.uint8,
         (experts * rows_b // TILE_N, steps * STEP_BYTES)),
        ("global_scales", b.global_scales, torch.float32, (experts, matrices)),
        ("results", out, torch.bfloat16, (len(out), rows_b)),
        ("tiles", tiles, torch.int32, (3 * max_tiles + 1,)),
    ):  # fmt: skip
        require(tensor.dtype is dtype, f"{name} are {dtype}, not {tensor.dtype}")
        require(tuple(tensor.shape) == shape, f"{name} are {shape}, not {tuple(tensor.shape)}")
        require(tensor.is_contiguous(), f"{name} are contiguous")
        alignment = 4 if name in ("global_scales", "tiles") else 16
        require(tensor.data_ptr() % alignment == 0, f"{name} are aligned to {alignment} bytes")
    require(not (b.scale & 0x80).any(), "scales of weights have no sign")
    count = int(tiles[-1])
    require(0 <= count <= max_tiles, f"at most {max_tiles} tiles, not {count}")
    tile_rows = tiles[: 3 * max_tiles].view(3, -1)[:, :count].T.tolist()
    end_of_expert, previous_end = {}, 0
    for expert, row, end in tile_rows:
        require(0 <= expert < experts, f"expert {expert} is one of {experts}")
        require(0 <= row < end <= len(out), f"rows {row} to {end} are some of {len(out)}")
        require(
            end_of_expert.setdefault(expert, end) == end, "all tiles of an expert have the same end"
        )
        require(row >= previous_end, "tiles are in order and do not overlap")
        previous_end = min(row + TILE_M, end)
    for tile, (_, row, end) in enumerate(tile_rows):
        _check_scales(a.scale[tile], min(TILE_M, end - row), 2 * half // 16)
    return tile_rows


def _check_scales(scale_bytes, rows, groups):
    """Check that scales of padding are 0. Uninitialized scales could be NaN."""
    row, group = torch.arange(128)[:, None], torch.arange(len(scale_bytes) // 128)[None, :]
    offsets = group // 16 * STEP_BYTES + group % 16 // 4 * 512
    offsets = offsets + row % 32 * 16 + row // 32 * 4 + group % 4
    padding = (group >= groups).expand_as(offsets) | (row >= rows)
    require(not scale_bytes[offsets[padding]].any(), "scales of padding are 0")
