"""Weights as libraries read them: row by row, on 16-byte addresses, as TMA and CUTLASS want."""

import torch

_ALIGNMENT = 16  # bytes


def is_aligned(w_eNK: torch.Tensor) -> bool:
    """Return whether weights begin on such an address: a view may begin anywhere."""
    return w_eNK.data_ptr() % _ALIGNMENT == 0


def lies_by_rows(w_eNK: torch.Tensor) -> bool:
    """Return whether a library reads these weights where they lie."""
    return w_eNK.is_contiguous() and is_aligned(w_eNK)


def by_rows(w_eNK: torch.Tensor) -> torch.Tensor:
    """Return weights that lie row by row: these, or a copy."""
    return w_eNK if lies_by_rows(w_eNK) else copied(w_eNK)


def copied(w_eNK: torch.Tensor) -> torch.Tensor:
    """Return a copy that lies row by row."""
    return w_eNK.clone(memory_format=torch.contiguous_format)
