"""Packed rows: x, scales, ids, router weights and adapter slot of a token in one row of bytes.

A single collective sends the rows as bytes, so its backend need not support the dtypes of the
sections. An adapter slot is the position of a LoRA adapter in the layer's pool.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_ALIGNMENT = 16  # bytes; every section and every row begins at a multiple of it


@dataclass(frozen=True)
class RowLayout:
    """Layout of a packed row.

    sections: name of a section -> its first byte, number of columns, and dtype.
    nbytes: bytes per row.
    """

    sections: dict[str, tuple[int, int, torch.dtype]]
    nbytes: int

    @classmethod
    def from_columns(cls, **columns: tuple[int, torch.dtype]) -> "RowLayout":
        """Return the layout with a section of (number of columns, dtype) for each keyword.

        Sections without columns are omitted.
        """
        sections, end = {}, 0
        for name, (count, dtype) in columns.items():
            if count:
                sections[name] = (end, count, dtype)
                end += math.ceil(count * dtype.itemsize / _ALIGNMENT) * _ALIGNMENT
        return cls(sections, end)

    def write(self, rows_RB: torch.Tensor, name: str, values: torch.Tensor) -> None:
        """Write `values`, (R, columns) in the section's dtype, to a section of every row."""
        if values.numel():
            # A tensor with one value may have any stride, but a view as bytes needs a stride of 1.
            flat = values.contiguous().as_strided((values.numel(),), (1,))
            self._section(rows_RB, name).copy_(flat.view(torch.uint8).view(len(values), -1))

    def read(self, blocks: Sequence[torch.Tensor], name: str, out: torch.Tensor) -> None:
        """Copy a section of the rows of all blocks, concatenated, to `out`, (R, columns)."""
        out_bytes = out.view(torch.uint8)
        start = 0
        for block in blocks:
            out_bytes[start : start + len(block)].copy_(self._section(block, name))
            start += len(block)

    def clear(self, rows_RB: torch.Tensor) -> None:
        """Write unused rows: zeros, with ids and adapter slots of -1."""
        rows_RB.zero_()
        for name in ("ids", "adapters"):
            if name in self.sections:
                self._section(rows_RB, name).fill_(0xFF)

    def _section(self, rows_RB: torch.Tensor, name: str) -> torch.Tensor:
        start, count, dtype = self.sections[name]
        return rows_RB[:, start : start + count * dtype.itemsize]
