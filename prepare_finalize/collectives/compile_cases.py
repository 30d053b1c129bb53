"""Launches of the kernels of fixed-capacity exchanges on meta tensors, for `mk compile`.

`mk compile` compiles every kernel without a GPU. The meta tensors give the kernels shapes and
dtypes.
"""

from dataclasses import replace
from typing import Any

import torch

from modular_kernel.ops.expert_slots import count_slots_per_rank
from modular_kernel.spec.problem import MAX_TOP_K, Parallel, Problem
from prepare_finalize.common.blocks import (
    Blocks,
    BlockSums,
    OutgoingRows,
    Ranks,
    ReceivedColumns,
    fill_blocks,
    mask_remote_pairs,
    read_blocks,
    sum_blocks,
)
from prepare_finalize.common.compile_cases import META, empty, problems_with
from prepare_finalize.common.device_status import FIELDS, NOT_REFUSED, CallCounter, DeviceStatus
from prepare_finalize.common.fixed_capacity import make_block_layouts

_CHANGES: tuple[dict[str, Any], ...] = (
    {"dtype": torch.float32, "lora": "adapters=4,rank=16"},
    {"top_k": MAX_TOP_K, "experts": 64, "parallel": Parallel(16)},
)


def problems() -> tuple[Problem, ...]:
    """Return problems that together cover every variant of the launches."""
    return problems_with(_CHANGES)


def launch_all(problem: Problem, *, has_single_block: bool) -> None:
    """Launch every kernel of a call, with quantized rows if the scheme quantizes activations.

    has_single_block: see `FixedCapacityExchange`.
    """
    layout = make_block_layouts(problem, problem.tokens)[problem.scheme.dispatched_quantized]
    world, tokens, k = problem.parallel.world_size, problem.tokens, problem.top_k
    ranks = Ranks(problem.parallel.rank, world, count_slots_per_rank(problem.placement))
    status = DeviceStatus(world, META)
    counter, header_F = CallCounter(status, 1), empty(len(FIELDS), dtype=torch.int64)
    row_of_token_WT = None if has_single_block else empty(world, tokens)
    rows = OutgoingRows(
        empty(tokens, problem.hidden, dtype=layout.dtype),
        empty(tokens, layout.scales, dtype=torch.float32) if layout.scales else None,
        empty(tokens, k),
        empty(tokens, k, dtype=torch.float32),
        empty(tokens) if layout.adapters else None,
        empty(1),
    )
    blocks = Blocks(empty(2 * world, layout.nbytes, dtype=torch.uint8), layout, ranks, ranks.rank)
    outputs: dict[str, Any] = {"counter": counter, "header_F": header_F}
    counter.begin()
    one_token = replace(
        rows,
        x_TH=rows.x_TH[:1],
        scale_TG=None if rows.scale_TG is None else rows.scale_TG[:1],
        expert_numbers_TK=empty(1, k, dtype=torch.int64),
        weights_TK=rows.weights_TK[:1],
    )
    fill_blocks(one_token, blocks, row_of_token_WT=row_of_token_WT, **outputs)
    fill_blocks(rows, blocks, row_of_token_WT=row_of_token_WT, **outputs)
    fill_blocks(replace(rows, adapters_T=None), blocks, row_of_token_WT=row_of_token_WT, **outputs)
    if has_single_block and problem.scheme.dispatched_quantized:
        in_place = replace(rows, scale_TG=None)
        fill_blocks(in_place, blocks, row_of_token_WT=None, x_in_place=True, **outputs)
    num_rows = world * layout.block_rows
    columns = ReceivedColumns(
        problem.e,
        empty(num_rows, k),
        empty(num_rows, k, dtype=torch.float32),
        empty(num_rows, layout.scales, dtype=torch.float32) if layout.scales else None,
        empty(num_rows) if layout.adapters else None,
    )
    limits = empty(4, dtype=torch.int64)
    received = replace(blocks, bytes_SB=blocks.bytes_SB[world:])
    read_blocks(received, columns, status=status, header_F=header_F, limits=limits)
    sums_SRH = empty(2 * world, layout.block_rows, problem.hidden, dtype=problem.dtype)
    out_TH = empty(tokens, problem.hidden, dtype=problem.dtype)
    sum_blocks(BlockSums(sums_SRH, ranks, world, 0), out_TH, row_of_token_WT, counter)


def launch_headers(problem: Problem) -> None:
    """Launch the kernels of a call with replicated tokens, which sends no rows."""
    world, shape = problem.parallel.world_size, (problem.tokens, problem.hidden)
    status = DeviceStatus(world, META)
    counter, header_F = CallCounter(status, 1), empty(len(FIELDS), dtype=torch.int64)
    counter.write_header(header_F, problem.tokens, refusal=NOT_REFUSED)
    headers_WF = empty(world, len(FIELDS), dtype=torch.int64)
    status.verify(headers_WF, header_F, empty(4, dtype=torch.int64))
    slots_TK = empty(problem.tokens, problem.top_k)
    ranks = Ranks(problem.parallel.rank, world, problem.e)
    mask_remote_pairs(slots_TK, torch.empty_like(slots_TK, dtype=torch.float32), ranks, problem.e)
    sums = BlockSums(empty(1, *shape, dtype=torch.float32), Ranks(0, 1, 0), 0, 0)
    sum_blocks(sums, empty(*shape, dtype=problem.dtype), None, counter)
