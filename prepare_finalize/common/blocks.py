"""Blocks of a fixed number of rows: their layout, and the operations that fill, read and sum them.

`common.fixed_capacity` exchanges tokens in such blocks. Because their size does not depend on the
routing, the host need not know how many rows a rank sends. A rank sends one block to each rank, or
a single block to all ranks. A block has these sections:

    x (capacity, H)                     activations
    scale (capacity, G)                 scales of the activations
    expert_numbers (capacity, K)        experts of each row
    weights (capacity, K)               router weights
    adapters (capacity, 1)              LoRA adapter of each row
    header (F,)                         metadata of the call (`device_status.FIELDS`)

The size of a block is a multiple of the size of a row of x. The W received blocks therefore form
one matrix of activations, (W * block_rows, H), which the experts read without a copy. Some rows of
this matrix are unused or hold the other sections. These rows get slots of -1, so that no expert
reads them.

A pair is one token with one of its K experts. A slot is the index of an expert in the weights of
its rank. An expert number identifies an expert on any rank: the expert in slot s of rank r has the
number r * slots + s.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from modular_kernel.ops.count import next_power_of_2
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.pdl import pdl_arguments
from modular_kernel.replay.launch.runtime import use_triton
from prepare_finalize.common.device_status import (
    FIELDS,
    NOT_REFUSED,
    SENT,
    CallCounter,
    DeviceStatus,
)

_ALIGNMENT = 16  # bytes; every section begins at a multiple of it
_MAX_COPY_BYTES = 4096  # bytes of a row that a program of fill_blocks copies at a time
_SCAN_PAIRS = 4096  # pairs that a program of fill_blocks reads at a time to count rows
_MAX_SPLIT_TOKENS = 16  # maximum T for which several programs of fill_blocks share a row
_PAIRS_PER_PROGRAM = 128  # pairs per program of mask_remote_pairs
_SUM_COLUMNS = 2048  # columns per program of sum_blocks
# Integer dtypes by itemsize. Kernels copy activations of any dtype as integers of the same size.
_INT_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class BlockLayout:
    """Layout of a block.

    - capacity: maximum number of rows in a block.
    - hidden, dtype: columns and dtype of the activations.
    - top_k: number of pairs of a row.
    - scales: number of float32 scales of a row; 0 if they are not sent.
    - adapters: whether the slots of the rows' LoRA adapters are sent.
    """

    capacity: int
    hidden: int
    dtype: torch.dtype
    top_k: int
    scales: int
    adapters: bool

    @cached_property
    def sections(self) -> dict[str, tuple[int, tuple[int, ...], torch.dtype]]:
        """First byte, shape and dtype of each section of a block, by name."""
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "x": ((self.capacity, self.hidden), self.dtype),
            "scale": ((self.capacity, self.scales), torch.float32),
            "expert_numbers": ((self.capacity, self.top_k), torch.int32),
            "weights": ((self.capacity, self.top_k), torch.float32),
            "adapters": ((self.capacity, int(self.adapters)), torch.int32),
            "header": ((len(FIELDS),), torch.int64),
        }
        sections, end = {}, 0
        for name, (shape, dtype) in shapes.items():
            sections[name] = (end, shape, dtype)
            end += math.ceil(math.prod(shape) * dtype.itemsize / _ALIGNMENT) * _ALIGNMENT
        return sections

    @cached_property
    def block_rows(self) -> int:
        """Size of a block divided by the size of a row of activations."""
        row_bytes = self.hidden * self.dtype.itemsize
        multiple = _ALIGNMENT // math.gcd(_ALIGNMENT, row_bytes)  # keeps every block aligned
        start, shape, dtype = self.sections["header"]
        end = start + math.prod(shape) * dtype.itemsize
        return math.ceil(end / row_bytes / multiple) * multiple

    @cached_property
    def nbytes(self) -> int:
        return self.block_rows * self.hidden * self.dtype.itemsize

    def section(self, blocks_SB: torch.Tensor, name: str) -> torch.Tensor:
        """Return a section of S blocks, (S, nbytes) uint8, as a view (S, *shape)."""
        start, shape, dtype = self.sections[name]
        end = start + math.prod(shape) * dtype.itemsize
        return blocks_SB[:, start:end].view(dtype).view(len(blocks_SB), *shape)

    def activations(self, blocks_SB: torch.Tensor) -> torch.Tensor:
        """Return blocks as activations, a view (S * block_rows, H)."""
        return blocks_SB.view(self.dtype).view(-1, self.hidden)


@dataclass(frozen=True)
class OutgoingRows:
    """The tokens of a call, before they are written to blocks.

    - x_TH: activations in the dtype of the layout.
    - scale_TG: float32 scales of the activations, or None.
    - expert_numbers_TK: int32 or int64, expert number of each pair, or -1 for a skipped pair. Pairs
      with other numbers outside [0, W * slots) are invalid, and are skipped as well.
    - weights_TK: float32 router weights.
    - adapters_T: slots of LoRA adapters; None if the call uses no adapters.
    - invalid_count: (1,) int32, incremented by the number of invalid pairs.
    """

    x_TH: torch.Tensor
    scale_TG: torch.Tensor | None
    expert_numbers_TK: torch.Tensor
    weights_TK: torch.Tensor
    adapters_T: torch.Tensor | None
    invalid_count: torch.Tensor


@dataclass(frozen=True)
class Ranks:
    """This rank, the number of ranks, and the number of expert slots of each rank."""

    rank: int
    world_size: int
    slots: int


@dataclass(frozen=True)
class Blocks:
    """Blocks to send or received blocks.

    - bytes_SB: (S, layout.nbytes) uint8. Block w is the block for rank w, or from rank w, except
      for this rank itself.
    - local_block: index of the block that this rank fills for itself.
    """

    bytes_SB: torch.Tensor
    layout: BlockLayout
    ranks: Ranks
    local_block: int

    def section(self, name: str) -> torch.Tensor:
        """Return a section of all blocks, a view (S, *shape)."""
        return self.layout.section(self.bytes_SB, name)


@dataclass(frozen=True)
class ReceivedColumns:
    """Output tensors for the R = W * block_rows received rows, except their activations.

    - local_experts: number of experts of this rank.
    - slots_RK: int32, expert slots of this rank, or -1 for pairs of other ranks and for unused
      rows.
    - weights_RK: float32 router weights, or 0 for pairs of other ranks and for unused rows.
    - scale_RG: float32 scales, undefined for unused rows; or None.
    - adapters_R: int32 slots of LoRA adapters, -1 for unused rows; or None.
    """

    local_experts: int
    slots_RK: torch.Tensor
    weights_RK: torch.Tensor
    scale_RG: torch.Tensor | None
    adapters_R: torch.Tensor | None


@dataclass(frozen=True)
class BlockSums:
    """Blocks of outputs: for each row, the weighted sum over the experts of one rank.

    - sums_SRH: (S, block rows, H), contiguous.
    - first_block: the block from another rank w has the index first_block + w.
    - local_block: index of this rank's own block.
    """

    sums_SRH: torch.Tensor
    ranks: Ranks
    first_block: int
    local_block: int


def fill_blocks(
    rows: OutgoingRows,
    blocks: Blocks,
    *,
    row_of_token_WT: torch.Tensor | None,
    counter: CallCounter,
    header_F: torch.Tensor,
    refusal: int = NOT_REFUSED,
    x_in_place: bool = False,
) -> None:
    """Write the rows of a call and its header to the blocks to send, and count the call.

    The block for rank r gets the tokens that have an expert on rank r, in the order of tokens.
    Tokens beyond the capacity are omitted. Unused rows are not written. One launch on a GPU.

    row_of_token_WT: (W, capacity) int32, output: row of each token in the block for each rank, or
        -1 if the block does not have the token. None to write all tokens to blocks.local_block
        only.
    header_F: (F,) int64, output: header of the call. Each block gets a copy of the header, in which
        the field `sent` is the number of rows of the block.
    refusal: index of the error with which this rank refuses the call, or NOT_REFUSED.
    x_in_place: whether the single block already has the activations.
    """
    layout, ranks = blocks.layout, blocks.ranks
    if not use_triton(blocks.bytes_SB):
        _fill_blocks_ref(rows, blocks, row_of_token_WT, counter, header_F, refusal, x_in_place)
        return
    from prepare_finalize.common.kernels.blocks import fill_blocks_kernel

    tokens, is_single_block = len(rows.x_TH), row_of_token_WT is None
    block_k = next_power_of_2(layout.top_k)
    config = _choose_fill_launch(rows, 1 if is_single_block else ranks.world_size, layout)
    launch(
        fill_blocks_kernel,
        (config.programs,),
        **_make_outgoing_arguments(rows, layout),
        **_make_section_arguments(blocks),
        row_of_token_ptr=header_F if row_of_token_WT is None else row_of_token_WT,
        header_ptr=header_F,
        **counter.arguments(),
        layer=counter.layer,
        refusal=refusal,
        tokens=tokens,
        capacity=layout.capacity,
        row_stride=0 if row_of_token_WT is None else row_of_token_WT.stride(0),
        rank=ranks.rank,
        local_block=blocks.local_block,
        slots=ranks.slots,
        total_slots=ranks.world_size * ranks.slots,
        HIDDEN=layout.hidden,
        TOP_K=layout.top_k,
        BLOCK_K=block_k,
        WORLD=ranks.world_size,
        PADDED=next_power_of_2(ranks.world_size),
        SINGLE_BLOCK=is_single_block,
        HAS_X=not x_in_place,
        ROWS=config.tokens_per_program,
        BLOCK=config.columns_per_step,
        SPLITS=config.splits,
        SCAN=max(16, min(_SCAN_PAIRS // block_k, next_power_of_2(tokens))),
        NUM_FIELDS=len(FIELDS),
        COUNT_BEGIN=counter.must_count_begin(),  # False if `counter.begin` has counted this call
        num_warps=8 if config.tokens_per_program > 1 else 4,
        **pdl_arguments(),
    )


class _FillLaunch(NamedTuple):
    """Launch shape of `fill_blocks_kernel`.

    programs: size of the grid.
    tokens_per_program: number of tokens that a program copies.
    columns_per_step: number of columns that a program copies at a time.
    splits: number of programs that share the columns of a row.
    """

    programs: int
    tokens_per_program: int
    columns_per_step: int
    splits: int


def _choose_fill_launch(rows: OutgoingRows, num_blocks: int, layout: BlockLayout) -> _FillLaunch:
    tokens, hidden = rows.x_TH.shape
    columns = min(_MAX_COPY_BYTES // layout.dtype.itemsize, next_power_of_2(hidden))
    tokens_per_program = _choose_tokens_per_program(tokens, num_blocks, rows.x_TH.device)
    # With few tokens, rows are split, so that more programs share the work.
    is_split = tokens_per_program == 1 and tokens <= _MAX_SPLIT_TOKENS
    splits = -(-hidden // columns) if is_split else 1
    programs = 1 + -(-tokens // tokens_per_program) * splits * num_blocks
    return _FillLaunch(programs, tokens_per_program, columns, splits)


def _choose_tokens_per_program(tokens: int, blocks: int, device: torch.device) -> int:
    """Return the number of tokens per program, a power of two up to 8.

    With more than one token per program, every SM still has at least 8 programs.
    """
    num_sms = 2
    if device.type == "cuda":
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return min(8, next_power_of_2(tokens * blocks // (8 * num_sms)))


def _make_outgoing_arguments(rows: OutgoingRows, layout: BlockLayout) -> dict[str, object]:
    x_TH = rows.x_TH.view(_INT_DTYPES[layout.dtype.itemsize])
    scale_TG, adapters_T = rows.scale_TG, rows.adapters_T
    scales = 0 if scale_TG is None else layout.scales
    adapters = "slots" if adapters_T is not None else "unused"
    return {
        "x_ptr": x_TH,
        "scale_ptr": x_TH if scale_TG is None else scale_TG,
        "expert_numbers_ptr": rows.expert_numbers_TK,
        "weights_ptr": rows.weights_TK,
        "adapters_ptr": x_TH if adapters_T is None else adapters_T,
        "invalid_count_ptr": rows.invalid_count,
        "stride_x": x_TH.stride(0),
        "stride_scale": 0 if scale_TG is None else scale_TG.stride(0),
        "stride_expert_numbers": rows.expert_numbers_TK.stride(0),
        "stride_weights": rows.weights_TK.stride(0),
        "SCALES": scales,
        "BLOCK_S": next_power_of_2(scales),
        "ADAPTERS": adapters if layout.adapters else "none",
    }


def _make_section_arguments(blocks: Blocks) -> dict[str, object]:
    layout = blocks.layout
    x_SRH = blocks.section("x").view(_INT_DTYPES[layout.dtype.itemsize])
    expert_numbers_SRK, headers_SF = blocks.section("expert_numbers"), blocks.section("header")
    return {
        "x_blocks_ptr": x_SRH,
        "scale_blocks_ptr": blocks.section("scale") if layout.scales else x_SRH,
        "expert_numbers_blocks_ptr": expert_numbers_SRK,
        "weights_blocks_ptr": blocks.section("weights"),
        "adapters_blocks_ptr": blocks.section("adapters") if layout.adapters else x_SRH,
        "header_blocks_ptr": headers_SF,
        "x_block_stride": x_SRH.stride(0),
        "word_block_stride": expert_numbers_SRK.stride(0),
        "header_block_stride": headers_SF.stride(0),
    }


def _fill_blocks_ref(
    rows: OutgoingRows,
    blocks: Blocks,
    row_of_token_WT: torch.Tensor | None,
    counter: CallCounter,
    header_F: torch.Tensor,
    refusal: int,
    x_in_place: bool,
) -> None:
    layout, ranks, device = blocks.layout, blocks.ranks, blocks.bytes_SB.device
    tokens, expert_numbers_TK = len(rows.x_TH), rows.expert_numbers_TK
    is_valid_TK = (expert_numbers_TK >= 0) & (expert_numbers_TK < ranks.world_size * ranks.slots)
    rows.invalid_count.add_((~is_valid_TK & (expert_numbers_TK != -1)).sum().to(torch.int32))
    expert_numbers_TK = torch.where(is_valid_TK, expert_numbers_TK, -1).to(torch.int32)
    columns = {"expert_numbers": expert_numbers_TK, "weights": rows.weights_TK}
    if not x_in_place:
        columns["x"] = rows.x_TH
    if layout.scales and rows.scale_TG is not None:
        columns["scale"] = rows.scale_TG
    if layout.adapters:
        unused_T = expert_numbers_TK.new_full((tokens,), -1)
        slots_T = unused_T if rows.adapters_T is None else rows.adapters_T
        columns["adapters"] = slots_T[:, None]
    all_tokens_T = torch.ones(tokens, dtype=torch.bool, device=device)
    indices, needs_WT = [blocks.local_block], all_tokens_T[None]
    if row_of_token_WT is not None:
        indices = [blocks.local_block if w == ranks.rank else w for w in range(ranks.world_size)]
        rank_TK = torch.where(expert_numbers_TK < 0, -1, expert_numbers_TK // ranks.slots)
        ranks_W = torch.arange(ranks.world_size, device=device)
        needs_WT = (rank_TK == ranks_W[:, None, None]).any(2)
        row_WT = torch.where(needs_WT, needs_WT.cumsum(1) - 1, -1)
        row_of_token_WT[:, :tokens] = torch.where(row_WT < layout.capacity, row_WT, -1)
    num_rows_W = needs_WT.sum(1)
    if counter.must_count_begin():
        counter.status.count_begin()
    header_F.copy_(counter.header(tokens, num_rows_W.max(), refusal=refusal))
    for index, needs_T, num_rows in zip(indices, needs_WT, num_rows_W, strict=True):
        token_R = needs_T.nonzero()[: layout.capacity, 0]
        for name, values in columns.items():
            blocks.section(name)[index, : len(token_R)] = values[token_R]
        blocks.section("header")[index] = header_F
        blocks.section("header")[index, SENT] = num_rows


def read_blocks(
    blocks: Blocks,
    out: ReceivedColumns,
    *,
    status: DeviceStatus,
    header_F: torch.Tensor,
    limits: torch.Tensor,
    verify: bool = True,
) -> None:
    """Read all sections of received blocks except activations, and verify their headers.

    One launch on a GPU.

    header_F: header of this rank, with which the headers of the blocks are compared.
    limits: limits for the values in headers, from `DeviceStatus.limits`.
    verify: whether to verify the headers. If not, the caller must verify them, and `status` is
        unchanged.
    """
    layout, ranks = blocks.layout, blocks.ranks
    if not use_triton(blocks.bytes_SB):
        _read_blocks_ref(blocks, out)
        if verify:
            status.verify(blocks.section("header"), header_F, limits)
        return
    from prepare_finalize.common.kernels.blocks import read_blocks_kernel

    section = {name: blocks.section(name) for name in layout.sections}
    scale_RG, adapters_R = out.scale_RG, out.adapters_R
    rows, scales = len(out.slots_RK), 0 if scale_RG is None else layout.scales
    block_k = next_power_of_2(layout.top_k)
    rows_per_program = max(1, 256 // max(block_k, next_power_of_2(scales)))
    launch(
        read_blocks_kernel,
        (-(-rows // rows_per_program),),
        expert_numbers_ptr=section["expert_numbers"],
        weights_ptr=section["weights"],
        scale_ptr=section["scale"] if scales else section["weights"],
        adapters_ptr=section["adapters"] if layout.adapters else section["expert_numbers"],
        header_blocks_ptr=section["header"],
        slots_ptr=out.slots_RK,
        out_weights_ptr=out.weights_RK,
        out_scale_ptr=out.weights_RK if scale_RG is None else scale_RG,
        out_adapters_ptr=out.slots_RK if adapters_R is None else adapters_R,
        header_ptr=header_F,
        limits_ptr=limits,
        **status.arguments(),
        rows=rows,
        block_rows=layout.block_rows,
        capacity=layout.capacity,
        rank=ranks.rank,
        slots=ranks.slots,
        local_experts=out.local_experts,
        word_block_stride=section["expert_numbers"].stride(0),
        header_block_stride=section["header"].stride(0),
        SCALES=scales,
        BLOCK_S=next_power_of_2(scales),
        TOP_K=layout.top_k,
        BLOCK_K=block_k,
        HAS_ADAPTERS=adapters_R is not None,
        ROWS=rows_per_program,
        WORLD=ranks.world_size,
        PADDED=next_power_of_2(ranks.world_size),
        NUM_FIELDS=len(FIELDS),
        num_warps=4,
        **({} if verify else {"VERIFY": False}),
    )


def _read_blocks_ref(blocks: Blocks, out: ReceivedColumns) -> None:
    """Torch reference of `read_blocks`, without the verification of headers."""
    layout, ranks, world = blocks.layout, blocks.ranks, len(blocks.bytes_SB)
    num_rows_W1 = blocks.section("header")[:, SENT, None]
    rows_R = torch.arange(layout.capacity, device=blocks.bytes_SB.device)
    has_token_WR = rows_R < num_rows_W1
    expert_numbers_WRK = blocks.section("expert_numbers")
    slot_WRK = expert_numbers_WRK - ranks.rank * ranks.slots
    is_local = (expert_numbers_WRK >= 0) & (slot_WRK >= 0) & (slot_WRK < out.local_experts)
    is_local &= has_token_WR[..., None]

    def write_padded(out_R: torch.Tensor, values_WR: torch.Tensor, padding: float) -> None:
        out_WR = out_R.view(world, -1, *out_R.shape[1:])
        out_WR[:, : layout.capacity] = values_WR
        out_WR[:, layout.capacity :] = padding

    write_padded(out.slots_RK, torch.where(is_local, slot_WRK, -1), -1)
    write_padded(out.weights_RK, torch.where(is_local, blocks.section("weights"), 0), 0)
    if out.scale_RG is not None:
        write_padded(out.scale_RG, blocks.section("scale"), 0)
    if out.adapters_R is not None:
        adapters_WR = blocks.section("adapters")[..., 0]
        write_padded(out.adapters_R, torch.where(has_token_WR, adapters_WR, -1), -1)


def mask_remote_pairs(
    expert_numbers_TK: torch.Tensor, weights_TK: torch.Tensor, ranks: Ranks, local_experts: int
) -> None:
    """Replace expert numbers by slots of this rank in place.

    Pairs of other ranks get slots of -1 and weights of 0. One launch on a GPU, none for T = 0.

    expert_numbers_TK: (T, K) int32, contiguous, expert number of each pair, -1 for a skipped pair.
    weights_TK: (T, K) float32, contiguous, router weights.
    """
    first, numel = ranks.rank * ranks.slots, expert_numbers_TK.numel()
    if not use_triton(expert_numbers_TK):
        slots_TK = expert_numbers_TK - first
        is_local = (slots_TK >= 0) & (slots_TK < local_experts)
        expert_numbers_TK.copy_(torch.where(is_local, slots_TK, -1))
        weights_TK.masked_fill_(~is_local, 0)
        return
    if not numel:
        return
    from prepare_finalize.common.kernels.blocks import mask_remote_pairs_kernel

    launch(
        mask_remote_pairs_kernel,
        (-(-numel // _PAIRS_PER_PROGRAM),),
        expert_numbers_ptr=expert_numbers_TK,
        weights_ptr=weights_TK,
        first=first,
        local_experts=local_experts,
        numel=numel,
        BLOCK=_PAIRS_PER_PROGRAM,
        num_warps=1,
        **pdl_arguments(),
    )


def sum_blocks(
    sums: BlockSums,
    out_TH: torch.Tensor,
    row_of_token_WT: torch.Tensor | None,
    counter: CallCounter,
) -> None:
    """Sum the outputs of each token over all ranks, and count the end of the call.

    Sums are computed in float32, in the order of ranks. One launch on a GPU.

    out_TH: (T, H), output: the sums. All values are NaN if a call of the manager has failed.
    row_of_token_WT: (W, capacity) int32, row of each token in the block of each rank, -1 if the
        block does not have the token. None if token t is row t of every block.
    """
    tokens, hidden = out_TH.shape
    sums_SRH, ranks = sums.sums_SRH, sums.ranks
    if not use_triton(sums_SRH):
        _sum_blocks_ref(sums, out_TH, row_of_token_WT)
        counter.end_ref(out_TH)
        return
    from prepare_finalize.common.kernels.blocks import sum_blocks_kernel

    block = min(_SUM_COLUMNS, next_power_of_2(hidden))
    launch(
        sum_blocks_kernel,
        (max(1, tokens * -(-hidden // block)),),
        sums_ptr=sums_SRH,
        row_of_token_ptr=counter.calls if row_of_token_WT is None else row_of_token_WT,
        out_ptr=out_TH,
        **counter.arguments(),
        layer=counter.layer,
        tokens=tokens,
        block_rows=sums_SRH.shape[1],
        row_stride=0 if row_of_token_WT is None else row_of_token_WT.stride(0),
        rank=ranks.rank,
        first_block=sums.first_block,
        local_block=sums.local_block,
        stride_out=out_TH.stride(0),
        HIDDEN=hidden,
        WORLD=ranks.world_size,
        SINGLE_BLOCK=row_of_token_WT is None,
        BLOCK=block,
        num_warps=4,
    )


def _sum_blocks_ref(
    sums: BlockSums, out_TH: torch.Tensor, row_of_token_WT: torch.Tensor | None
) -> None:
    """Torch reference of `sum_blocks`, which does not count the end of the call."""
    (tokens, hidden), ranks = out_TH.shape, sums.ranks
    sum_TH = torch.zeros(tokens, hidden, dtype=torch.float32, device=out_TH.device)
    for w in range(ranks.world_size):
        rows_RH = sums.sums_SRH[sums.local_block if w == ranks.rank else sums.first_block + w]
        if row_of_token_WT is None:
            sum_TH += rows_RH[:tokens]
        else:
            row_T = row_of_token_WT[w, :tokens].long()
            has_row_T1 = (row_T >= 0)[:, None]
            sum_TH += torch.where(has_row_T1, rows_RH[row_T], 0)
    out_TH.copy_(sum_TH)
