"""Row-major, 16-byte aligned weights, as TMA and CUTLASS require."""

import torch

_ALIGNMENT = 16  # bytes


def is_aligned(w_eNK: torch.Tensor) -> bool:
    """Return whether the data begins at a multiple of 16 bytes; that of a view may not."""
    return w_eNK.data_ptr() % _ALIGNMENT == 0


def is_row_major(w_eNK: torch.Tensor) -> bool:
    """Return whether a library can read these weights without a copy."""
    return w_eNK.is_contiguous() and is_aligned(w_eNK)


def to_row_major(w_eNK: torch.Tensor) -> torch.Tensor:
    """Return the weights in row-major order, copied only if they are not."""
    return w_eNK if is_row_major(w_eNK) else copy_row_major(w_eNK)


def copy_row_major(w_eNK: torch.Tensor) -> torch.Tensor:
    return w_eNK.clone(memory_format=torch.contiguous_format)
