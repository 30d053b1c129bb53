"""Count the pairs of each expert in chunks, for the operations in `align`, `batch` and `sort`.

A pair is a token together with one of its K experts. The position of a pair among the pairs of its
expert is the number of the expert's pairs in earlier chunks (`PairCounts.prefix`), plus the number
of the expert's earlier pairs in the same chunk. The kernels that place the pairs compute the
second number.

A local id is the index of an expert among the `num_local` experts on this rank. It is -1 if the
pair is skipped, because its id is -1 or invalid, or because its expert is on another rank.
"""

from dataclasses import dataclass

import torch

from modular_kernel.replay.launch.launch import launch
from modular_kernel.spec.problem import IdSpace
from modular_kernel.tensors import DispatchedRouting
from modular_kernel.workspace import BufferSpec

# Number of pairs per program. A program compares each pair of its chunk with every other pair.
CHUNK = 128
_SCAN_BLOCK = 1024  # maximum number of chunks per step of a scan


def next_power_of_2(value: int) -> int:
    """Return the smallest power of two that is at least `value`, and at least 1."""
    return 1 << max(0, value - 1).bit_length()


@dataclass(frozen=True)
class PairCounts:
    """The results of the counting kernels, as views of one int32 buffer.

    A bucket is a set of pairs that are counted together. Bucket 0 holds skipped pairs, and bucket i
    + 1 the pairs of local expert i.

    totals: (e + 1,), number of pairs in each bucket.
    prefix: (e + 1, num_chunks), number of pairs of each bucket that are in earlier chunks.
    num_chunks: number of chunks of CHUNK pairs.
    bins: `compute_num_bins` for the counted experts.
    """

    totals: torch.Tensor
    prefix: torch.Tensor
    num_chunks: int
    bins: int


def counts_spec(num_pairs: int, num_local: int) -> BufferSpec:
    """Return the spec of the scratch buffer for `num_pairs` pairs and `num_local` experts."""
    return BufferSpec(((num_local + 1) * (1 + count_chunks(num_pairs)),), torch.int32)


def count_chunks(num_pairs: int) -> int:
    """Return the number of chunks of CHUNK pairs, at least one."""
    return max(1, -(-num_pairs // CHUNK))


def compute_num_bins(num_local: int) -> int:
    """Return the number of bins for tl.histogram, a power of two.

    There is a bin for each bucket of `PairCounts`, and at least one more, which counts the lanes of
    a program that have no pair.
    """
    return next_power_of_2(num_local + 2)


def id_arguments(routing: DispatchedRouting, num_local: int) -> dict[str, object]:
    """Return the kernel arguments that the device function `load_local_ids` requires."""
    has_map = routing.expert_map is not None and routing.space is IdSpace.GLOBAL
    return {
        "topk_ids_ptr": routing.topk_ids_TK,
        "expert_map_ptr": routing.expert_map if has_map else routing.topk_ids_TK,
        "num_experts": routing.num_experts,
        "num_local_experts": num_local,
        "HAS_EXPERT_MAP": has_map,
    }


def count_pairs(
    routing: DispatchedRouting,
    num_local: int,
    *,
    scratch: torch.Tensor,
    dedupe: bool = False,
    counts_e: torch.Tensor | None = None,
) -> PairCounts:
    """Count pairs per expert and chunk, and scan over chunks, in two launches.

    num_local: number of local experts.
    scratch: buffer that `counts_spec` declares.
    dedupe: whether pairs of a token with the same expert count only once.
    counts_e: output, (e,) int32, number of pairs of each expert; may be None.
    """
    from modular_kernel.ops.kernels.count import count_pairs_kernel, scan_counts_kernel

    ids_TK = routing.topk_ids_TK
    chunks, buckets = count_chunks(ids_TK.numel()), num_local + 1
    counts = PairCounts(
        totals=scratch[:buckets],
        prefix=scratch[buckets : buckets * (1 + chunks)].view(buckets, chunks),
        num_chunks=chunks,
        bins=compute_num_bins(num_local),
    )
    launch(
        count_pairs_kernel,
        (chunks,),
        invalid_count_ptr=routing.invalid_ids,
        counts_ptr=counts.prefix,
        num_pairs=ids_TK.numel(),
        num_chunks=chunks,
        TOP_K=ids_TK.shape[1],
        DEDUPE=dedupe,
        CHUNK_SIZE=CHUNK,
        NUM_BINS=counts.bins,
        **id_arguments(routing, num_local),
    )
    launch(
        scan_counts_kernel,
        (buckets,),
        counts_ptr=counts.prefix,
        bucket_totals_ptr=counts.totals,
        expert_counts_ptr=counts.totals if counts_e is None else counts_e,
        num_chunks=chunks,
        HAS_EXPERT_COUNTS=counts_e is not None,
        BLOCK_CHUNKS=min(_SCAN_BLOCK, next_power_of_2(chunks)),
    )
    return counts


def local_ids(routing: DispatchedRouting, num_local: int) -> torch.Tensor:
    """Return the local id of each pair (torch reference of the device function `load_local_ids`).

    The result is (T, K) int64, with -1 for skipped pairs. The number of ids outside [-1,
    num_experts) is added to routing.invalid_ids.
    """
    ids = routing.topk_ids_TK
    invalid = (ids < -1) | (ids >= routing.num_experts)
    routing.invalid_ids.add_(invalid.sum().to(torch.int32))
    return uncounted_local_ids(routing, num_local)


def uncounted_local_ids(routing: DispatchedRouting, num_local: int) -> torch.Tensor:
    """Return the result of `local_ids` without counting invalid ids."""
    ids = routing.topk_ids_TK.long()
    local = torch.where((ids >= 0) & (ids < routing.num_experts), ids, -1)
    if routing.expert_map is not None and routing.space is IdSpace.GLOBAL:
        mapped = routing.expert_map.long()[local]  # -1 is a valid index
        local = torch.where(local >= 0, mapped, -1)
    return torch.where((local >= 0) & (local < num_local), local, -1)
