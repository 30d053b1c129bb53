"""Names, shapes and slices of the tensors that contain each expert of a layer.

Checkpoints store experts in different ways. Each projection of each expert may have its own tensors
("mlp.experts.3.gate_proj.weight"), or one tensor may be a stack of all experts
("mlp.experts.gate_up_proj", (E, 2I, H)). `modular_kernel.models.expert_layouts` lists the layouts
of each model_type. From a layout, this module computes the location of one projection of one
expert.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from modular_kernel.checkpoints.matrix_layout import Range, StoredTensor
from modular_kernel.models.expert_layouts import ExpertLayout


@dataclass(frozen=True)
class ProjectionLocation:
    """The location of one projection (gate, up or down) of one expert.

    base: name of its tensors without the suffix, such as "model.layers.0.mlp.experts.3.gate_proj".
    rows, depth: N and K of the stored matrix, which may have more rows than the projection.
    first_row: row of the stored matrix at which the projection starts.
    expert: index in the stack of experts, or None if each expert has its own tensors.
    experts: number of experts.
    is_parameter, transposed, flat: as in ExpertLayout, for this projection.
    """

    base: str
    rows: int
    depth: int
    first_row: int
    expert: int | None
    experts: int
    is_parameter: bool
    transposed: bool
    flat: bool

    def candidate_keys(self, spec: StoredTensor) -> Iterator[str]:
        """Yield the possible names of a stored tensor in the files, the most common name first."""
        for name in (spec.name, *spec.aliases):
            if name.startswith("_weight_") and self.is_parameter:  # torchao
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
        """Return the shape that a stored tensor has in the files.

        A number that all experts share has a different shape; see `is_shared_scalar`.
        """
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
        start = self.expert * sizes[0]
        return (slice(start + slices[0].start, start + slices[0].stop), *slices[1:])


@dataclass(frozen=True)
class LayerLayout:
    """The layout and the sizes of one layer's experts in the files.

    prefix: start of all names, including the dot before the expert's number or the projection.
    """

    layout: ExpertLayout
    prefix: str
    experts: int
    hidden: int
    intermediate: int

    def projections(
        self, expert: int
    ) -> tuple[tuple[ProjectionLocation, ...], tuple[ProjectionLocation, ...]]:
        """Return the locations of an expert's projections in w1 and in w2.

        w1 consists of gate and up, or only of up if the activation is not gated. If gate and up
        rows alternate, w1 is a single matrix. w2 consists of down.
        """
        layout, hidden, width = self.layout, self.hidden, self.intermediate
        w1_locations: tuple[ProjectionLocation, ...]
        if layout.gate and not layout.up:  # one tensor with gate and up rows
            gate = self._locate(layout.gate, expert, 2 * width, hidden, first_row=0)
            up = self._locate(layout.gate, expert, 2 * width, hidden, first_row=width)
            w1_locations = (gate,) if layout.interleaved else (gate, up)
        else:
            names = tuple(name for name in (layout.gate, layout.up) if name)
            w1_locations = tuple(self._locate(name, expert, width, hidden) for name in names)
        return w1_locations, (self._locate(layout.down, expert, hidden, width),)

    def _locate(
        self, name: str, expert: int, rows: int, depth: int, first_row: int = 0
    ) -> ProjectionLocation:
        layout = self.layout
        expert_prefix = "" if layout.stacked else f"{expert}."
        return ProjectionLocation(
            base=f"{self.prefix}{expert_prefix}{name}",
            rows=rows,
            depth=depth,
            first_row=first_row,
            expert=expert if layout.stacked else None,
            experts=self.experts,
            is_parameter=layout.is_parameter,
            transposed=name in layout.transposed,
            flat=layout.flat,
        )
