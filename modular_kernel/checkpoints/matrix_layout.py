"""What a checkpoint keeps of one matrix (N, K), as data: names, shapes, dtypes, and how to cut it.

A matrix is the weight of one projection: N rows of outputs, K columns of inputs. Whatever is stored
of it covers a tile of its rows and columns by each entry, so a share of the matrix is a box of
each tensor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from modular_kernel.errors import ConfigurationError, DtypeError, ShapeError
from modular_kernel.spec.problem import dtype_name

Range = tuple[int, int]
Role = Literal[
    "w", "scale", "global_scale", "zero_point", "a_scale", "order", "shape", "bias", "unused"
]
UNREAD: tuple[Role, ...] = ("shape", "unused")

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Dim:
    """One dimension of a stored tensor.

    axis: "N" or "K", or "" for `step` entries of no axis. step: rows or columns of the matrix that
    one entry covers. whole: an entry is a word of values, which no cut may go through; that of a
    scale covers a tile, which may be cut and repeated.
    """

    axis: Literal["N", "K", ""]
    step: int = 1
    whole: bool = False

    def entries(self, start: int, stop: int) -> slice:
        """Return the entries that cover rows or columns [start, stop) of the matrix."""
        return slice(start // self.step, -(-stop // self.step))


@dataclass(frozen=True)
class Stored:
    """One tensor that a checkpoint keeps of a matrix.

    name: behind the matrix's own. also: other names that files have for it. dims: () is a single
    number, stored as () or (1,); trailing dimensions of 1 are left out. role: what it is to
    `merge`; UNREAD ones are not read.
    """

    name: str
    role: Role
    dims: tuple[Dim, ...]
    dtypes: tuple[torch.dtype, ...]
    also: tuple[str, ...] = ()
    optional: bool = False

    @property
    def is_number(self) -> bool:
        """Whether there is one number of a matrix."""
        return not self.dims and self.role != "shape"

    def shape(self, rows: int, depth: int) -> tuple[int, ...]:
        """Return the shape of what is stored of a matrix (rows, depth)."""
        sizes = {"N": rows, "K": depth}
        if self.role == "shape":
            return (2,)
        return tuple(-(-sizes[d.axis] // d.step) if d.axis else d.step for d in self.dims)

    def box(self, rows: Range, columns: Range) -> tuple[slice, ...]:
        """Return the slices that hold rows [a, b) and columns [c, d) of the matrix."""
        ranges = {"N": rows, "K": columns}
        return tuple(d.entries(*ranges[d.axis]) if d.axis else slice(0, d.step) for d in self.dims)

    def check(
        self, what: str, got: Sequence[int], dtype: torch.dtype, need: tuple[int, ...]
    ) -> None:
        """Raise the ShapeError or DtypeError of a tensor of shape `got`, where `need` should be."""
        trimmed = tuple(got)
        while len(trimmed) > len(need) and trimmed[-1] == 1:
            trimmed = trimmed[:-1]
        if trimmed != need:
            raise ShapeError(what, got=tuple(got), need=need)
        if dtype not in self.dtypes:
            names = " or ".join(map(dtype_name, self.dtypes))
            raise DtypeError(what, got=dtype_name(dtype), need=names)

    def check_cut(self, what: str, rows: Range, columns: Range, sizes: tuple[int, int]) -> None:
        """Raise the ConfigurationError of a share that goes through a word of packed values."""
        for dim in (d for d in self.dims if d.whole):
            (start, stop), size = (rows, sizes[0]) if dim.axis == "N" else (columns, sizes[1])
            if start % dim.step or (stop % dim.step and stop != size):
                kind = "rows" if dim.axis == "N" else "columns"
                need = f"multiples of {dim.step}: {self.name} packs so many together"
                raise ConfigurationError(f"{what}: share of {kind}", got=(start, stop), need=need)


def cut(
    stored: Sequence[Stored], tensors: Mapping[str, torch.Tensor], rows: Range, columns: Range
) -> dict[str, torch.Tensor]:
    """Return the part of a matrix's tensors that covers rows [a, b) and columns [c, d): views.

    tensors: by the names of `stored`, each (..., *its dims). A tile that the range cuts through
    comes whole: `refine` cuts it.
    """
    found = {}
    for each in stored:
        if each.name in tensors:
            tensor = tensors[each.name]
            for place, part in enumerate(each.box(rows, columns), -len(each.dims)):
                tensor = tensor.narrow(place, part.start, part.stop - part.start)
            found[each.name] = tensor
    return found


def refine(
    coarse: Sequence[Stored],
    fine: Sequence[Stored],
    tensors: Mapping[str, torch.Tensor],
    rows: Range,
    columns: Range,
) -> dict[str, torch.Tensor]:
    """Return the same numbers in smaller tiles that begin at row a and column c: scales repeated.

    One of a whole matrix may become one of each row.

    tensors: as `cut` gives them for these ranges. A tile of `fine` must lie in one of `coarse`.
    """
    found = dict(tensors)
    for old, new in zip(coarse, fine, strict=True):
        if old.name not in tensors or old.dims == new.dims:
            continue
        tensor = tensors[old.name]
        if old.is_number:  # of every row now
            found[old.name] = tensor[..., None].expand(*tensor.shape, rows[1] - rows[0])
            continue
        for place, (was, now) in enumerate(zip(old.dims, new.dims, strict=True)):
            if was.step != now.step:
                start, stop = rows if was.axis == "N" else columns
                index = torch.arange(-(-(stop - start) // now.step), device=tensor.device)
                index = (start + index * now.step) // was.step - start // was.step
                tensor = tensor.index_select(place - len(old.dims), index)
        found[old.name] = tensor
    return found
