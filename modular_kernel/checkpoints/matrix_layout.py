"""The stored tensors of one matrix (N, K): names, shapes, dtypes, and how to slice them.

A matrix is the weight of one projection, with N rows (outputs) and K columns (inputs). Each entry
of a stored tensor covers a tile of rows and columns, so a share of the matrix is a slice of each
tensor in every dimension.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from modular_kernel.errors import ConfigurationError, DtypeError, ShapeError
from modular_kernel.spec.problem import dtype_name

Range = tuple[int, int]
Role = Literal[
    "w",
    "scale",
    "global_scale",
    "zero_point",
    "a_scale",
    "order",
    "shape",
    "bias",
    "codebook",
    "state",
    "format",
    "unused",
]
UNREAD: tuple[Role, ...] = ("shape", "unused")

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Dim:
    """One dimension of a stored tensor.

    axis: "N" or "K", or "" for `step` entries of no axis. step: rows or columns of the matrix per
    entry. indivisible: an entry is a packed word that must not be split. The tile of a scale may be
    split; the scale is then repeated.
    """

    axis: Literal["N", "K", ""]
    step: int = 1
    indivisible: bool = False

    def entries(self, start: int, stop: int) -> slice:
        """Return the entries that cover rows or columns [start, stop) of the matrix."""
        return slice(start // self.step, -(-stop // self.step))


@dataclass(frozen=True)
class StoredTensor:
    """One tensor that a checkpoint stores for a matrix.

    name: suffix after the matrix's name. aliases: alternative names. dims: () is a single number,
    stored as () or (1,); dimensions of 1 are ignored as in `kept_dims`. role: its meaning to
    `fusing.fuse`; tensors with a role in UNREAD are not read.
    """

    name: str
    role: Role
    dims: tuple[Dim, ...]
    dtypes: tuple[torch.dtype, ...]
    aliases: tuple[str, ...] = ()
    optional: bool = False

    @property
    def is_scalar(self) -> bool:
        """True if there is a single number per matrix."""
        return not self.dims and self.role != "shape"

    def shape(self, rows: int, depth: int) -> tuple[int, ...]:
        """Return the shape of the stored tensor for a matrix (rows, depth)."""
        sizes = {"N": rows, "K": depth}
        if self.role == "shape":
            return (2,)
        return tuple(-(-sizes[d.axis] // d.step) if d.axis else d.step for d in self.dims)

    def slices(self, rows: Range, columns: Range) -> tuple[slice, ...]:
        """Return the slices that cover rows [a, b) and columns [c, d) of the matrix."""
        ranges = {"N": rows, "K": columns}
        return tuple(d.entries(*ranges[d.axis]) if d.axis else slice(0, d.step) for d in self.dims)

    def whole_slices(self, rows: Range, columns: Range) -> tuple[slice, ...]:
        """Return the slices whose tiles begin in rows [a, b) and columns [c, d) of the matrix."""
        firsts = {"N": rows[0], "K": columns[0], "": 0}
        return tuple(
            slice(-(-firsts[dim.axis] // dim.step), entries.stop)
            for dim, entries in zip(self.dims, self.slices(rows, columns), strict=True)
        )

    def check(
        self, what: str, got: Sequence[int], dtype: torch.dtype, need: tuple[int, ...]
    ) -> None:
        """Raise ShapeError unless the shape `got` is `need`, DtypeError for another dtype."""
        if self.kept_dims(got, need) is None:
            raise ShapeError(what, got=tuple(got), need=need)
        if dtype not in self.dtypes:
            names = " or ".join(map(dtype_name, self.dtypes))
            raise DtypeError(what, got=dtype_name(dtype), need=names)

    def kept_dims(self, got: Sequence[int], need: Sequence[int]) -> tuple[int, ...] | None:
        """Return the dimensions of a shape `got` that are those of `need`, or None if it differs.

        Trailing dimensions of 1 are left out, and all of 1 that a scale has in excess, such as
        those of modelopt's scales of blocks, (N / 128, 1, K / 128, 1).
        """
        if tuple(got) == tuple(need):
            return tuple(range(len(need)))
        kept = list[int]()
        for dim, size in enumerate(got):
            if len(kept) < len(need) and size == need[len(kept)]:
                kept.append(dim)
            elif size != 1 or (self.role != "scale" and len(kept) < len(need)):
                return None
        return tuple(kept) if len(kept) == len(need) else None

    def check_cut(self, what: str, rows: Range, columns: Range, sizes: tuple[int, int]) -> None:
        """Raise ConfigurationError if a share splits a packed word."""
        for dim in (d for d in self.dims if d.indivisible):
            (start, stop), size = (rows, sizes[0]) if dim.axis == "N" else (columns, sizes[1])
            if start % dim.step or (stop % dim.step and stop != size):
                kind = "rows" if dim.axis == "N" else "columns"
                need = f"multiples of {dim.step}: {self.name} packs that many together"
                raise ConfigurationError(f"{what}: share of {kind}", got=(start, stop), need=need)


@dataclass(frozen=True)
class BlockedScale(StoredTensor):
    """Scales in tiles of 128 rows and 4 columns, in the order in which tensor cores read them.

    dims: of the scales themselves, (N, K), in which `cut` and `refine` take them after `unblocked`.
    A tile is stored as 32 rows of 16: row r of the tile has scales of the rows r, r + 32, r + 64
    and r + 96 of the matrix. The tiles of 128 rows follow one another in memory, and a stored
    tensor has 32 rows for each 128 of the matrix, and 16 columns for each 4 of the scales.
    """

    def shape(self, rows: int, depth: int) -> tuple[int, ...]:
        """Return the shape of the stored tensor for a matrix (rows, depth)."""
        scale_rows, scale_columns = super().shape(rows, depth)
        return 32 * -(-scale_rows // 128), 16 * -(-scale_columns // 4)

    def stored_slices(self, rows: Range, depth: int) -> tuple[slice, ...]:
        """Return the slices of the stored tensor that cover rows [a, b), for all of K = depth."""
        width = self.shape(rows[1], depth)[1]
        return slice(32 * (rows[0] // 128), 32 * -(-rows[1] // 128)), slice(0, width)

    def unblocked(self, stored: torch.Tensor, rows: Range, columns: Range) -> torch.Tensor:
        """Return the scales of rows [a, b) and columns [c, d) of the matrix.

        stored: (..., 32 tiles, 16 tiles), what `stored_slices` selects.
        """
        *lead, height, width = stored.shape
        tiles = stored.reshape(*lead, height // 32, width // 16, 32, 4, 4)
        scales = tiles.movedim(-2, -4).movedim(-2, -3)  # (row tiles, 4, 32, column tiles, 4)
        scales = scales.reshape(*lead, height * 4, width // 4)
        skipped = rows[0] // 128 * 128
        entries = self.dims[1].entries(*columns)
        return scales[..., rows[0] - skipped : rows[1] - skipped, entries]


def cut(
    stored: Sequence[StoredTensor], tensors: Mapping[str, torch.Tensor], rows: Range, columns: Range
) -> dict[str, torch.Tensor]:
    """Return views of a matrix's tensors that cover rows [a, b) and columns [c, d).

    tensors: by the names of `stored`, each (..., *its dims). A tile that the range splits is
    returned whole; `refine` splits it.
    """
    views = {}
    for tensor_spec in stored:
        if tensor_spec.name in tensors:
            tensor = tensors[tensor_spec.name]
            for dim, entries in enumerate(
                tensor_spec.slices(rows, columns), -len(tensor_spec.dims)
            ):
                tensor = tensor.narrow(dim, entries.start, entries.stop - entries.start)
            views[tensor_spec.name] = tensor
    return views


def refine(
    coarse: Sequence[StoredTensor],
    fine: Sequence[StoredTensor],
    tensors: Mapping[str, torch.Tensor],
    rows: Range,
    columns: Range,
) -> dict[str, torch.Tensor]:
    """Repeat scales so that their tiles have the sizes in `fine`, starting at row a and column c.

    One scale of a whole matrix may become one per row. tensors: from `cut` with the same ranges.
    Each tile of `fine` must be contained in one of `coarse`.
    """
    refined = dict(tensors)
    for coarse_tensor, fine_tensor in zip(coarse, fine, strict=True):
        if coarse_tensor.name not in tensors or coarse_tensor.dims == fine_tensor.dims:
            continue
        tensor = tensors[coarse_tensor.name]
        if coarse_tensor.is_scalar:  # one per row now
            refined[coarse_tensor.name] = tensor[..., None].expand(*tensor.shape, rows[1] - rows[0])
            continue
        for position, (coarse_dim, fine_dim) in enumerate(
            zip(coarse_tensor.dims, fine_tensor.dims, strict=True)
        ):
            if coarse_dim.step != fine_dim.step:
                start, stop = rows if coarse_dim.axis == "N" else columns
                index = torch.arange(-(-(stop - start) // fine_dim.step), device=tensor.device)
                index = (
                    start + index * fine_dim.step
                ) // coarse_dim.step - start // coarse_dim.step
                tensor = tensor.index_select(position - len(coarse_tensor.dims), index)
        refined[coarse_tensor.name] = tensor
    return refined
