"""LoRA adapters for the Triton GEMMs: launch the shrink u = A x, and pass B to the GEMM.

An adapter has a matrix A (rank, K) and a matrix B (N, rank) for each GEMM and expert, where the
weights of the GEMM are (N, K). The matrices of all loaded adapters are stacked. The index of an
adapter in the stack is its slot. Each token has the slot of its adapter.

The shrink is a separate launch before each GEMM. It writes u in the dtype of the layer, with one
row for each row of the GEMM. u has `rank` columns, or twice as many if gate and up have separate
matrices A. The expand is fused into the GEMM: the device function `expand_adapters` adds B u to
each float32 accumulator tile before the router weight, the bias and the activation function. B u is
therefore never stored.
"""

from dataclasses import dataclass
from typing import Any

import torch

from experts.triton.path import PathCall
from modular_kernel.ops.align import AlignedPairs
from modular_kernel.ops.count import id_arguments, next_power_of_2
from modular_kernel.ops.sort import SortedPairs
from modular_kernel.replay import stages
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.pdl import pdl_arguments
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights
from modular_kernel.workspace import BufferSpec, Workspace

_MIN_BLOCK_R, _MAX_BLOCK_R = 16, 64  # columns of u per shrink program and per step of the expand
_MAX_SLOT_PROGRAMS = 8  # programs that divide the adapter slots of one tile among themselves
# On a CPU, programs run sequentially and each has a fixed cost, so fewer programs are launched.
_MAX_SLOT_PROGRAMS_ON_CPU, _A_ROWS_ON_CPU = 2, 16
_STAGES = 4
_STAGE_BYTES = 24 << 10  # bytes of x and A per pipeline stage; four stages fit on any GPU
_MIN_BLOCK_K, _MAX_BLOCK_K = 32, 512
_MAX_SMALL_U = 8192  # maximum number of elements of u for which each pair gets its own program
_MAX_SMALL_K = 4096  # with a larger K, a program computes fewer columns of u
# With at most this many pairs, some SMs stay idle, so a program loads more of K at once.
_MAX_UNDERFILLED_PAIRS = 16

Matrices = tuple[torch.Tensor | None, torch.Tensor | None]  # (A, B), stacked over adapter slots


@dataclass(frozen=True)
class ShrinkOutput:
    """The shrink output u of one GEMM, and the operands with which the GEMM adds B u.

    u: (rows, rank or 2 * rank).
    slots: int32, the adapter slot of each token, or of each row in the batched format.
    b: (adapter slots, experts or 1, N, rank), the matrices B of all slots.
    up_offset: the first column of u for up; 0 if gate and up use the same columns.
    """

    u: torch.Tensor
    slots: torch.Tensor
    b: torch.Tensor
    up_offset: int

    def arguments(self) -> dict[str, object]:
        """Return the LoRA arguments of a GEMM kernel by name."""
        slots, experts, _, rank = self.b.shape
        stride_slot, stride_e, stride_n, _ = self.b.stride()
        return {
            "lora_u_ptr": self.u,
            "adapter_slots_ptr": self.slots,
            "lora_b_ptr": self.b,
            "num_adapter_slots": slots,
            "lora_rank": rank,
            "stride_lora_u": self.u.shape[-1],
            "stride_lora_b_slot": stride_slot,
            "stride_lora_b_expert": stride_e if experts > 1 else 0,
            "stride_lora_b_n": stride_n,
            "LORA_UP_OFFSET": self.up_offset,
            "HAS_LORA": True,
            "BLOCK_RANK": choose_block_r(rank),
        }


@dataclass(frozen=True)
class TileShrinkOutput:
    """The shrink output for the TMA GEMM, with columns for every adapter slot of a tile.

    `experts.triton.grouped_tma.adapters` describes the layout.

    u: (rows, slots * width), where width is the number of columns of one slot.
    tile_slots: (tiles, slots + 1) int32. A row has the number of slots in the tile, then the slots.
    b: (adapter slots, experts or 1, N, rank), the matrices B of all slots.
    up_offset: the first column for up among the columns of a slot; 0 if gate and up use the same
        columns.
    """

    u: torch.Tensor
    tile_slots: torch.Tensor
    b: torch.Tensor
    up_offset: int


def adapter_specs(problem: Problem, num_rows: int) -> dict[str, BufferSpec]:
    """Return the buffers of u for GEMMs with num_rows rows; {} for a problem without adapters."""
    spec = problem.adapters
    if spec is None:
        return {}
    return {
        "lora_u13": BufferSpec((num_rows, count_u13_columns(problem)), problem.dtype),
        "lora_u2": BufferSpec((num_rows, spec.rank), problem.dtype),
    }


class PairShrink:
    """The shrink launches of one call on the aligned path.

    A pair is a token together with one of its top_k experts. A program computes a block of pairs of
    one expert (`modular_kernel.ops.align`). If u is small, each pair gets its own program instead,
    so that more SMs have work. A batch-invariant layer always uses blocks, because the number of
    tokens would otherwise change the order of additions.
    """

    def __init__(
        self, call: PathCall, problem: Problem, aligned: AlignedPairs, slots_T: torch.Tensor
    ) -> None:
        self._call, self._problem, self._slots_T = call, problem, slots_T
        self._aligned, self._block_m = aligned, call.config.gemm1.block_m
        self._num_pairs = len(slots_T) * problem.top_k

    def shrink_x(self, x_TH: torch.Tensor) -> ShrinkOutput:
        """Launch u = A x over the tokens (T, H), for GEMM 1."""
        weights = self._call.weights
        with stages.stage(stages.SHRINK):
            return self._shrink("lora_u13", x_TH, (weights.lora_a13, weights.lora_b13))

    def shrink_h(self, h_PI: torch.Tensor) -> ShrinkOutput:
        """Launch u = A h over the pairs (P, I), for GEMM 2."""
        weights = self._call.weights
        with stages.stage(stages.SHRINK):
            return self._shrink("lora_u2", h_PI, (weights.lora_a2, weights.lora_b2))

    def _shrink(self, name: str, x: torch.Tensor, matrices: Matrices) -> ShrinkOutput:
        from experts.triton.kernels.shrink import shrink_pairs_kernel

        a, b = matrices
        assert a is not None
        assert b is not None  # validated with the weights
        problem, aligned, num_pairs = self._problem, self._aligned, self._num_pairs
        if num_pairs * a.shape[2] <= _MAX_SMALL_U and not problem.batch_invariant:
            return shrink_few_pairs(self._call, name, x, matrices, problem)
        u = self._call.workspace.take(name, (num_pairs, a.shape[2]))
        launch_args = make_shrink_arguments(a, x.shape[1], problem, self._block_m)
        launch(
            shrink_pairs_kernel,
            (
                aligned.expert_ids.numel(),
                -(-a.shape[2] // launch_args["BLOCK_RANK"]),
                launch_args["SLOT_PROGRAMS"],
            ),
            x_ptr=x,
            lora_u_ptr=u,
            adapter_slots_ptr=self._slots_T,
            sorted_token_ids_ptr=aligned.sorted_token_ids,
            expert_ids_ptr=aligned.expert_ids,
            num_tokens_post_padded_ptr=aligned.num_tokens_post_padded,
            num_pairs=num_pairs,
            stride_xm=x.stride(0),
            stride_xk=x.stride(1),
            TOP_K=problem.top_k,
            PAIRS_PER_X_ROW=num_pairs // len(x),
            **launch_args,
        )
        return ShrinkOutput(u, self._slots_T, b, a.shape[2] - b.shape[3])


class SegmentShrink:
    """The shrink launches of one call with expert-sorted rows (`modular_kernel.ops.sort`)."""

    def __init__(
        self,
        slots_T: torch.Tensor,
        problem: Problem,
        workspace: Workspace,
        order: SortedPairs,
        block_m: int,
    ) -> None:
        self._slots_T, self._problem = slots_T, problem
        self._workspace, self._order, self._block_m = workspace, order, block_m

    def shrink_x(self, x_TH: torch.Tensor, weights: ExpertWeights) -> ShrinkOutput:
        """Launch u = A x for GEMM 1. The kernel gathers the token of each row from x (T, H)."""
        with stages.stage(stages.SHRINK):
            return self._shrink("lora_u13", x_TH, (weights.lora_a13, weights.lora_b13), gather=True)

    def shrink_h(self, h_RI: torch.Tensor, weights: ExpertWeights) -> ShrinkOutput:
        """Launch u = A h over the sorted rows (R, I), for GEMM 2."""
        with stages.stage(stages.SHRINK):
            return self._shrink("lora_u2", h_RI, (weights.lora_a2, weights.lora_b2), gather=False)

    def _shrink(
        self, name: str, x: torch.Tensor, matrices: Matrices, *, gather: bool
    ) -> ShrinkOutput:
        from experts.triton.kernels.shrink import shrink_segments_kernel

        a, b = matrices
        assert a is not None
        assert b is not None  # validated with the weights
        order = self._order
        u = self._workspace.take(name, (order.row_of_pair_TK.numel(), a.shape[2]))
        launch_args = make_shrink_arguments(a, x.shape[1], self._problem, self._block_m)
        launch(
            shrink_segments_kernel,
            (
                order.max_tiles,
                -(-a.shape[2] // launch_args["BLOCK_RANK"]),
                launch_args["SLOT_PROGRAMS"],
            ),
            x_ptr=x,
            lora_u_ptr=u,
            adapter_slots_ptr=self._slots_T,
            tokens_ptr=order.token_of_row,
            tiles_ptr=order.tiles,
            max_tiles=order.max_tiles,
            stride_xm=x.stride(0),
            stride_xk=x.stride(1),
            GATHER_TOKENS=gather,
            **launch_args,
        )
        return ShrinkOutput(u, self._slots_T, b, a.shape[2] - b.shape[3])


def shrink_batched(
    u_eCQ: torch.Tensor,
    x_eCK: torch.Tensor,
    slots_eC: torch.Tensor,
    counts_e: torch.Tensor,
    matrices: tuple[torch.Tensor, torch.Tensor],
    problem: Problem,
    block_m: int,
) -> ShrinkOutput:
    """Launch u = A x over rows in the batched format (num_experts, capacity, K).

    u_eCQ: the output u, (e, C, Q), where Q is rank or 2 * rank.
    slots_eC: int32, the adapter slot of each row.
    counts_e: int32, the number of valid rows of each expert.
    matrices: (A, B), stacked over slots.
    block_m: rows per program.
    """
    from experts.triton.kernels.shrink import shrink_batched_kernel

    a, b = matrices
    experts, capacity, k = x_eCK.shape
    launch_args = make_shrink_arguments(a, k, problem, block_m)
    row_blocks, column_blocks = -(-capacity // block_m), -(-a.shape[2] // launch_args["BLOCK_RANK"])
    launch(
        shrink_batched_kernel,
        (row_blocks * launch_args["SLOT_PROGRAMS"], column_blocks, experts),
        x_ptr=x_eCK,
        lora_u_ptr=u_eCQ,
        adapter_slots_ptr=slots_eC,
        counts_ptr=counts_e,
        capacity=capacity,
        **launch_args,
    )
    return ShrinkOutput(u_eCQ, slots_eC, b, a.shape[2] - b.shape[3])


def shrink_few_pairs(
    call: PathCall, name: str, x: torch.Tensor, matrices: Matrices, problem: Problem
) -> ShrinkOutput:
    """Launch u = A x with a separate program for each routed pair.

    name: the workspace buffer of u.
    x: one row per token, or one row per pair.
    matrices: (A, B), stacked over slots.
    """
    from experts.triton.kernels.shrink import shrink_few_kernel

    routing, (a, b) = call.tokens.routing, matrices
    slots_T = routing.adapters_T
    assert slots_T is not None
    assert a is not None
    assert b is not None  # validated with the weights
    num_pairs, k = routing.topk_ids_TK.numel(), x.shape[1]
    u = call.workspace.take(name, (num_pairs, a.shape[2]))
    block_r, block_k, num_warps = shrink_few_blocks(k, num_pairs, x.device)
    launch(
        shrink_few_kernel,
        (num_pairs, -(-a.shape[2] // block_r)),
        x_ptr=x,
        lora_u_ptr=u,
        adapter_slots_ptr=slots_T,
        num_pairs=num_pairs,
        stride_xm=x.stride(0),
        stride_xk=x.stride(1),
        TOP_K=problem.top_k,
        PAIRS_PER_X_ROW=num_pairs // len(x),
        BLOCK_RANK=block_r,
        BLOCK_K=block_k,
        num_warps=num_warps,
        **_make_matrix_arguments(a, k),
        **id_arguments(routing, problem.e),
        **pdl_arguments(),
    )
    return ShrinkOutput(u, slots_T, b, a.shape[2] - b.shape[3])


def shrink_few_blocks(k: int, num_pairs: int, device: torch.device) -> tuple[int, int, int]:
    """Return (rows of A, K elements per step, warps) for a program of `shrink_few_kernel`."""
    padded_k, is_underfilled = next_power_of_2(k), num_pairs <= _MAX_UNDERFILLED_PAIRS
    if device.type == "cpu":
        return _A_ROWS_ON_CPU, min(padded_k, 2048), 8
    if k <= _MAX_SMALL_K:
        return 4, min(padded_k, 4096 if is_underfilled else 2048), 8
    return (2, min(padded_k, 16384), 16) if is_underfilled else (1, 4096, 8)


def _make_matrix_arguments(a: torch.Tensor, k: int) -> dict[str, Any]:
    slots, experts, rank_rows, _ = a.shape
    stride_slot, stride_e, stride_r, _ = a.stride()
    return {
        "lora_a_ptr": a,
        "num_adapter_slots": slots,
        "lora_a_rows": rank_rows,
        "size_k": k,
        "stride_lora_a_slot": stride_slot,
        "stride_lora_a_expert": stride_e if experts > 1 else 0,
        "stride_lora_a_rank": stride_r,
    }


def make_shrink_arguments(
    a: torch.Tensor, k: int, problem: Problem, block_m: int
) -> dict[str, Any]:
    """Return the arguments that the tiled shrink kernels share.

    A step of a kernel loads a tile of block_m rows of x and a block of rows of A. BLOCK_K is as
    large as _STAGE_BYTES allows.

    a: (adapter slots, experts or 1, rank or 2 * rank, K), the matrices A.
    block_m: rows of x per program.
    """
    block_r = _MIN_BLOCK_R if block_m <= _MIN_BLOCK_R else choose_block_r(a.shape[2])
    max_block_k = _STAGE_BYTES // ((block_m + block_r) * problem.dtype.itemsize)
    max_power_of_2 = max(1 << max_block_k.bit_length() - 1, _MIN_BLOCK_K)
    block_k = min(max_power_of_2, _MAX_BLOCK_K, next_power_of_2(k))
    max_slot_programs = _MAX_SLOT_PROGRAMS_ON_CPU if a.device.type == "cpu" else _MAX_SLOT_PROGRAMS
    return {
        **_make_matrix_arguments(a, k),
        "INPUT_PRECISION": problem.fp32_precision,
        "SLOT_PROGRAMS": min(len(a), max_slot_programs),
        "BLOCK_M": block_m,
        "BLOCK_RANK": block_r,
        "BLOCK_K": max(block_k, _MIN_BLOCK_K),
        "num_warps": 4,
        "num_stages": _STAGES,
    }


def count_u13_columns(problem: Problem) -> int:
    """Return the columns of u for GEMM 1: R, or 2R if gate and up have separate matrices A."""
    spec = problem.adapters
    assert spec is not None
    return spec.shapes(problem.e, problem.w1_rows, problem.hidden, problem.intermediate)[
        "lora_a13"
    ][2]


def choose_block_r(rank: int) -> int:
    """Return the number of columns of u that one program computes, a power of two."""
    return min(max(next_power_of_2(rank), _MIN_BLOCK_R), _MAX_BLOCK_R)
