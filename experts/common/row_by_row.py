"""Weights as libraries take them: rows one behind the other, the first of them on 16 bytes."""

import torch

from experts.triton.operands import TMA_BYTES


def lies_row_by_row(w: torch.Tensor) -> bool:
    """Return whether a library can read w where it is."""
    return w.is_contiguous() and w.data_ptr() % TMA_BYTES == 0


def row_by_row(w: torch.Tensor) -> torch.Tensor:
    """Return w, or a copy in memory of its own."""
    return w if lies_row_by_row(w) else w.clone(memory_format=torch.contiguous_format)
