"""Check whether weights have the layout that TMA and CUTLASS need, or copy them to this layout.

Weights must be row-major and 16-byte aligned.
"""

import torch

_ALIGNMENT_BYTES = 16


def is_aligned(w_eNK: torch.Tensor) -> bool:
    """Return whether the data starts at a multiple of 16 bytes, which a view need not do."""
    return w_eNK.data_ptr() % _ALIGNMENT_BYTES == 0


def is_row_major(w_eNK: torch.Tensor) -> bool:
    """Return whether the weights are contiguous and aligned, so that no copy is needed."""
    return w_eNK.is_contiguous() and is_aligned(w_eNK)


def to_row_major(w_eNK: torch.Tensor) -> torch.Tensor:
    """Return the weights, copied unless they are already row-major and aligned."""
    return w_eNK if is_row_major(w_eNK) else copy_row_major(w_eNK)


def copy_row_major(w_eNK: torch.Tensor) -> torch.Tensor:
    return w_eNK.clone(memory_format=torch.contiguous_format)
