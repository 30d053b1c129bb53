"""Launches of the symmetric-memory kernels: arguments, grids and tile shapes.

`symm_mem.part` uses `SymmetricExchange` between all ranks, and `host_then_rank.part` within a host.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from modular_kernel.contracts import CallState
from modular_kernel.ops.count import next_power_of_2
from modular_kernel.ops.quantize import QuantizedRows, scale_shape
from modular_kernel.quant.quantized_weights import MIN_SCALE, QMAX, STORAGE
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.pdl import pdl_arguments
from modular_kernel.replay.launch.runtime import use_triton
from modular_kernel.spec.placement import PlacementTables
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import Routing
from prepare_finalize.symm_mem.group import Section, SharedMemory

_MIN_BLOCK = 1024  # columns; the number of columns of every block is a multiple of it


class LaunchShape(NamedTuple):
    """Tile and grid sizes of a launch.

    block: columns that a program processes at a time.
    warps: warps per program.
    programs: programs per SM.
    whole_rows: whether each work item is a whole row, instead of one block of a row.
    """

    block: int
    warps: int
    programs: int
    whole_rows: bool = False

    def fit(self, hidden: int) -> "LaunchShape":
        """Return the shape with a block of at most `hidden` columns, rounded up to a power of 2."""
        max_block = max(_MIN_BLOCK, next_power_of_2(hidden))
        return self._replace(block=min(self.block, max_block))


# The fastest shapes on two and four H200 GPUs (2026-11-20, triton 3.6.0) with a hidden size of
# 7168. Problems of up to _SMALL_BATCH_TOKENS tokens per rank use _SMALL_BATCH for both kernels.
_SMALL_BATCH_TOKENS = 512
_SMALL_BATCH = LaunchShape(1024, 4, 4)
_DISPATCH = LaunchShape(2048, 8, 4, whole_rows=True)
_COMBINE = LaunchShape(2048, 8, 4)


@dataclass(frozen=True)
class CallBuffers:
    """Tensors of one call in symmetric memory, at the same offsets on every rank, and counters.

    x_RH, scale_RG, ids_RK, weights_RK: received rows, R = W * capacity. Rows from rank r start at
        row r * capacity.
    y_RH: weighted sums over the experts of this rank, one row per received row.
    arrived_W: (W,) int32. Flag r is set once all rows from rank r have arrived.
    summed_W: (W,) int32. Flag r is set once y_RH of rank r is complete.
    dispatches, combines: (2,) int32 in local memory, for the dispatch and for the combine kernel:
        the number of the last call, and the counter of `is_last_program`.
    adapters_R: int32, adapter slots of the rows; None without adapters.
    """

    x_RH: torch.Tensor
    scale_RG: torch.Tensor | None
    ids_RK: torch.Tensor
    weights_RK: torch.Tensor
    y_RH: torch.Tensor
    arrived_W: torch.Tensor
    summed_W: torch.Tensor
    dispatches: torch.Tensor
    combines: torch.Tensor
    adapters_R: torch.Tensor | None = None


def buffer_sections(problem: Problem, rows: int | None = None) -> dict[str, Section]:
    """Return the sections of a heap for the fields of `CallBuffers`.

    rows: maximum number of received rows; None means world_size * problem.tokens.
    """
    scheme, world = problem.scheme, problem.parallel.world_size
    hidden, k = problem.hidden, problem.top_k
    rows = world * problem.tokens if rows is None else rows
    quantized = scheme.dispatched_quantized
    layout = {
        "x_RH": Section((rows, hidden), STORAGE[scheme.activation] if quantized else problem.dtype),
        "ids_RK": Section((rows, k), torch.int32),
        "weights_RK": Section((rows, k), torch.float32),
        "y_RH": Section((rows, hidden), problem.dtype),
        "arrived_W": Section((world,), torch.int32),
        "summed_W": Section((world,), torch.int32),
    }
    if quantized and scheme.activation_granularity != "tensor":
        layout["scale_RG"] = Section(scale_shape(scheme, rows, hidden), torch.float32)
    if problem.adapters is not None:
        layout["adapters_R"] = Section((rows,), torch.int32)
    return layout


def quantizes_in_dispatch(scheme: QuantScheme, hidden: int) -> bool:
    """Return whether the dispatch kernel quantizes the tokens.

    The kernel supports a scale per token, and groups that divide the block and the hidden size.
    """
    if scheme.activation_granularity == "token":
        return True
    if scheme.activation_granularity != "group":
        return False
    group = scheme.group[-1]
    return _MIN_BLOCK % group == 0 and hidden % group == 0


@dataclass(frozen=True)
class SymmetricExchange:
    """Dispatch and combine of one call.

    buffers: tensors of the call.
    deltas_W: (W,) int64, address offsets of the memory of all ranks; see `Heap`.
    rank_bits_T: (capacity,) int32, written by `send`. Bit r is set if the token was sent to rank r.
    tokens: number of tokens of this rank.
    row_at_rank_WT: (W, tokens) int32, contiguous, row of each token in the buffers of each rank, or
        -1 if it is not sent there. None if it is row rank * capacity + token on every rank.
    """

    manager: SharedMemory
    problem: Problem
    buffers: CallBuffers
    deltas_W: torch.Tensor
    rank_bits_T: torch.Tensor
    tokens: int
    row_at_rank_WT: torch.Tensor | None = None

    @property
    def _capacity(self) -> int:
        """Number of rows that `send` writes, including unused rows if rows have fixed positions."""
        return self.problem.tokens if self.row_at_rank_WT is None else self.tokens

    def _make_peer_row_arguments(self) -> dict[str, object]:
        has_peer_rows = self.row_at_rank_WT is not None
        return {
            "peer_rows_ptr": self.row_at_rank_WT if has_peer_rows else self.rank_bits_T,
            "HAS_PEER_ROWS": has_peer_rows,
        }

    def _make_wait_arguments(self, flags: torch.Tensor, state: torch.Tensor) -> dict[str, object]:
        """Return the arguments of all kernels for waiting and signaling."""
        world = self.manager.world_size
        return {
            "flags_ptr": flags,
            "state_ptr": state,
            "failed_ptr": self.manager.failed,
            "status_ptr": self.manager.status,
            "timeout_ns": self.manager.timeout_ns,
            "WORLD": world,
            "PADDED": next_power_of_2(world),
            "INTERPRETED": flags.device.type == "cpu",
            **pdl_arguments(),
        }

    def send(
        self,
        x_TH: torch.Tensor,
        routing: Routing,
        tables: PlacementTables,
        call: CallState,
        *,
        quantized: QuantizedRows | None,
        wait: bool,
    ) -> None:
        """Write rows to the ranks of their experts, and ids and weights to all; then set flags.

        quantized: quantized tokens; None if the kernel quantizes them, or nothing is quantized.
        wait: whether the kernel also waits until the rows of all ranks have arrived.
        """
        from modular_kernel.replay.launch.triton_versions import (
            make_occupancy_options,  # imports Gluon
        )
        from prepare_finalize.symm_mem.kernels.dispatch import dispatch_kernel

        problem, buffers = self.problem, self.buffers
        use_triton(x_TH)  # the first call patches Triton's interpreter to compute like a GPU
        rows = x_TH if quantized is None else quantized.q_RK
        shape = _choose_shape(problem, _DISPATCH)
        chunk = shape.block
        if shape.whole_rows:
            chunk *= -(-problem.hidden // shape.block)
        num_items = self._capacity * -(-problem.hidden // chunk)
        launch(
            dispatch_kernel,
            (_choose_grid_size(num_items, shape, x_TH.device),),
            x_ptr=rows,
            ids_ptr=routing.topk_ids_TK,
            weights_ptr=routing.topk_weights_TK,
            homes_ptr=tables.homes_ER2,
            copies_ptr=tables.copies_E,
            invalid_ptr=call.invalid_ids,
            rank_bits_ptr=self.rank_bits_T,
            x_heap_ptr=buffers.x_RH,
            ids_heap_ptr=buffers.ids_RK,
            weights_heap_ptr=buffers.weights_RK,
            deltas_ptr=self.deltas_W,
            tokens=self.tokens,
            capacity=self._capacity,
            rank=self.manager.rank,
            num_experts=problem.experts,
            stride_x=rows.stride(0),
            HIDDEN=problem.hidden,
            TOP_K=problem.top_k,
            BLOCK_K=next_power_of_2(problem.top_k),
            MAX_COPIES=tables.homes_ER2.shape[1],
            WAIT=wait,
            CHUNK=chunk,
            BLOCK=shape.block,
            num_warps=shape.warps,
            **make_occupancy_options(shape.programs),
            **self._make_scale_arguments(quantized),
            **self._make_adapter_arguments(routing),
            **self._make_peer_row_arguments(),
            **self._make_wait_arguments(buffers.arrived_W, buffers.dispatches),
        )

    def _make_scale_arguments(self, quantized: QuantizedRows | None) -> dict[str, object]:
        """Return the kernel arguments for quantizing rows and sending scales."""
        scheme, scale_RG = self.problem.scheme, self.buffers.scale_RG
        quant_kind, scales = "none", 1
        if quantized is not None and scale_RG is not None:
            quant_kind, scales = "scaled", scale_RG.shape[1]
        elif quantized is None and scheme.dispatched_quantized:
            quant_kind = scheme.activation_granularity
        return {
            "scale_ptr": self.rank_bits_T if quantized is None else quantized.scale,
            "scale_heap_ptr": self.buffers.weights_RK if scale_RG is None else scale_RG,
            "QUANT": quant_kind,
            "GROUP": scheme.group[-1] if quant_kind == "group" else _MIN_BLOCK,
            "SCALES": scales,
            "BLOCK_S": next_power_of_2(scales),
            "QMAX": QMAX.get(scheme.activation, 1.0),
            "ROUND": scheme.activation == "int8",
            "MIN_SCALE": MIN_SCALE,
        }

    def _make_adapter_arguments(self, routing: Routing) -> dict[str, object]:
        """Return the kernel arguments for sending adapter slots.

        A call without adapters sends -1, because other ranks may use adapters in the same call.
        """
        adapters_R, slots_T = self.buffers.adapters_R, routing.slots_T
        mode = "unused" if slots_T is None else "slots"
        return {
            "adapters_ptr": self.rank_bits_T if slots_T is None else slots_T,
            "adapters_heap_ptr": self.rank_bits_T if adapters_R is None else adapters_R,
            "ADAPTERS": "none" if adapters_R is None else mode,
        }

    def receive(self) -> None:
        """Wait until the rows of all ranks have arrived."""
        from prepare_finalize.symm_mem.kernels.dispatch import arrival_kernel

        arguments = self._make_wait_arguments(self.buffers.arrived_W, self.buffers.dispatches)
        launch(arrival_kernel, (1,), num_warps=1, **arguments)

    def combine(self, out_TH: torch.Tensor) -> None:
        """Signal that y_RH is complete, then add each token's sums from all ranks into out_TH."""
        from prepare_finalize.symm_mem.kernels.combine import combine_kernel

        problem, buffers = self.problem, self.buffers
        shape = _choose_shape(problem, _COMBINE)
        num_items = self.tokens * -(-problem.hidden // shape.block)
        launch(
            combine_kernel,
            (_choose_grid_size(num_items, shape, out_TH.device),),
            y_heap_ptr=buffers.y_RH,
            rank_bits_ptr=self.rank_bits_T,
            out_ptr=out_TH,
            deltas_ptr=self.deltas_W,
            tokens=self.tokens,
            capacity=self._capacity,
            rank=self.manager.rank,
            stride_out=out_TH.stride(0),
            HIDDEN=problem.hidden,
            BLOCK=shape.block,
            num_warps=shape.warps,
            **self._make_peer_row_arguments(),
            **self._make_wait_arguments(buffers.summed_W, buffers.combines),
        )


def _choose_shape(problem: Problem, large_batch: LaunchShape) -> LaunchShape:
    is_small = problem.tokens <= _SMALL_BATCH_TOKENS
    return (_SMALL_BATCH if is_small else large_batch).fit(problem.hidden)


def _choose_grid_size(num_items: int, shape: LaunchShape, device: torch.device) -> int:
    """Return the grid size for a number of work items.

    The interpreter runs programs one after another, so the grid on a CPU has at most 2 programs.
    """
    max_programs = 2
    if device.type == "cuda":
        max_programs = shape.programs * num_sms(device)
    return max(1, min(num_items, max_programs))


@cache
def num_sms(device: torch.device) -> int:
    """Return the number of SMs of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
