"""Matrix multiplication that reads no values besides its operands on a CPU.

On a CPU with AMX, oneDNN multiplies 16-bit matrices in tiles of 32 columns. If K is not a multiple
of 32, it reads past the end of a row, into a gap between rows or the next row, and multiplies those
values by zero. A NaN or infinity of one token, or a stale value in a buffer, then makes another
token's results NaN. These functions pad K with zeros and remove gaps from operands. On a GPU, they
pass the operands to torch unchanged.
"""

import torch
from torch.compiler import is_compiling

_TILE = 32  # 16-bit columns per row of an AMX tile


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a @ b, (M, N), for matrices (M, K) and (K, N) of any strides.

    Copies an operand only if it has gaps between its rows, or has 16 bits and K is not a multiple
    of 32; a transposed view of contiguous weights is not copied.
    """
    a, b = _operands(a, b)
    return a @ b


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight.T + bias, (M, N), for matrices (M, K) and (N, K) of any strides.

    bias: (N,), added before the result is rounded. Copies operands as `matmul` does.
    """
    x, weight_KN = _operands(x, weight.T)
    return x @ weight_KN if bias is None else torch.addmm(bias, x, weight_KN)


def compact(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix with contiguous rows or columns.

    A matrix that is compact already, or is not on a CPU, is returned unchanged; others are copied.
    """
    if matrix.device.type != "cpu" or _is_compact(matrix):
        return matrix
    # Not `contiguous()`: it returns a single row unchanged, with a stride that oneDNN would use.
    return matrix.clone(memory_format=torch.contiguous_format)


def _is_compact(matrix: torch.Tensor) -> bool:
    if is_compiling():  # torch.compile cannot read strides that depend on symbolic sizes
        return matrix.is_contiguous() or matrix.T.is_contiguous()
    rows, columns = matrix.shape
    return matrix.stride() in ((columns, 1), (1, rows))


def _operands(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return compact (M, K) and (K, N) operands, with K padded with zeros if necessary."""
    if a.device.type != "cpu":
        return a, b
    padding = -a.shape[1] % _TILE if a.itemsize == 2 else 0
    if not padding:
        if is_compiling():
            return compact(a), compact(b)
        (m, k), n = a.shape, b.shape[1]  # without calls, which take longer than small products
        dense_a, dense_b = a.stride() in ((k, 1), (1, m)), b.stride() in ((n, 1), (1, k))
        return a if dense_a else compact(a), b if dense_b else compact(b)
    pad = torch.nn.functional.pad
    is_row_major = b.is_contiguous() if is_compiling() else b.stride(1) == 1
    b = pad(b, (0, 0, 0, padding)) if is_row_major else pad(b.T, (0, padding)).T
    return pad(a, (0, padding)), b
