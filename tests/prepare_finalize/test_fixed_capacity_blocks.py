"""Blocks of a fixed number of rows: their layout, and kernels against the torch references."""

import math
from dataclasses import replace

import pytest
import torch

from modular_kernel.machine import prefer_torch_reference
from modular_kernel.replay.launch.runtime import use_triton
from modular_kernel.spec.problem import Parallel, Problem
from prepare_finalize.common.blocks import (
    BlockLayout,
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
from prepare_finalize.common.device_status import (
    FIELDS,
    NOT_REFUSED,
    ROWS,
    SENT,
    TOKENS,
    CallCounter,
    Capacity,
    DeviceStatus,
)
from prepare_finalize.common.fixed_capacity import make_block_layouts

CPU = torch.device("cpu")
SLOTS = 4  # expert slots of a rank
LAYOUTS = (
    BlockLayout(6, 40, torch.bfloat16, 3, scales=0, adapters=False),
    BlockLayout(6, 40, torch.float8_e4m3fn, 3, scales=5, adapters=True),
    BlockLayout(3, 33, torch.int8, 1, scales=1, adapters=False),
    BlockLayout(9, 7, torch.float32, 2, scales=0, adapters=True),
)
WORLDS = (2, 3)
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)
every_world = pytest.mark.parametrize("world", WORLDS)
both_exchanges = pytest.mark.parametrize("gathers", [False, True])


@every_layout
def test_sections_are_aligned_and_do_not_overlap(layout: BlockLayout) -> None:
    end = 0
    for start, shape, dtype in layout.sections.values():
        assert start % 16 == 0
        assert start >= end
        end = start + math.prod(shape) * dtype.itemsize
    row_bytes = layout.hidden * layout.dtype.itemsize
    assert layout.nbytes == layout.block_rows * row_bytes >= end
    assert layout.nbytes % 16 == 0  # The sections of the next block are aligned, too.
    assert layout.block_rows >= layout.capacity + 1
    # With fewer rows, the block would be too small, or the next block would not be aligned.
    smaller = (layout.block_rows - 16 // math.gcd(16, row_bytes)) * row_bytes
    assert smaller < end


def test_activations_are_the_first_rows_of_a_block() -> None:
    layout = LAYOUTS[0]
    blocks_SB = torch.zeros(2, layout.nbytes, dtype=torch.uint8)
    x_SRH = layout.section(blocks_SB, "x")
    x_SRH.copy_(torch.arange(x_SRH.numel()).view(x_SRH.shape))
    rows = layout.activations(blocks_SB).view(2, layout.block_rows, layout.hidden)
    assert torch.equal(rows[:, : layout.capacity], x_SRH)


@pytest.mark.parametrize("quant", ["none", "fp8_w8a8_block", "fp8_w8a8_tensor"])
def test_layouts_have_the_dtype_and_scales_of_the_problem(quant: str) -> None:
    problem = Problem(8, 256, 128, 8, 2, quant=quant, parallel=Parallel(2))
    layouts_by_quantized = make_block_layouts(problem, 5)
    assert set(layouts_by_quantized) == {False, quant != "none"}
    assert layouts_by_quantized[False].dtype == problem.dtype
    if quant != "none":
        quantized = layouts_by_quantized[True]
        scales = 2 if quant == "fp8_w8a8_block" else 0
        assert (quantized.dtype, quantized.scales) == (torch.float8_e4m3fn, scales)


def make_outgoing_rows(
    layout: BlockLayout, world: int, tokens: int, dtype=torch.int32
) -> OutgoingRows:
    """Return random rows. Some pairs have no expert, and some expert numbers are invalid."""
    generator = torch.Generator().manual_seed(tokens)
    expert_numbers_TK = torch.randint(
        -3, world * SLOTS + 2, (tokens, layout.top_k), generator=generator, dtype=dtype
    )
    x_TH = torch.randint(-9, 9, (tokens, layout.hidden), generator=generator)
    return OutgoingRows(
        x_TH.to(layout.dtype),
        torch.rand(tokens, layout.scales, generator=generator) if layout.scales else None,
        expert_numbers_TK,
        torch.rand(tokens, layout.top_k, generator=generator),
        torch.arange(tokens, dtype=torch.int32) if layout.adapters else None,
        torch.zeros(1, dtype=torch.int32),
    )


def fill(
    rows: OutgoingRows,
    layout: BlockLayout,
    ranks: Ranks,
    *,
    gathers: bool,
    reference: bool,
    x_in_place: bool = False,
) -> tuple[Blocks, torch.Tensor | None, torch.Tensor, OutgoingRows]:
    """Fill blocks of bytes 0x5A. Return the blocks, row_of_token_WT, the header and the rows."""
    rows = replace(rows, invalid_count=torch.zeros(1, dtype=torch.int32))
    status = DeviceStatus(ranks.world_size, CPU)
    counter = CallCounter(status, 7)
    bytes_SB = torch.full((2 * ranks.world_size, layout.nbytes), 0x5A, dtype=torch.uint8)
    blocks = Blocks(bytes_SB, layout, ranks, ranks.world_size + ranks.rank)
    row_of_token_WT = None
    if not gathers:
        row_of_token_WT = torch.full((ranks.world_size, 20), -9, dtype=torch.int32)
    header_F = torch.zeros(len(FIELDS), dtype=torch.int64)
    with prefer_torch_reference(enabled=reference):
        assert use_triton(bytes_SB) is not reference
        fill_blocks(
            rows,
            blocks,
            row_of_token_WT=row_of_token_WT,
            counter=counter,
            header_F=header_F,
            x_in_place=x_in_place,
        )
    assert status.progress() == (1, 0)
    assert int(counter.calls) == 1
    return blocks, row_of_token_WT, header_F, rows


@every_layout
@every_world
@both_exchanges
@pytest.mark.parametrize("tokens", [0, 1, 5, 17])
def test_kernel_and_reference_fill_the_same_blocks(
    layout: BlockLayout, world: int, gathers: bool, tokens: int
) -> None:
    ranks = Ranks(1, world, SLOTS)
    rows = make_outgoing_rows(layout, world, tokens, torch.int64 if tokens == 5 else torch.int32)
    if gathers and tokens > layout.capacity:
        rows = make_outgoing_rows(layout, world, layout.capacity)
    kernel, reference = (
        fill(rows, layout, ranks, gathers=gathers, reference=reference)
        for reference in (False, True)
    )
    assert torch.equal(kernel[0].bytes_SB, reference[0].bytes_SB)
    assert torch.equal(kernel[2], reference[2])
    assert torch.equal(kernel[3].invalid_count, reference[3].invalid_count)
    if not gathers:
        assert kernel[1] is not None
        assert reference[1] is not None
        assert torch.equal(kernel[1], reference[1])


@every_layout
def test_blocks_contain_the_tokens_with_experts_on_each_rank(layout: BlockLayout) -> None:
    world, tokens = 3, 17
    ranks = Ranks(1, world, SLOTS)
    rows = make_outgoing_rows(layout, world, tokens)
    blocks, row_of_token_WT, header_F, rows = fill(
        rows, layout, ranks, gathers=False, reference=False
    )
    assert row_of_token_WT is not None
    num_rows = []
    for w in range(world):
        needed = [
            t
            for t in range(tokens)
            if any(n >= 0 and n // SLOTS == w for n in rows.expert_numbers_TK[t])
        ]
        num_rows.append(len(needed))
        index = world + 1 if w == ranks.rank else w
        for row, token in enumerate(needed):
            expected = row if row < layout.capacity else -1
            assert row_of_token_WT[w, token] == expected
            if expected >= 0:
                x_H = blocks.section("x")[index, row]
                assert torch.equal(x_H.float(), rows.x_TH[token].float())
        assert blocks.section("header")[index, SENT] == len(needed)
    assert header_F[TOKENS] == tokens
    assert header_F[ROWS] == max(num_rows)
    invalid = (rows.expert_numbers_TK < -1) | (rows.expert_numbers_TK >= world * SLOTS)
    assert int(rows.invalid_count) == int(invalid.sum()) > 0


def read_columns(blocks: Blocks, header_F: torch.Tensor, *, reference: bool) -> ReceivedColumns:
    """Read received blocks into columns that were filled with 99."""
    layout, world = blocks.layout, blocks.ranks.world_size
    status = DeviceStatus(world, CPU)
    num_rows, k = world * layout.block_rows, layout.top_k
    columns = ReceivedColumns(
        SLOTS - 1,
        torch.full((num_rows, k), 99, dtype=torch.int32),
        torch.full((num_rows, k), 99.0),
        torch.full((num_rows, layout.scales), 99.0) if layout.scales else None,
        torch.full((num_rows,), 99, dtype=torch.int32) if layout.adapters else None,
    )
    with prefer_torch_reference(enabled=reference):
        limits = status.limits(Capacity(20, 20))
        read_blocks(blocks, columns, status=status, header_F=header_F, limits=limits)
    assert status.failure() is None
    return columns


@every_layout
@every_world
def test_kernel_and_reference_read_the_same_columns(layout: BlockLayout, world: int) -> None:
    ranks = Ranks(0, world, SLOTS)
    received = torch.full((world, layout.nbytes), 0x7F, dtype=torch.uint8)
    blocks = Blocks(received, layout, ranks, 0)
    headers_WF = blocks.section("header")
    headers_WF.copy_(torch.tensor([7, 1, 14, 2, 2, NOT_REFUSED, 0]))
    for w in range(world):
        rows = make_outgoing_rows(layout, world, layout.capacity - w)
        sent_blocks, _, _, _ = fill(
            rows, layout, Ranks(w, world, SLOTS), gathers=True, reference=False
        )
        received[w] = sent_blocks.bytes_SB[sent_blocks.local_block]
        headers_WF[w] = torch.tensor([7, 1, 14, 2, 2, NOT_REFUSED, layout.capacity - w])
    header_F = headers_WF[0].clone()
    kernel, reference = (read_columns(blocks, header_F, reference=r) for r in (False, True))
    assert torch.equal(kernel.slots_RK, reference.slots_RK)
    assert torch.equal(kernel.weights_RK, reference.weights_RK)
    slots_WRK = kernel.slots_RK.view(world, layout.block_rows, -1)
    expert_numbers_WRK = blocks.section("expert_numbers")
    for w in range(world):
        count = layout.capacity - w
        assert (slots_WRK[w, count:] == -1).all()
        numbers_RK = expert_numbers_WRK[w, :count]
        is_local = (numbers_RK >= 0) & (numbers_RK < SLOTS - 1)
        assert torch.equal(slots_WRK[w, :count], torch.where(is_local, numbers_RK, -1))
    if kernel.scale_RG is not None and reference.scale_RG is not None:
        has_token = (kernel.slots_RK >= 0).any(1)
        assert torch.equal(kernel.scale_RG[has_token], reference.scale_RG[has_token])
    if kernel.adapters_R is not None and reference.adapters_R is not None:
        assert torch.equal(kernel.adapters_R, reference.adapters_R)


@pytest.mark.parametrize("sent", [-5, 0, 3, 6, 10**12])
@pytest.mark.parametrize("reference", [False, True])
def test_invalid_received_numbers_give_valid_slots(sent: int, reference: bool) -> None:
    layout, ranks = LAYOUTS[0], Ranks(1, 2, SLOTS)
    generator = torch.Generator().manual_seed(0)
    received = torch.randint(0, 256, (2, layout.nbytes), generator=generator, dtype=torch.uint8)
    blocks = Blocks(received, layout, ranks, 1)
    blocks.section("header").copy_(torch.tensor([7, 1, 14, 2, 2, NOT_REFUSED, sent]))
    blocks.section("expert_numbers")[0, 0] = 2 * SLOTS  # No rank has this expert.
    columns = read_columns(blocks, blocks.section("header")[0].clone(), reference=reference)
    assert ((columns.slots_RK >= -1) & (columns.slots_RK < SLOTS - 1)).all()


@every_layout
def test_activations_in_place_are_unchanged(layout: BlockLayout) -> None:
    rows = make_outgoing_rows(layout, 2, layout.capacity)
    for reference in (False, True):
        options = {"gathers": True, "reference": reference}
        copied, _, _, _ = fill(rows, layout, Ranks(1, 2, SLOTS), **options)
        in_place, _, _, _ = fill(rows, layout, Ranks(1, 2, SLOTS), x_in_place=True, **options)
        copied.section("x")[copied.local_block].view(torch.uint8).fill_(0x5A)
        assert torch.equal(in_place.bytes_SB, copied.bytes_SB)


@every_world
@both_exchanges
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("local_block", [0, 1])
def test_kernel_and_reference_sum_the_same_rows(
    world: int, gathers: bool, tokens: int, local_block: int
) -> None:
    hidden, block_rows = 2100, 6
    generator = torch.Generator().manual_seed(1)
    sums_SRH = torch.randn(2 * world, block_rows, hidden, generator=generator).bfloat16()
    row_of_token_WT = None
    if not gathers:
        row_of_token_WT = torch.randint(
            -1, block_rows, (world, 9), generator=generator, dtype=torch.int32
        )
    sums = BlockSums(sums_SRH, Ranks(0, world, SLOTS), first_block=world, local_block=local_block)
    expected = torch.zeros(tokens, hidden, dtype=torch.float64)
    for t in range(tokens):
        for w in range(world):
            row = t if row_of_token_WT is None else int(row_of_token_WT[w, t])
            if row >= 0:
                expected[t] += sums_SRH[local_block if w == 0 else world + w, row].double()
    for reference in (False, True):
        counter = CallCounter(DeviceStatus(world, CPU), 3)
        out_TH = torch.full((tokens, hidden + 8), 5.0, dtype=torch.bfloat16)[:, :hidden]
        with prefer_torch_reference(enabled=reference):
            sum_blocks(sums, out_TH, row_of_token_WT, counter)
        torch.testing.assert_close(out_TH.double(), expected, rtol=2**-8, atol=2**-8)
        assert counter.status.progress() == (0, 1)


@pytest.mark.parametrize("reference", [False, True])
def test_pairs_of_other_ranks_are_dropped(reference: bool) -> None:
    expert_numbers_TK = torch.tensor([[0, 4, -1], [7, 5, 11]], dtype=torch.int32)
    weights_TK = torch.ones(2, 3)
    with prefer_torch_reference(enabled=reference):
        mask_remote_pairs(expert_numbers_TK, weights_TK, Ranks(1, 3, SLOTS), local_experts=3)
    assert expert_numbers_TK.tolist() == [[-1, 0, -1], [-1, 1, -1]]  # Slot 3 has no expert.
    assert weights_TK.tolist() == [[0, 1, 0], [0, 1, 0]]
