"""Matrix products on a CPU that read nothing beside their operands.

On a CPU with AMX, oneDNN multiplies 16-bit matrices in tiles of 32 columns. Where the depth is not
a multiple of 32, it reads past the end of a row: into the gap between two rows, or into the row
after it. It multiplies what it finds there by zero, so a NaN or an infinity of one token makes
another token's results NaN, and so does a stale value in a buffer. Here such a depth is padded with
zeros, and operands have no gaps. On a GPU the products are torch's, of the operands as they are.
"""

import torch

_TILE = 32  # columns of 16 bits in a row of an AMX tile


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a @ b, (M, N), for matrices (M, K) and (K, N) of any strides.

    Copies an operand only if it has gaps between its rows, or has 16 bits and K is not a multiple
    of 32; a transposed view of contiguous weights is not copied.
    """
    a, b = _operands(a, b)
    return a @ b


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight.T + bias, (M, N), for matrices (M, K) and (N, K) of any strides.

    bias: (N,), added before the result is rounded. Copies what `matmul` does.
    """
    x, weight_KN = _operands(x, weight.T)
    return x @ weight_KN if bias is None else torch.addmm(bias, x, weight_KN)


def compact(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix with its rows, or its columns, side by side in memory.

    A matrix that lies so already, or is not on a CPU, is returned as it is; any other is copied.
    """
    if matrix.device.type != "cpu" or _is_compact(matrix):
        return matrix
    # Not `contiguous()`: it returns a single row as it is, and oneDNN is handed the row's stride.
    return matrix.clone(memory_format=torch.contiguous_format)


def _is_compact(matrix: torch.Tensor) -> bool:
    rows, columns = matrix.shape
    return matrix.stride() in ((columns, 1), (1, rows))


def _operands(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (M, K) and (K, N) as a CPU may multiply them, with zeros beyond K."""
    if a.device.type != "cpu":
        return a, b
    missing = -a.shape[1] % _TILE if a.itemsize == 2 else 0
    if not missing:
        (m, k), n = a.shape, b.shape[1]
        dense_a, dense_b = a.stride() in ((k, 1), (1, m)), b.stride() in ((n, 1), (1, k))
        return a if dense_a else compact(a), b if dense_b else compact(b)
    pad = torch.nn.functional.pad
    by_rows = b.stride(1) == 1
    b = pad(b, (0, 0, 0, missing)) if by_rows else pad(b.T, (0, missing)).T
    return pad(a, (0, missing)), b
