"""Locations of a layer's experts in checkpoints: names and shapes of tensors, and slices of them.

`modular_kernel.models.expert_layouts` lists the layouts of each model_type.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from modular_kernel.checkpoints.matrix_layout import Range, StoredTensor
from modular_kernel.models.expert_layouts import ExpertLayout


@dataclass(frozen=True)
class ProjectionLocation:
    """The location of one projection of one expert.

    base: name of its tensors without the suffix. rows, depth: of the stored matrix, in which the
    projection begins at row `first`. expert: index in a stack of `experts`, or None.
    """

    base: str
    rows: int
    depth: int
    first: int
    expert: int | None
    experts: int
    is_parameter: bool
    transposed: bool
    flat: bool

    def keys(self, spec: StoredTensor) -> Iterator[str]:
        """Yield the names that a stored tensor may have in the file, the usual one first."""
        for name in (spec.name, *spec.aliases):
            if name.startswith("_weight_") and self.is_parameter:  # of torchao
                module, _, parameter = self.base.rpartition(".")
                yield f"{module}._{parameter}_{name.removeprefix('_weight_')}"
            elif name.startswith("weight:") and self.is_parameter:
                yield f"{self.base}{name.removeprefix('weight')}"
            elif not self.is_parameter:
                yield f"{self.base}.{name}"
            elif name == "weight":
                yield self.base
            else:
                yield f"{self.base}_{name.removeprefix('weight_')}"
                if name.startswith("weight_"):
                    yield f"{self.base}_{name}"

    def is_shared_scalar(self, spec: StoredTensor, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor of this shape is a single number for all experts of a stack."""
        return self.is_parameter and spec.is_scalar and prod(shape) == 1

    def shape(self, spec: StoredTensor) -> tuple[int, ...]:
        """Return the shape of a stored tensor in the file, unless it is a single number."""
        shape = spec.shape(self.rows, self.depth)
        if self.transposed and len(shape) > 1:
            shape = shape[::-1]
        if self.expert is None:
            return shape
        return (self.experts * shape[0], *shape[1:]) if self.flat else (self.experts, *shape)

    def slices(self, spec: StoredTensor, rows: Range, columns: Range) -> tuple[slice, ...]:
        """Return the slices that cover rows [a, b) and columns [c, d) of this expert's matrix."""
        slices, sizes = spec.slices(rows, columns), spec.shape(self.rows, self.depth)
        if self.transposed and len(slices) > 1:
            slices, sizes = slices[::-1], sizes[::-1]
        if self.expert is None:
            return slices
        if not self.flat:
            return (slice(self.expert, self.expert + 1), *slices)
        begin = self.expert * sizes[0]
        return (slice(begin + slices[0].start, begin + slices[0].stop), *slices[1:])


@dataclass(frozen=True)
class LayerLayout:
    """The experts of one layer in the files: layout, name prefix, and sizes."""

    layout: ExpertLayout
    prefix: str  # ends with the block's name and a dot
    experts: int
    hidden: int
    intermediate: int

    def projections(
        self, expert: int
    ) -> tuple[tuple[ProjectionLocation, ...], tuple[ProjectionLocation, ...]]:
        """Return the locations of w1's matrices (gate and up, or one) and of w2's."""
        layout = self.layout
        gated, width = bool(layout.gate), self.intermediate
        w1_locations: tuple[ProjectionLocation, ...]
        if gated and not layout.up:
            gate_up = self._locate(layout.gate, expert, 2 * width, self.hidden, 0)
            up = self._locate(layout.gate, expert, 2 * width, self.hidden, width)
            w1_locations = (gate_up,) if layout.interleaved else (gate_up, up)
        else:
            names = tuple(name for name in (layout.gate, layout.up) if name)
            w1_locations = tuple(
                self._locate(name, expert, width, self.hidden, 0) for name in names
            )
        return w1_locations, (self._locate(layout.down, expert, self.hidden, width, 0),)

    def _locate(
        self, name: str, expert: int, rows: int, depth: int, first: int
    ) -> ProjectionLocation:
        layout = self.layout
        expert_prefix = "" if layout.stacked else f"{expert}."
        return ProjectionLocation(
            base=f"{self.prefix}{expert_prefix}{name}",
            rows=rows,
            depth=depth,
            first=first,
            expert=expert if layout.stacked else None,
            experts=self.experts,
            is_parameter=layout.is_parameter,
            transposed=name in layout.transposed,
            flat=layout.flat,
        )
