"""Check or copy weights so that they are row-major and 16-byte aligned, as TMA and CUTLASS need."""

import torch

_ALIGNMENT_BYTES = 16


def is_aligned(w_eNK: torch.Tensor) -> bool:
    """Return whether the data starts at a multiple of 16 bytes. A view can start anywhere."""
    return w_eNK.data_ptr() % _ALIGNMENT_BYTES == 0


def is_row_major(w_eNK: torch.Tensor) -> bool:
    """Return whether a library can read these weights without a copy."""
    return w_eNK.is_contiguous() and is_aligned(w_eNK)


def to_row_major(w_eNK: torch.Tensor) -> torch.Tensor:
    """Return the weights, copied unless they are already row-major and aligned."""
    return w_eNK if is_row_major(w_eNK) else copy_row_major(w_eNK)


def copy_row_major(w_eNK: torch.Tensor) -> torch.Tensor:
    return w_eNK.clone(memory_format=torch.contiguous_format)
