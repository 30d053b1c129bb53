"""A stand-in for torch._scaled_grouped_mm on sm_90, computed in float32 on a CPU.

The stand-in raises for arguments that torch's meta function or the CUDA code rejects, and for
arguments with which the CUDA code silently computes wrong results.
"""

import torch

ORIGINAL = torch._scaled_grouped_mm
MULTIPLE, MAX_GROUPS = 16, 1023


def require(condition, message):
    if not condition:
        raise RuntimeError(f"scaled_grouped_mm: {message}")


def scaled_grouped_mm(
    mat_a,
    mat_b,
    scale_a,
    scale_b,
    offs=None,
    bias=None,
    scale_result=None,
    out_dtype=None,
    use_fast_accum=False,
):
    """Return a new tensor. Rows from offs[-1] on are NaN."""
    _check_on_meta(mat_a, mat_b, scale_a, scale_b, offs, out_dtype)
    require(bias is None, "no bias")
    require(scale_result is None, "no scale of results")
    require(out_dtype is torch.bfloat16, "bfloat16 results")
    groups, depth, columns = mat_b.shape
    require(groups <= MAX_GROUPS, f"at most {MAX_GROUPS} groups")
    require(columns % MULTIPLE == 0, f"N={columns} is a multiple of {MULTIPLE}")
    require(depth % MULTIPLE == 0, f"K={depth} is a multiple of {MULTIPLE}")
    for name, matrix in (("mat_a", mat_a), ("mat_b", mat_b)):
        require(
            matrix.data_ptr() % 16 == 0, f"expected data_ptr of {name} to be aligned to 16 bytes"
        )
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        require(0 not in scale.stride() or scale.numel() == 1, f"{name} has no stride of 0")
        require(scale.is_contiguous(), f"{name} is contiguous")
    require(tuple(scale_b.shape) == (groups, columns), "a scale for each column of each group")
    if mat_a.dim() == 3:
        require(offs is None, "no offs for rows of every group")
        require(tuple(scale_a.shape) == tuple(mat_a.shape[:2]), "a scale for each row")
        return _multiply(mat_a, mat_b, scale_a, scale_b)
    require(offs is not None, "offs for rows of all groups")
    require(offs.dtype is torch.int32, "offs of int32")
    require(tuple(offs.shape) == (groups,), "an end for each group")
    require(offs.is_contiguous(), "contiguous offs")
    ends = offs.tolist()
    require(ends == sorted(ends), "ends in order")
    require(ends[0] >= 0, "ends from 0 on")
    require(ends[-1] <= len(mat_a), "ends within the rows")
    out = torch.full((len(mat_a), columns), torch.nan, dtype=out_dtype)
    for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        rows = slice(start, end)
        out[rows] = _multiply(mat_a[rows], mat_b[group], scale_a[rows], scale_b[group])
    return out


def _check_on_meta(mat_a, mat_b, scale_a, scale_b, offs, out_dtype):
    """Check the arguments with torch's meta function."""
    a, b, sa, sb, ends = map(_to_meta, (mat_a, mat_b, scale_a, scale_b, offs))
    ORIGINAL(a, b, sa, sb, offs=ends, out_dtype=out_dtype)


def _to_meta(tensor):
    if tensor is None:
        return None
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _multiply(a, b, scale_a, scale_b):
    values = a.float() @ b.float()
    return (values * scale_a[..., :, None] * scale_b[..., None, :]).bfloat16()
