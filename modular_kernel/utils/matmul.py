"""Matrix multiplication on a CPU that never reads memory outside of its operands.

On a CPU with AMX, oneDNN multiplies 16-bit matrices in tiles of 32 columns. If the inner dimension
K is not a multiple of 32, oneDNN reads past the end of a row, and multiplies these values by zero.
If one of these values is NaN or infinite, the product becomes NaN. Values of another token, or old
values in a buffer, would then change results. The functions below pad K with zeros, and remove gaps
between rows. On a GPU, they pass the operands to torch unchanged.
"""

import torch
from torch.compiler import is_compiling

_TILE = 32  # 16-bit columns per row of an AMX tile


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a @ b, (M, N), for matrices (M, K) and (K, N) with any strides.

    An operand is copied only if it has gaps between its rows, or if it has 16-bit elements and K is
    not a multiple of 32. A transposed view of contiguous weights is not copied.
    """
    a, b = _prepare_operands(a, b)
    return a @ b


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight.T + bias, (M, N), for matrices (M, K) and (N, K) with any strides.

    Operands are copied as in `matmul`.

    bias: (N,), which is added before the result is rounded.
    """
    x, weight_KN = _prepare_operands(x, weight.T)
    return x @ weight_KN if bias is None else torch.addmm(bias, x, weight_KN)


def compact(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix without gaps between its rows (row-major) or columns (column-major).

    Only a CPU matrix with gaps is copied.
    """
    if matrix.device.type != "cpu" or _is_compact(matrix):
        return matrix
    # `contiguous()` returns a single row unchanged, with a stride that oneDNN would use.
    return matrix.clone(memory_format=torch.contiguous_format)


def _is_compact(matrix: torch.Tensor) -> bool:
    if is_compiling():  # torch.compile cannot read strides that depend on symbolic sizes
        return matrix.is_contiguous() or matrix.T.is_contiguous()
    rows, columns = matrix.shape
    return matrix.stride() in ((columns, 1), (1, rows))


def _prepare_operands(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return compact (M, K) and (K, N) operands, with K padded with zeros if necessary."""
    if a.device.type != "cpu":
        return a, b
    padding = -a.shape[1] % _TILE if a.itemsize == 2 else 0
    if not padding:
        if is_compiling():
            return compact(a), compact(b)
        # `_is_compact` is inlined, because calls would take longer than small products.
        (m, k), n = a.shape, b.shape[1]
        is_a_compact, is_b_compact = a.stride() in ((k, 1), (1, m)), b.stride() in ((n, 1), (1, k))
        return a if is_a_compact else compact(a), b if is_b_compact else compact(b)
    pad = torch.nn.functional.pad
    is_row_major = b.is_contiguous() if is_compiling() else b.stride(1) == 1
    b = pad(b, (0, 0, 0, padding)) if is_row_major else pad(b.T, (0, padding)).T
    return pad(a, (0, padding)), b
