"""Adapters in Triton products: A x beforehand, B of it inside the product, tile by tile.

u = A x is (rows, R or 2R) in the problem's dtype, one row for each row of the product. There is no
buffer of deltas: `add_adapters` adds them to the float32 sums, before weight, bias and activation.
"""

from dataclasses import dataclass
from typing import Any

import torch

from experts.triton.path import PathCall
from modular_kernel.ops.align import Aligned
from modular_kernel.ops.count import id_arguments, next_power_of_2
from modular_kernel.ops.sort import Sorted
from modular_kernel.replay import stages
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.pdl import overlap
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights
from modular_kernel.workspace import BufferSpec, Workspace

_LEAST_BLOCK, _MOST_BLOCK = 16, 64  # columns of a program's u, and depth of a step of B u
_MOST_PARTS = 8  # programs that share the slots of a tile's rows
# On a CPU programs run one after the other, and each takes its time: fewer do the same.
_MOST_PARTS_ON_CPU, _ROWS_ON_CPU = 2, 16
_STAGES = 4
_STEP_BYTES = 24 << 10  # of x and A on their way in a step: four fit into any GPU's shared memory
_LEAST_K, _MOST_K = 32, 512  # depth of a step
_FEW_ROWS = 8192  # of A, one for each pair and column of u: up to here pairs go one by one
_DEEP = 4096  # of a row of A, beyond which a program has fewer rows
_FEW_PAIRS = 16  # whose programs leave the GPU empty: each takes more of a row at once

Matrices = tuple[torch.Tensor | None, torch.Tensor | None]  # A and B of every slot


@dataclass(frozen=True)
class Shrunk:
    """The left operand of B u in one product. slots: each token's, or each row's; up: how far up's
    u lies behind gate's, 0 if they are the same."""

    u: torch.Tensor
    slots: torch.Tensor
    b: torch.Tensor
    up: int

    def arguments(self) -> dict[str, object]:
        """Return the arguments of a kernel that adds deltas."""
        slots, experts, _, rank = self.b.shape
        stride_l, stride_e, stride_n, _ = self.b.stride()
        return {
            "u_ptr": self.u,
            "slots_ptr": self.slots,
            "lora_b_ptr": self.b,
            "num_slots": slots,
            "rank": rank,
            "stride_u": self.u.shape[-1],
            "stride_lbl": stride_l,
            "stride_lbe": stride_e if experts > 1 else 0,
            "stride_lbn": stride_n,
            "U_UP": self.up,
            "LORA": True,
            "BLOCK_R": block_r(rank),
        }


@dataclass(frozen=True)
class TileShrunk:
    """The same, of every slot that a tile's rows name, side by side: grouped_tma.adapters makes it.

    u: (rows, slots * width). named: (tiles, slots + 1) int32. b, up: as `Shrunk` has them.
    """

    u: torch.Tensor
    named: torch.Tensor
    b: torch.Tensor
    up: int


def adapter_specs(problem: Problem, rows: int) -> dict[str, BufferSpec]:
    """Return the buffers of u for as many rows; none for a problem without adapters."""
    spec = problem.adapters
    if spec is None:
        return {}
    return {
        "lora_u13": BufferSpec((rows, rows_of_a13(problem)), problem.dtype),
        "lora_u2": BufferSpec((rows, spec.rank), problem.dtype),
    }


class PairAdapters:
    """What adapters add in one call over aligned pairs, in blocks of block_m.

    A few pairs are multiplied one by one, which has more programs; but not where a token's bits
    must not depend on how many others there are.
    """

    def __init__(
        self, call: PathCall, problem: Problem, aligned: Aligned, slots_T: torch.Tensor
    ) -> None:
        self._call, self._problem, self._slots_T = call, problem, slots_T
        self._aligned, self._block_m = aligned, call.config.gemm1.block_m
        self._pairs = len(slots_T) * problem.top_k

    def of_w1(self, x_TH: torch.Tensor) -> Shrunk:
        """Launch A x of the tokens (T, H), for the first product."""
        weights = self._call.weights
        with stages.stage(stages.SHRINK):
            return self._shrunk("lora_u13", x_TH, (weights.lora_a13, weights.lora_b13))

    def of_w2(self, h_PI: torch.Tensor) -> Shrunk:
        """Launch A h of the pairs (P, I), for the second product."""
        weights = self._call.weights
        with stages.stage(stages.SHRINK):
            return self._shrunk("lora_u2", h_PI, (weights.lora_a2, weights.lora_b2))

    def _shrunk(self, name: str, x: torch.Tensor, matrices: Matrices) -> Shrunk:
        from experts.triton.kernels.shrink import shrink_pairs_kernel

        a, b = matrices
        assert a is not None
        assert b is not None  # the weights were checked
        problem, aligned, pairs = self._problem, self._aligned, self._pairs
        if pairs * a.shape[2] <= _FEW_ROWS and not problem.batch_invariant:
            return shrink_few(self._call, name, x, matrices, problem)
        u = self._call.workspace.take(name, (pairs, a.shape[2]))
        how = shrink_arguments(a, x.shape[1], problem, self._block_m)
        launch(
            shrink_pairs_kernel,
            (aligned.expert_ids.numel(), -(-a.shape[2] // how["BLOCK_R"]), how["PARTS"]),
            x_ptr=x,
            u_ptr=u,
            slots_ptr=self._slots_T,
            sorted_ptr=aligned.sorted_token_ids,
            expert_ids_ptr=aligned.expert_ids,
            num_post_ptr=aligned.num_tokens_post_padded,
            num_pairs=pairs,
            stride_xm=x.stride(0),
            stride_xk=x.stride(1),
            TOP_K=problem.top_k,
            X_TOP_K=pairs // len(x),
            **how,
        )
        return Shrunk(u, self._slots_T, b, a.shape[2] - b.shape[3])


class SegmentAdapters:
    """What adapters add in one call over rows that lie expert by expert, in tiles of block_m."""

    def __init__(
        self,
        slots_T: torch.Tensor,
        problem: Problem,
        workspace: Workspace,
        order: Sorted,
        block_m: int,
    ) -> None:
        self._slots_T, self._problem = slots_T, problem
        self._workspace, self._order, self._block_m = workspace, order, block_m

    def of_w1(self, x_TH: torch.Tensor, weights: ExpertWeights) -> Shrunk:
        """Launch A x of the rows' tokens (T, H), for the first product."""
        with stages.stage(stages.SHRINK):
            return self._shrunk("lora_u13", x_TH, (weights.lora_a13, weights.lora_b13), gather=True)

    def of_w2(self, h_RI: torch.Tensor, weights: ExpertWeights) -> Shrunk:
        """Launch A h of the rows (P, I), for the second product."""
        with stages.stage(stages.SHRINK):
            return self._shrunk("lora_u2", h_RI, (weights.lora_a2, weights.lora_b2), gather=False)

    def _shrunk(self, name: str, x: torch.Tensor, matrices: Matrices, *, gather: bool) -> Shrunk:
        from experts.triton.kernels.shrink import shrink_segments_kernel

        a, b = matrices
        assert a is not None
        assert b is not None  # the weights were checked
        order = self._order
        u = self._workspace.take(name, (order.row_of_pair_TK.numel(), a.shape[2]))
        how = shrink_arguments(a, x.shape[1], self._problem, self._block_m)
        launch(
            shrink_segments_kernel,
            (order.max_tiles, -(-a.shape[2] // how["BLOCK_R"]), how["PARTS"]),
            x_ptr=x,
            u_ptr=u,
            slots_ptr=self._slots_T,
            tokens_ptr=order.token_of_row,
            tiles_ptr=order.tiles,
            max_tiles=order.max_tiles,
            stride_xm=x.stride(0),
            stride_xk=x.stride(1),
            GATHER=gather,
            **how,
        )
        return Shrunk(u, self._slots_T, b, a.shape[2] - b.shape[3])


def shrink_batched(
    u_eCR: torch.Tensor,
    x_eCK: torch.Tensor,
    slots_eC: torch.Tensor,
    counts_e: torch.Tensor,
    matrices: tuple[torch.Tensor, torch.Tensor],
    problem: Problem,
    block_m: int,
) -> Shrunk:
    """Launch u = A x over rows that lie expert by expert; matrices: A and B of every slot."""
    from experts.triton.kernels.shrink import shrink_batched_kernel

    a, b = matrices
    experts, capacity, depth = x_eCK.shape
    how = shrink_arguments(a, depth, problem, block_m)
    blocks, parts = -(-capacity // block_m), -(-a.shape[2] // how["BLOCK_R"])
    launch(
        shrink_batched_kernel,
        (blocks * how["PARTS"], parts, experts),
        x_ptr=x_eCK,
        u_ptr=u_eCR,
        slots_ptr=slots_eC,
        counts_ptr=counts_e,
        capacity=capacity,
        **how,
    )
    return Shrunk(u_eCR, slots_eC, b, a.shape[2] - b.shape[3])


def shrink_few(
    call: PathCall, name: str, x: torch.Tensor, matrices: Matrices, problem: Problem
) -> Shrunk:
    """Launch A x for every routed pair by itself; x has a row for each token, or for each pair."""
    from experts.triton.kernels.shrink import shrink_few_kernel

    routing, (a, b) = call.tokens.routing, matrices
    slots_T = routing.adapters_T
    assert slots_T is not None
    assert a is not None
    assert b is not None  # the weights were checked
    pairs, depth = routing.topk_ids_TK.numel(), x.shape[1]
    u = call.workspace.take(name, (pairs, a.shape[2]))
    rows, block_k, warps = few_blocks(depth, pairs, x.device)
    launch(
        shrink_few_kernel,
        (pairs, -(-a.shape[2] // rows)),
        x_ptr=x,
        u_ptr=u,
        slots_ptr=slots_T,
        num_pairs=pairs,
        stride_xm=x.stride(0),
        stride_xk=x.stride(1),
        TOP_K=problem.top_k,
        X_TOP_K=pairs // len(x),
        BLOCK_R=rows,
        BLOCK_K=block_k,
        num_warps=warps,
        **_matrix_arguments(a, depth),
        **id_arguments(routing, problem.e),
        **overlap(),
    )
    return Shrunk(u, slots_T, b, a.shape[2] - b.shape[3])


def few_blocks(depth: int, pairs: int, device: torch.device) -> tuple[int, int, int]:
    """Return a program's rows of A, its values of each at a time, and its warps, for one pair."""
    whole, few = next_power_of_2(depth), pairs <= _FEW_PAIRS
    if device.type == "cpu":
        return _ROWS_ON_CPU, min(whole, 2048), 8
    if depth <= _DEEP:
        return 4, min(whole, 4096 if few else 2048), 8
    return (2, min(whole, 16384), 16) if few else (1, 4096, 8)


def _matrix_arguments(a: torch.Tensor, depth: int) -> dict[str, Any]:
    slots, experts, rank_rows, _ = a.shape
    stride_l, stride_e, stride_r, _ = a.stride()
    return {
        "a_ptr": a,
        "num_slots": slots,
        "rank_rows": rank_rows,
        "depth": depth,
        "stride_al": stride_l,
        "stride_ae": stride_e if experts > 1 else 0,
        "stride_ar": stride_r,
    }


def shrink_arguments(a: torch.Tensor, depth: int, problem: Problem, block_m: int) -> dict[str, Any]:
    """Return what all kernels of tiles take. Few rows leave room for deep steps, and few tiles for
    more programs."""
    columns = _LEAST_BLOCK if block_m <= _LEAST_BLOCK else block_r(a.shape[2])
    deepest = _STEP_BYTES // ((block_m + columns) * problem.dtype.itemsize)
    block_k = min(max(1 << deepest.bit_length() - 1, _LEAST_K), _MOST_K, next_power_of_2(depth))
    return {
        **_matrix_arguments(a, depth),
        "PRECISION": problem.fp32_precision,
        "PARTS": min(len(a), _MOST_PARTS_ON_CPU if a.device.type == "cpu" else _MOST_PARTS),
        "BLOCK_M": block_m,
        "BLOCK_R": columns,
        "BLOCK_K": max(block_k, _LEAST_K),
        "num_warps": 4,
        "num_stages": _STAGES,
    }


def rows_of_a13(problem: Problem) -> int:
    spec = problem.adapters
    assert spec is not None
    return spec.shapes(problem.e, problem.w1_rows, problem.hidden, problem.intermediate)[
        "lora_a13"
    ][2]


def block_r(rank: int) -> int:
    """Return the columns of u that a program has, of so many."""
    return min(max(next_power_of_2(rank), _LEAST_BLOCK), _MOST_BLOCK)
