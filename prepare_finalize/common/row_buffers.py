"""Layout of the packed rows of a problem, and workspace buffers for unpacking them.

A token is sent as one packed row of bytes (`packed_rows`).
"""

from dataclasses import dataclass, fields
from typing import Any

import torch

from modular_kernel.contracts import CallState
from modular_kernel.ops.quantize import scale_shape
from modular_kernel.quant.quantized_weights import STORAGE
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import Routing
from modular_kernel.workspace import BufferSpec
from prepare_finalize.common.packed_rows import RowLayout
from prepare_finalize.common.tokens import dispatches_quantized


class PackedRowBuffers:
    """Layouts and workspace buffers of packed rows for one problem.

    A row has K int32 ids: expert ids of the model or slots, depending on the part.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._layouts: dict[bool, RowLayout] = {}  # cache, by whether rows are quantized

    def layout(self, *, quantized: bool) -> RowLayout:
        """Return the layout of a row, which has scales unless all rows share one scale."""
        if quantized not in self._layouts:
            self._layouts[quantized] = self._build_layout(quantized)
        return self._layouts[quantized]

    def _build_layout(self, quantized: bool) -> RowLayout:
        problem, scales = self.problem, 0
        if quantized and problem.scheme.activation_granularity != "tensor":
            scales = scale_shape(problem.scheme, 1, problem.hidden)[1]
        return RowLayout.from_columns(
            x=(problem.hidden, self._dtype(quantized)),
            scale=(scales, torch.float32),
            ids=(problem.top_k, torch.int32),
            weights=(problem.top_k, torch.float32),
            adapters=(int(problem.adapters is not None), torch.int32),
        )

    def put_adapters(self, layout: RowLayout, rows_RB: torch.Tensor, routing: Routing) -> None:
        """Write the adapter slots of the first T rows; -1 if the call has no adapters.

        The column is sent in any case, because calls of other ranks may have adapters.
        """
        if "adapters" not in layout.sections:
            return
        slots_T, num_tokens = routing.slots_T, len(routing.topk_ids_TK)
        if slots_T is None:
            slots_T = routing.topk_ids_TK.new_full((num_tokens,), -1, dtype=torch.int32)
        layout.write(rows_RB[:num_tokens], "adapters", slots_T[:, None])

    def max_row_bytes(self) -> int:
        """Return the largest size of a row in bytes, quantized or not."""
        unquantized = self.layout(quantized=False).nbytes
        if not self.problem.scheme.dispatched_quantized:
            return unquantized
        return max(unquantized, self.layout(quantized=True).nbytes)

    def specs(self, rows: int) -> dict[str, BufferSpec]:
        """Return the buffers for unpacking `rows` rows, and for their sums in the combine."""
        problem = self.problem
        hidden, k = problem.hidden, problem.top_k
        specs = {
            "rows_x": BufferSpec((rows, hidden * problem.dtype.itemsize), torch.uint8),
            "rows_ids": BufferSpec((rows, k), torch.int32),
            "rows_weights": BufferSpec((rows, k), torch.float32),
            "rows_adapters": BufferSpec((rows * int(problem.adapters is not None), 1), torch.int32),
            "rows_sum": BufferSpec((rows, hidden), problem.dtype),
            "tokens_sum": BufferSpec((problem.tokens, hidden), torch.float32),
        }
        if problem.scheme.dispatched_quantized:
            scales = scale_shape(problem.scheme, rows, hidden)
            specs["rows_scale"] = BufferSpec(scales, torch.float32)
        return specs

    def unpack(self, call: CallState, blocks: list[torch.Tensor]) -> "UnpackedRows":
        """Return the sections of the packed rows of all blocks, concatenated."""
        unpacked = self.allocate(call, sum(map(len, blocks)))
        self.unpack_into(unpacked, call, blocks)
        return unpacked

    def allocate(self, call: CallState, rows: int) -> "UnpackedRows":
        """Take buffers for the sections of `rows` rows from the workspace."""
        quantized = dispatches_quantized(self.problem, call)
        layout = self.layout(quantized=quantized)
        hidden, k = self.problem.hidden, self.problem.top_k
        dtype = self._dtype(quantized)
        x = call.workspace.take("rows_x", (rows, hidden * dtype.itemsize)).view(dtype)
        ids = call.workspace.take("rows_ids", (rows, k))
        weights = call.workspace.take("rows_weights", (rows, k))
        scale = adapters = None
        if "scale" in layout.sections:
            scale = call.workspace.take("rows_scale", (rows, layout.sections["scale"][1]))
        if "adapters" in layout.sections:
            adapters = call.workspace.take("rows_adapters", (rows, 1))[:, 0]
        return UnpackedRows(x, scale, ids, weights, adapters)

    def unpack_into(self, out: "UnpackedRows", call: CallState, blocks: list[torch.Tensor]) -> None:
        """Write the sections of the packed rows of all blocks, concatenated, to `out`."""
        layout = self.layout(quantized=dispatches_quantized(self.problem, call))
        layout.read(blocks, "x", out.x_RH)
        layout.read(blocks, "ids", out.ids_RK)
        layout.read(blocks, "weights", out.weights_RK)
        if out.scale is not None:
            layout.read(blocks, "scale", out.scale)
        if out.adapters_R is not None:
            layout.read(blocks, "adapters", out.adapters_R[:, None])

    def _dtype(self, quantized: bool) -> torch.dtype:
        return STORAGE[self.problem.scheme.activation] if quantized else self.problem.dtype


@dataclass(frozen=True)
class UnpackedRows:
    """The sections of packed rows as contiguous tensors.

    - scale: (R, G) float32 with G scales per row, or None.
    - ids_RK: int32.
    - weights_RK: float32.
    - adapters_R: int32, or None.
    """

    x_RH: torch.Tensor
    scale: torch.Tensor | None
    ids_RK: torch.Tensor
    weights_RK: torch.Tensor
    adapters_R: torch.Tensor | None

    def rows(self, start: int, stop: int) -> "UnpackedRows":
        """Return views of the rows from `start` to `stop`, exclusive."""
        sections: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        views: dict[str, Any] = {n: t if t is None else t[start:stop] for n, t in sections.items()}
        return UnpackedRows(**views)
