"""Quantization of a matrix of one expert, a few rows at a time, while a checkpoint is loaded.

    out = {field: tensor[slot] for field, tensor in tensors.items()}   # of one expert
    quantize_expert("w1", [gate, up], problem, out)

The results are equal to those of `quantize_weights`. Only one piece of rows at a time is converted
to float32, so the temporary memory is a few times the size of a piece. The weights may be views of
a memory-mapped file. They are read twice if a scale or the order of the columns depends on all
rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm

import torch

from modular_kernel.quant import nvfp4
from modular_kernel.quant.quantized_weights import compute_act_order, count_matrices, quantize_rows
from modular_kernel.quant.scale_tiles import pack_pairs
from modular_kernel.spec.problem import Problem

_VALUES_PER_PIECE = 1 << 18
_ROW_ALIGNMENT = 8  # rows per piece; must be even, because two rows share a byte of zero points


def quantize_expert(
    name: str, parts: Sequence[torch.Tensor], problem: Problem, out: Mapping[str, torch.Tensor]
) -> None:
    """Quantize w1 or w2 of one expert in the scheme of `problem`.

    name: "w1" or "w2".
    parts: the matrix, split along its rows: tensors (rows, K) in any floating dtype, with any
        strides, on any device.
    out: the tensors to write by field of ExpertWeights, such as w1 (N, K) and w1_scale, on the
        device that quantizes. Their dtypes determine the dtypes of the scales.
    """
    scheme, matrix = problem.scheme, _MatrixRows(parts, out[name].device, problem)
    if scheme.act_order and name == "w1":
        order = compute_act_order(matrix.compute_column_amax()[None])[0]
        out["w1_order"].copy_(order)
        matrix = _MatrixRows(parts, matrix.device, problem, order)
    if scheme.matrix_scales:
        _quantize_nvfp4(name, matrix, problem, out)
        return
    scale_dtype = out[f"{name}_scale"].dtype
    bounds = matrix.compute_bounds() if scheme.granularity == "tensor" else None
    for first_row, rows in matrix.iter_pieces():
        w, scale, zero_point = quantize_rows(rows[None].float(), scheme, scale_dtype, bounds=bounds)
        _copy_rows(out[name], w[0], first_row, 1)
        if scheme.granularity == "tensor":
            out[f"{name}_scale"].copy_(scale[0])
        else:
            rows_per_scale = scheme.group[0] if scheme.granularity == "block" else 1
            _copy_rows(out[f"{name}_scale"], scale[0], first_row, rows_per_scale)
        if zero_point is not None:
            _copy_rows(
                out[f"{name}_zero_point"], zero_point[0], first_row, 2 if scheme.packed else 1
            )


def _quantize_nvfp4(
    name: str, matrix: "_MatrixRows", problem: Problem, out: Mapping[str, torch.Tensor]
) -> None:
    matrices, interleaved = count_matrices(name, problem), problem.act.interleaved
    global_scale = nvfp4.compute_global_scales(
        matrix.compute_row_amax()[None], matrices, interleaved=interleaved
    )
    matrix_of_row = nvfp4.compute_matrix_indices(matrix.rows, matrices, interleaved=interleaved)
    inverse_N = (1 / global_scale[0])[matrix_of_row.to(matrix.device)]
    for first_row, rows in matrix.iter_pieces():
        codes, scale = nvfp4.quantize(rows, inverse_N[first_row : first_row + len(rows), None])
        _copy_rows(out[name], pack_pairs(codes, 1), first_row, 1)
        _copy_rows(out[f"{name}_scale"], scale, first_row, 1)
    out[f"{name}_global_scale"].copy_(global_scale[0])


def _copy_rows(
    target: torch.Tensor, source: torch.Tensor, first_row: int, rows_per_entry: int
) -> None:
    """Copy values or scales of consecutive rows of a matrix.

    first_row: the row of the matrix at which `source` starts.
    rows_per_entry: number of rows of the matrix per row of `source` and `target`.
    """
    start = first_row // rows_per_entry
    target[start : start + len(source)] = source


@dataclass(frozen=True)
class _MatrixRows:
    """A matrix that is split along its rows, and read in pieces of rows.

    device: the device of the pieces.
    order: indices of the columns, in the order in which they are read; None keeps the order.
    """

    parts: Sequence[torch.Tensor]
    device: torch.device
    problem: Problem
    order: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return sum(map(len, self.parts))

    def iter_pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (index of the first row, rows) of each piece, in the dtype of the parts.

        A piece consists of complete scale tiles.
        """
        scheme, rows = self.problem.scheme, self.rows
        tile_rows = scheme.group[0] if scheme.granularity == "block" else 1
        alignment = lcm(_ROW_ALIGNMENT, tile_rows)
        rows_per_piece = (
            max(_VALUES_PER_PIECE // self.parts[0].shape[1] // alignment, 1) * alignment
        )
        for start in range(0, rows, rows_per_piece):
            piece = self._read(start, min(start + rows_per_piece, rows)).to(self.device)
            yield start, piece if self.order is None else piece.index_select(1, self.order)

    def compute_row_amax(self) -> torch.Tensor:
        """Return the largest magnitude of each row, (N,) float32."""
        return torch.cat([piece.abs().amax(1).float() for _, piece in self.iter_pieces()])

    def compute_column_amax(self) -> torch.Tensor:
        """Return the largest magnitude of each column, (K,)."""
        return torch.stack([piece.abs().amax(0) for _, piece in self.iter_pieces()]).amax(0)

    def compute_bounds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest and the smallest weight, (1,) float32."""
        bounds = [(piece.amax(), piece.amin()) for _, piece in self.iter_pieces()]
        maximum = torch.stack([piece_max for piece_max, _ in bounds]).amax()
        minimum = torch.stack([piece_min for _, piece_min in bounds]).amin()
        return maximum.float()[None], minimum.float()[None]

    def _read(self, start: int, stop: int) -> torch.Tensor:
        """Return rows [start, stop). This is a view if the rows are in one part."""
        views, part_start = [], 0
        for part in self.parts:
            first, last = max(start - part_start, 0), min(stop - part_start, len(part))
            if first < last:
                views.append(part[first:last])
            part_start += len(part)
        return views[0] if len(views) == 1 else torch.cat(views)
