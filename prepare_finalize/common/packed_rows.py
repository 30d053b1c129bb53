"""A token as one row of bytes: its activations, scales, slots and router weights side by side, so
that one exchange moves them all and any backend can carry any dtype."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_ALIGNMENT = 16  # bytes, of every section and of a row


@dataclass(frozen=True)
class RowLayout:
    """sections: name -> (first byte, columns, dtype). nbytes: of a row."""

    sections: dict[str, tuple[int, int, torch.dtype]]
    nbytes: int

    @classmethod
    def of(cls, **columns: tuple[int, torch.dtype]) -> "RowLayout":
        """From columns and dtype of each section, in order; those without columns are left out."""
        sections, end = {}, 0
        for name, (count, dtype) in columns.items():
            if count:
                sections[name] = (end, count, dtype)
                end += math.ceil(count * dtype.itemsize / _ALIGNMENT) * _ALIGNMENT
        return cls(sections, end)

    def put(self, rows_RB: torch.Tensor, name: str, values: torch.Tensor) -> None:
        """Write a section of every row; values (R, columns) of the section's dtype."""
        if values.numel():
            # A single value may have any stride; its bytes have one.
            flat = values.contiguous().as_strided((values.numel(),), (1,))
            self._part(rows_RB, name).copy_(flat.view(torch.uint8).view(len(values), -1))

    def take(self, blocks: Sequence[torch.Tensor], name: str, out: torch.Tensor) -> None:
        """out (R, columns), contiguous = a section of the blocks' rows, one behind another."""
        given = out.view(torch.uint8)
        start = 0
        for block in blocks:
            given[start : start + len(block)].copy_(self._part(block, name))
            start += len(block)

    def _part(self, rows_RB: torch.Tensor, name: str) -> torch.Tensor:
        start, count, dtype = self.sections[name]
        return rows_RB[:, start : start + count * dtype.itemsize]
