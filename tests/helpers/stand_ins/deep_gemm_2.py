"""A stand-in for the grouped GEMMs of DeepGEMM on sm_90, computed in float32 on a CPU.

The stand-in raises where the library asserts on the host. Like the kernels, it computes whole
tiles: all rows of a tile use the weights of one expert, and all of them are stored, including rows
that belong to another expert. Tiles are stored from the last to the first. Rows outside of all
tiles are NaN.
"""

import torch

TILE, BLOCK = 128, 128
E4M3, BF16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
alignment = [TILE]
launched = []  # (name, expected_m) of each call; the library selects a kernel by expected_m


def get_mk_alignment_for_contiguous_layout():
    return alignment[0]


def require(condition, message):
    if not condition:
        raise RuntimeError(f"Assertion error: {message}")


def m_grouped_bf16_gemm_nt_contiguous(
    a, b, d, grouped_layout, compiled_dims="nk", use_psum_layout=False,
    expected_m_for_psum_layout=None,
):  # fmt: skip
    require(a.dtype is BF16 and b.dtype is BF16, "a and b of bfloat16")
    require(a.shape[-1] % 64 == 0, "K a multiple of 64")
    _check_and_record_contiguous(
        a, b, d, grouped_layout, use_psum_layout, expected_m_for_psum_layout
    )
    _multiply_by_ends(a.float(), b.float(), d, grouped_layout)


def m_grouped_fp8_gemm_nt_contiguous(
    a, b, d, grouped_layout, recipe=None, recipe_a=None, recipe_b=None, compiled_dims="nk",
    disable_ue8m0_cast=False, use_psum_layout=False, expected_m_for_psum_layout=None,
):  # fmt: skip
    (x, sfa), (w, sfb) = a, b
    require(x.dtype is E4M3 and w.dtype is E4M3, "a and b of e4m3")
    require(disable_ue8m0_cast, "float32 scales")
    _check_and_record_contiguous(
        x, w, d, grouped_layout, use_psum_layout, expected_m_for_psum_layout
    )
    _check_scales(x, sfa, w, sfb)
    _multiply_by_ends(_dequantize(x, sfa, 1), _dequantize(w, sfb, BLOCK), d, grouped_layout)


def m_grouped_bf16_gemm_nt_masked(a, b, d, masked_m, expected_m, compiled_dims="nk"):
    require(a.dtype is BF16 and b.dtype is BF16, "a and b of bfloat16")
    require(a.shape[-1] % 64 == 0, "K a multiple of 64")
    _check_and_record_masked(a, b, d, masked_m, expected_m)
    _multiply_by_counts(a.float(), b.float(), d, masked_m, expected_m)


def m_grouped_fp8_gemm_nt_masked(
    a, b, d, masked_m, expected_m, recipe=None, recipe_a=None, recipe_b=None, compiled_dims="nk",
    disable_ue8m0_cast=False,
):  # fmt: skip
    (x, sfa), (w, sfb) = a, b
    require(x.dtype is E4M3 and w.dtype is E4M3, "a and b of e4m3")
    require(disable_ue8m0_cast, "float32 scales")
    _check_and_record_masked(x, w, d, masked_m, expected_m)
    _check_scales(x, sfa, w, sfb)
    _multiply_by_counts(_dequantize(x, sfa, 1), _dequantize(w, sfb, BLOCK), d, masked_m, expected_m)


# -------------------------------------------------------------------------------- assertions


def _check_row_major(t):
    require(t.dim() in (2, 3), "a matrix, or one for each group")
    if t.dim() == 3:
        require(t.stride(0) == t.shape[1] * t.shape[2], "contiguous groups")
    require(t.stride(-1) == 1, "contiguous values of a row")
    require(t.stride(-2) == t.shape[-1], "contiguous rows")
    require(t.data_ptr() % 16 == 0, "16-byte addresses for TMA")


def _check_sizes(a, b, d):
    for t in (a, b, d):
        _check_row_major(t)
    require(b.dim() == 3, "weights of each group")
    (groups, n, k), m = b.shape, a.shape[-2]
    require(a.shape[-1] == k, "a and b of the same K")
    require(tuple(d.shape) == (*a.shape[:-1], n), "d of M by N")
    require(d.dtype is BF16, "d of bfloat16")
    require(n % 8 == 0 and k % 16 == 0, "rows aligned to 16 bytes")
    require(m > 0 and n > 0 and k > 0 and groups > 0, "sizes above 0")
    return groups, m


def _check_and_record_contiguous(a, b, d, layout, use_psum_layout, expected):
    require(a.dim() == 2, "rows of all groups")
    groups, m = _check_sizes(a, b, d)
    require(layout.is_contiguous() and layout.dtype is torch.int32, "an int32 layout")
    require(use_psum_layout, "use_psum_layout: this stand-in has no other layout")
    require(tuple(layout.shape) == (groups,), "an end for each group")
    require(expected is None or (isinstance(expected, int) and expected > 0), "expected_m > 0")
    # The library does not assert this, but its kernels would compute wrong results.
    require(m % TILE == 0, "whole tiles of rows")
    start = 0
    for end in layout.tolist():
        require(
            start <= end <= m,
            "each end after the tiles of the previous expert, and within the rows",
        )
        start = -(-end // TILE) * TILE
    launched.append(("contiguous", expected))


def _check_and_record_masked(a, b, d, counts, expected):
    require(a.dim() == 3, "rows of each group")
    groups, capacity = _check_sizes(a, b, d)
    require(len(a) == groups, "rows for each group")
    require(counts.is_contiguous() and counts.dtype is torch.int32, "int32 counts")
    require(counts.numel() == groups, "a count for each group")
    require(isinstance(expected, int) and expected > 0, "expected_m > 0, an int on the host")
    require(
        bool((counts >= 0).all()) and bool((counts <= capacity).all()), "counts within the capacity"
    )
    launched.append(("masked", expected))


def _check_scales(x, sfa, w, sfb):
    k_blocks = -(-x.shape[-1] // BLOCK)
    require(sfa.dtype is FP32 and sfb.dtype is FP32, "float32 scales")
    require(
        tuple(sfa.shape) == (*x.shape[:-1], k_blocks), "scales of shape (..., M, ceil(K / 128))"
    )
    stride = -(-x.shape[-2] // 4) * 4
    # Otherwise the library would copy them in every call.
    require(sfa.stride(-2) == 1 and sfa.stride(-1) == stride, "contiguous scales of a group")
    if x.dim() == 3:
        require(sfa.stride(0) == stride * k_blocks, "contiguous scales of each group of rows")
    blocks = (len(w), -(-w.shape[1] // BLOCK), k_blocks)
    require(tuple(sfb.shape) == blocks, "a scale for each block of weights")
    require(sfb.is_contiguous(), "contiguous scales of weights")


# ------------------------------------------------------------------------------- computation


def _dequantize(q, scale, rows):
    expanded = scale.repeat_interleave(BLOCK, -1)[..., : q.shape[-1]]
    if rows > 1:
        expanded = expanded.repeat_interleave(rows, -2)[..., : q.shape[-2], :]
    return q.float() * expanded


def _multiply_by_ends(a, b, d, ends):
    """Compute whole tiles of 128 rows. The second half of a tile is zero if it has no used row."""
    tiles, start = [], 0
    for group, end in enumerate(ends.tolist()):
        tiles += [(group, row, end) for row in range(start, end, TILE)]
        start = -(-end // TILE) * TILE
    result = torch.full_like(d, torch.nan)
    for group, row, end in reversed(tiles):
        result[row : row + TILE] = (a[row : row + TILE] @ b[group].T).bfloat16()
        if end <= row + 64:
            result[row + 64 : row + TILE] = 0
    d.copy_(result)


def _multiply_by_counts(a, b, d, counts, expected):
    """Compute whole tiles of 64 or 128 rows, which may store into rows of the next group."""
    _groups, capacity, depth = a.shape
    tile = 64 if expected <= 64 else 128
    rows, out = a.reshape(-1, depth), d.view(-1, d.shape[2])
    result = torch.full_like(out, torch.nan)
    tiles = [
        (group, group * capacity + first)
        for group, count in enumerate(counts.tolist())
        for first in range(0, count, tile)
    ]
    for group, row in reversed(tiles):
        result[row : row + tile] = (rows[row : row + tile] @ b[group].T).bfloat16()
    out.copy_(result)
