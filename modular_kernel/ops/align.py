"""moe_align_block_size: sort pairs by expert, and pad the pairs of each expert to whole blocks.

A pair is a token together with one of its K experts. A pair is skipped if its expert id is -1, or
if its expert is on another rank. The result has the form that grouped GEMM kernels of vLLM expect:
every block of block_size positions has pairs of only one expert. `moe_align_block_size` is the
public function, and `align` is the same operation in workspace buffers, for TritonExperts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from modular_kernel.errors import CapacityError, DeviceError, DtypeError, RoutingError, ShapeError
from modular_kernel.ops.count import (
    CHUNK,
    compute_num_bins,
    count_chunks,
    count_pairs,
    counts_spec,
    id_arguments,
    local_ids,
    next_power_of_2,
)
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.pdl import pdl_arguments
from modular_kernel.replay.launch.runtime import use_triton
from modular_kernel.spec.problem import IdSpace
from modular_kernel.tensors import DispatchedRouting
from modular_kernel.utils.argument_checks import MAX_INT32, Count, expect
from modular_kernel.utils.tensor_checks import check_tensor
from modular_kernel.workspace import BufferSpec, Workspace

# Number of blocks whose expert ids and padding one program writes.
_BLOCKS_PER_FILL_PROGRAM = 8
# Limits for a single launch, in which every program counts all pairs by comparing each pair with
# every bin.
_MAX_SINGLE_LAUNCH_PAIRS = 4096
_MAX_COMPARISONS = 1 << 20


@dataclass(frozen=True)
class AlignedPairs:
    """Pairs in blocks. All pairs of a block have the same expert.

    sorted_token_ids: (P,) int32, index of the pair in each position (token = pair // K). Pairs of
        an expert keep their order. The index is T * K in padding, and from num_tokens_post_padded
        on.
    expert_ids: (ceil(P / block_size),) int32, the local expert of each block. It is -1 for blocks
        of skipped pairs, which come first, and for unused blocks at the end.
    num_tokens_post_padded: (1,) int32, the number of positions in use, including padding.
    """

    sorted_token_ids: torch.Tensor
    expert_ids: torch.Tensor
    num_tokens_post_padded: torch.Tensor


def compute_aligned_length(num_pairs: int, block_size: int, num_local: int) -> int:
    """Return P, the maximum length of sorted_token_ids.

    The pairs occupy at most num_pairs blocks. Every expert has at most one partial block, and so do
    the skipped pairs.

    num_pairs: number of pairs.
    block_size: number of pairs per block.
    num_local: number of local experts.
    """
    if num_pairs < num_local + 1:
        return num_pairs * block_size
    return num_pairs + (num_local + 1) * (block_size - 1)


def align_specs(num_pairs: int, block_size: int, num_local: int) -> Mapping[str, BufferSpec]:
    """Return the workspace buffers of `align`."""
    length = compute_aligned_length(num_pairs, block_size, num_local)
    return {
        "align_sorted": BufferSpec((length,), torch.int32),
        "align_experts": BufferSpec((-(-length // block_size),), torch.int32),
        "align_num_post": BufferSpec((1,), torch.int32),
        "align_scratch": counts_spec(num_pairs, num_local),
    }


def align(
    routing: DispatchedRouting,
    *,
    block_size: int,
    num_local: int,
    workspace: Workspace,
    ignore_invalid: bool = False,
) -> AlignedPairs:
    """Align the pairs of `routing` in workspace buffers that `align_specs` declares.

    On a GPU, few pairs take one launch, in which every program counts all pairs. Otherwise, there
    are three launches (count, scan, place).

    block_size: number of pairs per block, a power of two.
    num_local: number of local experts.
    ignore_invalid: whether to omit skipped pairs. If not, they get blocks with expert -1.
    """
    num_pairs = routing.topk_ids_TK.numel()
    specs = align_specs(num_pairs, block_size, num_local)
    sorted_ids, experts, num_post, scratch = (
        workspace.take(name, spec.shape) for name, spec in specs.items()
    )
    aligned = AlignedPairs(sorted_ids, experts, num_post)
    if not use_triton(sorted_ids):
        align_ref(routing, block_size, num_local, ignore_invalid=ignore_invalid, out=aligned)
        return aligned
    from modular_kernel.ops.kernels.align import align_kernel, align_place_kernel

    bins = compute_num_bins(num_local)
    single_launch = num_pairs <= _MAX_SINGLE_LAUNCH_PAIRS and num_pairs * bins <= _MAX_COMPARISONS
    chunks = count_chunks(num_pairs)
    arguments = {
        "sorted_token_ids_ptr": sorted_ids,
        "expert_ids_ptr": experts,
        "num_tokens_post_padded_ptr": num_post,
        "num_pairs": num_pairs,
        "num_chunks": chunks,
        "num_positions": sorted_ids.numel(),
        "num_blocks": experts.numel(),
        "IGNORE_INVALID": ignore_invalid,
        "CHUNK_SIZE": CHUNK,
        "NUM_BINS": bins,
        "BLOCK_SIZE": block_size,
        "BLOCKS_PER_PROGRAM": _BLOCKS_PER_FILL_PROGRAM,
        **id_arguments(routing, num_local),
    }
    grid = (chunks + -(-experts.numel() // _BLOCKS_PER_FILL_PROGRAM),)
    if single_launch:
        block_pairs = max(CHUNK, next_power_of_2(num_pairs))
        arguments |= {
            "invalid_count_ptr": routing.invalid_ids,
            "BLOCK_PAIRS": block_pairs,
            **pdl_arguments(),
        }
        launch(align_kernel, grid, num_warps=4 if block_pairs <= 1024 else 8, **arguments)
    else:
        counts = count_pairs(routing, num_local, scratch=scratch)
        arguments |= {"chunk_prefix_ptr": counts.prefix, "bucket_totals_ptr": counts.totals}
        launch(align_place_kernel, grid, **arguments)
    return aligned


def moe_align_block_size(
    topk_ids_TK: torch.Tensor,
    block_size: int,
    num_experts: int,
    *,
    expert_map: torch.Tensor | None = None,
    ignore_invalid: bool = False,
    checked: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (sorted_token_ids, expert_ids, num_tokens_post_padded), as in `AlignedPairs`.

    topk_ids_TK: (T, K) int32 or int64 in [-1, num_experts).
    block_size: number of pairs per block, a power of two.
    expert_map: (num_experts,) int32, the local id of each expert, or -1 if it is on another rank.
    ignore_invalid: whether to omit skipped pairs. If not, they get blocks with expert -1.
    checked: whether to raise RoutingError for an id out of range. If not, the pair is skipped.

    Raises ShapeError, DtypeError or another InputError for invalid arguments.
    """
    check_tensor("topk_ids", topk_ids_TK)
    for name, value in (("block_size", block_size), ("num_experts", num_experts)):
        expect(name, value, Count)
    expect("ignore_invalid", ignore_invalid, bool)
    expect("checked", checked, bool)
    if topk_ids_TK.dim() != 2:
        raise ShapeError("topk_ids", got=tuple(topk_ids_TK.shape), need="(T, K)")
    if topk_ids_TK.dtype not in (torch.int32, torch.int64):
        raise DtypeError("topk_ids", got=topk_ids_TK.dtype, need="int32 or int64")
    if block_size & (block_size - 1):
        raise ShapeError("block_size", got=block_size, need="a power of two")
    length = compute_aligned_length(topk_ids_TK.numel(), block_size, num_experts)
    if length > MAX_INT32:
        raise CapacityError("aligned pairs", got=length, need=f"<= {MAX_INT32}")
    if expert_map is not None:
        _check_expert_map(expert_map, num_experts, topk_ids_TK.device)
    is_invalid = (topk_ids_TK < -1) | (topk_ids_TK >= num_experts)
    if checked and bool(is_invalid.any()):
        got = int(topk_ids_TK[is_invalid][0])
        raise RoutingError("topk_ids", got=got, need=f"-1 or 0 to {num_experts - 1}")
    invalid_count = torch.zeros(1, dtype=torch.int32, device=topk_ids_TK.device)
    routing = DispatchedRouting(
        None, topk_ids_TK.contiguous(), IdSpace.GLOBAL, num_experts, expert_map, invalid_count
    )
    specs = align_specs(topk_ids_TK.numel(), block_size, num_experts)
    workspace = Workspace(specs, topk_ids_TK.device)
    if topk_ids_TK.numel() == 0:
        empty = torch.empty(0, dtype=torch.int32, device=topk_ids_TK.device)
        return empty, empty.clone(), torch.zeros_like(invalid_count)
    aligned = align(
        routing,
        block_size=block_size,
        num_local=num_experts,
        workspace=workspace,
        ignore_invalid=ignore_invalid,
    )
    return aligned.sorted_token_ids, aligned.expert_ids, aligned.num_tokens_post_padded


def _check_expert_map(expert_map: torch.Tensor, num_experts: int, device: torch.device) -> None:
    check_tensor("expert_map", expert_map)
    if expert_map.dtype is not torch.int32:
        raise DtypeError("expert_map", got=expert_map.dtype, need="int32")
    if tuple(expert_map.shape) != (num_experts,) or not expert_map.is_contiguous():
        got = f"{tuple(expert_map.shape)}, strides {expert_map.stride()}"
        raise ShapeError("expert_map", got=got, need=f"a contiguous ({num_experts},)")
    if expert_map.device != device:
        raise DeviceError("expert_map", got=expert_map.device, need=f"{device}, as topk_ids")


def batched_moe_align_block_size(
    counts_e: torch.Tensor, capacity: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run `moe_align_block_size` on batched rows, where row c of expert i is i * capacity + c.

    Padding positions of the result hold the index e * capacity.

    counts_e: (e,) int32 or int64, number of rows of each expert in use, at most `capacity`. Other
        rows are omitted.
    capacity: number of rows of each expert.
    block_size: number of rows per block, a power of two.
    """
    check_tensor("counts", counts_e)
    expect("capacity", capacity, int)
    if counts_e.dim() != 1 or counts_e.numel() == 0:
        raise ShapeError("counts", got=tuple(counts_e.shape), need="(e,) with e > 0")
    if counts_e.dtype not in (torch.int32, torch.int64):
        raise DtypeError("counts", got=counts_e.dtype, need="int32 or int64")
    if capacity < 0:
        raise ShapeError("capacity", got=capacity, need=">= 0")
    if capacity * counts_e.numel() > MAX_INT32:
        got = f"{counts_e.numel()} x {capacity} rows"
        raise CapacityError("counts x capacity", got=got, need=f"<= {MAX_INT32}")
    experts = counts_e.numel()
    expert_e1 = torch.arange(experts, dtype=torch.int32, device=counts_e.device)[:, None]
    row_1C = torch.arange(capacity, device=counts_e.device)[None]
    ids_eC = torch.where(row_1C < counts_e[:, None], expert_e1, -1).to(torch.int32)
    return moe_align_block_size(ids_eC.view(-1, 1), block_size, experts, ignore_invalid=True)


def align_ref(
    routing: DispatchedRouting,
    block_size: int,
    num_local: int,
    *,
    ignore_invalid: bool,
    out: AlignedPairs,
) -> None:
    """Torch reference of `align`."""
    ids = local_ids(routing, num_local).flatten()
    out.sorted_token_ids.fill_(ids.numel())
    out.expert_ids.fill_(-1)
    position = 0
    for expert in range(0 if ignore_invalid else -1, num_local):
        pairs = (ids == expert).nonzero()[:, 0].to(torch.int32)
        blocks = -(-pairs.numel() // block_size)
        out.sorted_token_ids[position : position + pairs.numel()] = pairs
        first_block = position // block_size
        out.expert_ids[first_block : first_block + blocks] = expert
        position += blocks * block_size
    out.num_tokens_post_padded.fill_(position)
