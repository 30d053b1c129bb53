"""Describe which rows of activations hold a token, and make the kernel arguments for them.

A pair is a token together with one of its K experts. Buffers of activations may have rows without a
token: rows of pairs whose expert is on another rank, or unused rows of an expert in the batched
layout. Values of these rows are undefined, so quantization kernels do not read them.
"""

from dataclasses import dataclass, replace

import torch

from modular_kernel.ops.count import id_arguments, local_ids
from modular_kernel.tensors import DispatchedRouting


@dataclass(frozen=True)
class PairRows:
    """Row p is pair p of `routing`. It holds a token if the pair's expert is on this rank.

    num_local: number of experts on this rank.
    """

    routing: DispatchedRouting
    num_local: int


@dataclass(frozen=True)
class BatchedRows:
    """Rows (e, C, K). The first counts_e[i] rows of expert i hold tokens.

    counts_e: (e,) int32.
    """

    counts_e: torch.Tensor


ValidRows = PairRows | BatchedRows | None


def make_source_arguments(
    x: torch.Tensor, valid_rows: ValidRows, row_weights_R: torch.Tensor | None
) -> dict[str, object]:
    """Return the kernel arguments for the input rows, their weights, and which rows are valid."""
    ids: dict[str, object] = {"num_experts": 0, "num_local_experts": 0, "HAS_EXPERT_MAP": False}
    source = "all"
    if isinstance(valid_rows, PairRows):
        ids, source = id_arguments(valid_rows.routing, valid_rows.num_local), "pairs"
    elif isinstance(valid_rows, BatchedRows):
        ids["topk_ids_ptr"], source = valid_rows.counts_e, "batched"
    ids["row_filter_ptr"] = ids.pop("topk_ids_ptr", x)
    return {
        "expert_map_ptr": x,
        **ids,
        "x_ptr": x,
        "router_weights_ptr": x if row_weights_R is None else row_weights_R,
        "stride_x": x.stride(0),
        "ROW_SOURCE": source,
        "HAS_ROUTER_WEIGHTS": row_weights_R is not None,
    }


def get_segments(rows: int, valid_rows: ValidRows) -> tuple[int, int]:
    """Return (number of segments, rows per segment) of `rows` rows.

    In the batched layout, the rows of each expert are a segment. Otherwise, all rows are one
    segment.
    """
    segments = valid_rows.counts_e.numel() if isinstance(valid_rows, BatchedRows) else 1
    return segments, rows // segments


def make_valid_row_mask(x: torch.Tensor, valid_rows: ValidRows) -> torch.Tensor:
    """Return a mask, (R,) bool, of the rows that hold a token."""
    if isinstance(valid_rows, PairRows):
        # Discard the count of invalid ids, because they are counted when pairs are sorted.
        discarded_count = torch.zeros_like(valid_rows.routing.invalid_ids)
        routing = replace(valid_rows.routing, invalid_ids=discarded_count)
        return local_ids(routing, valid_rows.num_local).flatten() >= 0
    if isinstance(valid_rows, BatchedRows):
        positions = torch.arange(x.shape[0] // valid_rows.counts_e.numel(), device=x.device)
        return (positions < valid_rows.counts_e[:, None]).flatten()
    return torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
