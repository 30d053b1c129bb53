"""Describes the tensors that a checkpoint stores for one weight matrix, and slices them.

A matrix is the weight of one projection (gate, up or down), with N rows (outputs) and K columns
(inputs); `depth` is K. A quantized matrix is stored as several tensors: codes, scales and zero
points. Each entry of a stored tensor covers a tile of the matrix. For example, a scale of 128x128
blocks covers 128 rows and 128 columns, and a word of eight 4-bit codes covers one row and 8
columns. A range of rows and columns of the matrix is therefore a slice of every stored tensor, and
a rank can read only its share of the files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from modular_kernel.errors import ConfigurationError, DtypeError, ShapeError
from modular_kernel.spec.problem import dtype_name

Range = tuple[int, int]  # [start, stop)
# The role of a stored tensor for the functions in `fusing`. "order" is GPTQ's g_idx.
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
UNREAD_ROLES: tuple[Role, ...] = ("shape", "unused")  # accepted in the files, but never read

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Dim:
    """One dimension of a stored tensor.

    axis: "N" or "K", the dimension of the matrix that this dimension covers; "" for a dimension of
        fixed size `step` that covers neither.
    step: rows or columns of the matrix per entry.
    indivisible: whether an entry is a packed word, which shares must not split. Otherwise, two
        shares may each contain a part of an entry's tile, and both get a copy of the entry.
    """

    axis: Literal["N", "K", ""]
    step: int = 1
    indivisible: bool = False

    def entries(self, start: int, stop: int) -> slice:
        """Return the slice of entries that cover rows or columns [start, stop) of the matrix."""
        return slice(start // self.step, -(-stop // self.step))


@dataclass(frozen=True)
class StoredTensor:
    """One tensor that a checkpoint stores for a matrix.

    name: suffix after the matrix's name, such as "weight_scale".
    role: role of the tensor. Tensors with a role in UNREAD_ROLES are not read.
    dims: the dimensions. () is a single number, stored with shape () or (1,). Dimensions of size 1
        may be missing or in excess (`match_dims`).
    dtypes: the allowed dtypes.
    aliases: alternative names.
    """

    name: str
    role: Role
    dims: tuple[Dim, ...]
    dtypes: tuple[torch.dtype, ...]
    aliases: tuple[str, ...] = ()
    optional: bool = False

    @property
    def is_scalar(self) -> bool:
        """Whether the tensor is a single number per matrix."""
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

    def slices_starting_in(self, rows: Range, columns: Range) -> tuple[slice, ...]:
        """Return the slices of entries whose tiles start in rows [a, b) and columns [c, d)."""
        starts = {"N": rows[0], "K": columns[0], "": 0}
        return tuple(
            slice(-(-starts[dim.axis] // dim.step), entries.stop)
            for dim, entries in zip(self.dims, self.slices(rows, columns), strict=True)
        )

    def check(
        self, what: str, got: Sequence[int], dtype: torch.dtype, need: tuple[int, ...]
    ) -> None:
        """Check the shape and dtype of a tensor in the files.

        what: name of the tensor, for messages.
        got, need: the shape of the tensor, and the expected shape.

        Raises ShapeError if the shapes do not match, and DtypeError for a dtype that is not in
        `dtypes`.
        """
        if self.match_dims(got, need) is None:
            raise ShapeError(what, got=tuple(got), need=need)
        if dtype not in self.dtypes:
            names = " or ".join(map(dtype_name, self.dtypes))
            raise DtypeError(what, got=dtype_name(dtype), need=names)

    def match_dims(self, got: Sequence[int], need: Sequence[int]) -> tuple[int, ...] | None:
        """Return the dimensions of `got` that match `need`, or None if the shapes do not match.

        Trailing dimensions of size 1 are skipped. For a scale, all excess dimensions of size 1 are
        skipped, because modelopt stores the scales of 128x128 blocks as (N / 128, 1, K / 128, 1).
        """
        if tuple(got) == tuple(need):
            return tuple(range(len(need)))
        matched_dims = list[int]()
        for dim, size in enumerate(got):
            if len(matched_dims) < len(need) and size == need[len(matched_dims)]:
                matched_dims.append(dim)
            elif size != 1 or (self.role != "scale" and len(matched_dims) < len(need)):
                return None
        return tuple(matched_dims) if len(matched_dims) == len(need) else None

    def check_share(self, what: str, rows: Range, columns: Range, sizes: tuple[int, int]) -> None:
        """Raise ConfigurationError if rows [a, b) and columns [c, d) split a packed word.

        what: name of the matrix, for messages.
        sizes: (N, K) of the matrix.
        """
        for dim in (d for d in self.dims if d.indivisible):
            (start, stop), size = (rows, sizes[0]) if dim.axis == "N" else (columns, sizes[1])
            if start % dim.step or (stop % dim.step and stop != size):
                axis_name = "rows" if dim.axis == "N" else "columns"
                need = f"multiples of {dim.step}: {self.name} packs that many together"
                raise ConfigurationError(
                    f"{what}: share of {axis_name}", got=(start, stop), need=need
                )


@dataclass(frozen=True)
class BlockedScale(StoredTensor):
    """Scales that torchao stores in the tile order of Blackwell's tensor cores.

    A tile has the scales of 128 rows and 4 scale columns, and is stored as 32 rows of 16 scales.
    Row r has the 4 scales of row r of the tile, followed by those of rows r + 32, r + 64 and r +
    96. The stored tensor is (32 ceil(rows / 128), 16 ceil(scale columns / 4)).

    dims: the dimensions (N, K) that the scales have after `unblock`.
    """

    def shape(self, rows: int, depth: int) -> tuple[int, ...]:
        scale_rows, scale_columns = super().shape(rows, depth)
        return 32 * -(-scale_rows // 128), 16 * -(-scale_columns // 4)

    def stored_slices(self, rows: Range, depth: int) -> tuple[slice, ...]:
        """Return the slices of the stored tensor that cover rows [a, b) and all columns."""
        width = self.shape(rows[1], depth)[1]
        return slice(32 * (rows[0] // 128), 32 * -(-rows[1] // 128)), slice(0, width)

    def unblock(self, stored: torch.Tensor, rows: Range, columns: Range) -> torch.Tensor:
        """Return the scales of rows [a, b) and columns [c, d) of the matrix, in row-major order.

        stored: the slice of the stored tensor that `stored_slices` selects for these rows.
        """
        *leading_dims, height, width = stored.shape
        tiles = stored.reshape(*leading_dims, height // 32, width // 16, 32, 4, 4)
        scales = tiles.movedim(-2, -4).movedim(-2, -3)  # (row tiles, 4, 32, column tiles, 4)
        scales = scales.reshape(*leading_dims, height * 4, width // 4)
        first_stored_row = rows[0] // 128 * 128
        entries = self.dims[1].entries(*columns)
        return scales[..., rows[0] - first_stored_row : rows[1] - first_stored_row, entries]


def slice_tensors(
    stored: Sequence[StoredTensor], tensors: Mapping[str, torch.Tensor], rows: Range, columns: Range
) -> dict[str, torch.Tensor]:
    """Return views of a matrix's tensors that cover rows [a, b) and columns [c, d).

    tensors: the whole tensors by name, each (..., *dims). The entry of a tile that is only partly
        in the range is included.
    """
    views = {}
    for spec in stored:
        if spec.name in tensors:
            tensor = tensors[spec.name]
            for dim, entries in enumerate(spec.slices(rows, columns), -len(spec.dims)):
                tensor = tensor.narrow(dim, entries.start, entries.stop - entries.start)
            views[spec.name] = tensor
    return views


def repeat_scales(
    source: Sequence[StoredTensor],
    target: Sequence[StoredTensor],
    tensors: Mapping[str, torch.Tensor],
    rows: Range,
    columns: Range,
) -> dict[str, torch.Tensor]:
    """Repeat scales so that their tiles have the smaller sizes in `target`.

    source, target: descriptions of the same tensors. Each tile of `target`, counted from row a and
        column c, must be contained in one tile of `source`. A scale of the whole matrix may become
        one scale per row.
    tensors: the views that `slice_tensors` returns for rows [a, b) and columns [c, d) of the
        matrix.
    """
    repeated = dict(tensors)
    for source_spec, target_spec in zip(source, target, strict=True):
        if source_spec.name not in tensors or source_spec.dims == target_spec.dims:
            continue
        tensor = tensors[source_spec.name]
        if source_spec.is_scalar:  # becomes one scale per row
            repeated[source_spec.name] = tensor[..., None].expand(*tensor.shape, rows[1] - rows[0])
            continue
        for position, (source_dim, target_dim) in enumerate(
            zip(source_spec.dims, target_spec.dims, strict=True)
        ):
            if source_dim.step != target_dim.step:
                start, stop = rows if source_dim.axis == "N" else columns
                tiles = torch.arange(-(-(stop - start) // target_dim.step), device=tensor.device)
                first_entry = start // source_dim.step
                index = (start + tiles * target_dim.step) // source_dim.step - first_entry
                tensor = tensor.index_select(position - len(source_spec.dims), index)
        repeated[source_spec.name] = tensor
    return repeated
