"""Cases of the operations on blocks of rows and on headers, for the test harness.

Fixed-capacity exchanges fill, read and sum blocks (`common.blocks`). Each of these operations has a
kernel and a torch reference, and ranks with and without Triton must be able to exchange blocks. The
harness runs every case with the kernel and with the reference, and compares every returned bit:
outputs, counters, headers, and the bytes around them. The cases run on a single rank and simulate
groups of several sizes, and positions of blocks that exchanges only use on a GPU.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch

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

_CPU = torch.device("cpu")
_ALIGNMENT = 16  # bytes
_SLOTS = 4  # of each rank
_LAYER = 7
_FILL = 0x5A  # byte of memory that has not been written
_TOKENS = 20  # maximum number of tokens of a rank
_LAYOUTS = (
    BlockLayout(6, 40, torch.bfloat16, 3, scales=0, adapters=False),
    BlockLayout(6, 40, torch.float8_e4m3fn, 3, scales=5, adapters=True),
    BlockLayout(_TOKENS, 33, torch.int8, 1, scales=1, adapters=False),
    BlockLayout(9, 7, torch.float32, 2, scales=0, adapters=True),
)
# Numbers of tokens: none, one, few, and more than one program copies by default.
_NUM_TOKENS = (0, 1, 5, 17)

Tensors = Mapping[str, torch.Tensor]


def list_cases() -> Mapping[str, Callable[[], Tensors]]:
    """Return the cases by name; see `PrepareAndFinalize.operation_cases`."""
    cases: dict[str, Callable[[], Tensors]] = {
        "headers": _count_and_verify,
        "limits of headers": _verify_limits,
        "phases": _check_phases,
        "slots": _check_known_pairs,
    }
    # A row of 16 bytes leaves no unused bytes after the header.
    small = BlockLayout(3, 8, torch.bfloat16, 1, scales=0, adapters=False)
    for index, layout in enumerate((*_LAYOUTS, small)):
        cases[f"size of layout {index}"] = partial(_check_size, layout)
    for index, layout in enumerate(_LAYOUTS):
        ranks = Ranks(*((0, 2) if index % 2 else (1, 3)), _SLOTS)
        cases[f"read_blocks, layout {index}"] = partial(_read, layout, ranks, verify=True)
        for tokens in _NUM_TOKENS:
            for is_single in (False, True):
                blocks = "one block" if is_single else f"{ranks.world_size} blocks"
                cases[f"fill_blocks of {tokens} tokens, {blocks}, layout {index}"] = partial(
                    _fill, layout, ranks, tokens, is_single=is_single
                )
    cases["read_blocks, headers not verified"] = partial(
        _read, _LAYOUTS[0], Ranks(1, 3, _SLOTS), verify=False
    )
    for rank, world in ((0, 2), (1, 3)):
        ranks = Ranks(rank, world, _SLOTS)
        cases[f"mask_remote_pairs, rank {rank} of {world}"] = partial(_mask, ranks)
        for is_single in (False, True):
            for tokens in (0, 1, 5):
                name = f"sum_blocks of {tokens} tokens, single {is_single}, rank {rank} of {world}"
                cases[name] = partial(_sum, ranks, tokens, is_single=is_single)
    return cases


def _draw_outgoing_rows(layout: BlockLayout, world: int, tokens: int) -> OutgoingRows:
    """Return random rows, some of whose pairs have no expert or an invalid number."""
    generator = torch.Generator().manual_seed(tokens)
    dtype = torch.int64 if tokens == 5 else torch.int32
    numbers_TK = torch.randint(
        -3,
        world * _SLOTS + 2,
        (tokens, layout.top_k),
        generator=generator,
        dtype=dtype,
        device=_CPU,
    )
    x_TH = torch.randint(-9, 9, (tokens, layout.hidden), generator=generator, device=_CPU)
    return OutgoingRows(
        x_TH.to(layout.dtype),
        torch.rand(tokens, layout.scales, generator=generator, dtype=torch.float32, device=_CPU)
        if layout.scales
        else None,
        numbers_TK,
        torch.rand(tokens, layout.top_k, generator=generator, dtype=torch.float32, device=_CPU),
        torch.arange(tokens, dtype=torch.int32, device=_CPU)
        if layout.adapters and tokens != 1
        else None,
        torch.zeros(1, dtype=torch.int32, device=_CPU),
    )


def _fill(layout: BlockLayout, ranks: Ranks, tokens: int, *, is_single: bool) -> Tensors:
    """Fill blocks twice. The second time, a single block already has its activations."""
    world = ranks.world_size
    rows = _draw_outgoing_rows(layout, world, tokens)
    status = DeviceStatus(world, _CPU)
    counter, outputs = CallCounter(status, _LAYER), dict[str, torch.Tensor]()
    for call in range(2):
        bytes_SB = torch.full((2 * world, layout.nbytes), _FILL, dtype=torch.uint8, device=_CPU)
        # On a GPU, the block for this rank itself is among the received blocks.
        local_block = ranks.rank + world * call
        row_of_token_WT = torch.full((world, _TOKENS), -9, dtype=torch.int32, device=_CPU)
        header_F = torch.full((len(FIELDS) + 1,), -9, dtype=torch.int64, device=_CPU)
        if call:
            counter.begin()
        fill_blocks(
            rows,
            Blocks(bytes_SB, layout, ranks, local_block),
            row_of_token_WT=None if is_single else row_of_token_WT,
            counter=counter,
            header_F=header_F[:-1],
            refusal=NOT_REFUSED if tokens else 3,
            x_in_place=is_single and bool(call),
        )
        tensors = {"blocks": bytes_SB, "rows": row_of_token_WT, "header": header_F}
        outputs |= {f"{name} of call {call}": tensor for name, tensor in tensors.items()}
    return {**outputs, "invalid": rows.invalid_count, **_get_state(counter)}


def _get_state(counter: CallCounter) -> Tensors:
    """Return the tensors of a counter and of its status, on the device and on the host."""
    status = counter.status
    return {
        "calls": counter.calls,
        "counters": status._counters,
        "progress": status._host_progress,
        "failed": status.failed,
        "words": status._host_words,
    }


def _read(layout: BlockLayout, ranks: Ranks, *, verify: bool) -> Tensors:
    """Read blocks whose numbers of rows differ, of which one exceeds the capacity.

    verify: see `read_blocks`.
    """
    world, k = ranks.world_size, layout.top_k
    received = torch.full((world, layout.nbytes), 0x7F, dtype=torch.uint8, device=_CPU)
    blocks = Blocks(received, layout, ranks, ranks.rank)
    for w in range(world):
        rows = _draw_outgoing_rows(layout, world, layout.capacity - w)
        sections = {
            "x": rows.x_TH,
            "expert_numbers": rows.expert_numbers_TK,
            "weights": rows.weights_TK,
        }
        if rows.scale_TG is not None:
            sections["scale"] = rows.scale_TG
        if rows.adapters_T is not None:
            sections["adapters"] = rows.adapters_T[:, None]
        for name, values in sections.items():
            blocks.section(name)[w, : len(values)] = values
    headers_WF = blocks.section("header")
    headers_WF.copy_(
        torch.tensor([_LAYER, 1, 14, 2, 2, NOT_REFUSED, 0], dtype=torch.int64, device=_CPU)
    )
    headers_WF[:, SENT] = layout.capacity + 1 - 2 * torch.arange(world, device=_CPU)
    num_rows, status = world * layout.block_rows, DeviceStatus(world, _CPU)
    columns = ReceivedColumns(
        _SLOTS - 1,
        torch.full((num_rows, k), 99, dtype=torch.int32, device=_CPU),
        torch.full((num_rows, k), 99.0, dtype=torch.float32, device=_CPU),
        torch.full((num_rows, layout.scales), 99.0, dtype=torch.float32, device=_CPU)
        if layout.scales
        else None,
        torch.full((num_rows,), 99, dtype=torch.int32, device=_CPU) if layout.adapters else None,
    )
    limits = status.limits(Capacity(_TOKENS, _TOKENS))
    header_F = headers_WF[0].clone()
    read_blocks(blocks, columns, status=status, header_F=header_F, limits=limits, verify=verify)
    written = {"slots": columns.slots_RK, "weights": columns.weights_RK}
    if columns.scale_RG is not None:  # undefined for rows without a token
        row = torch.arange(num_rows, device=_CPU) % layout.block_rows
        sent_R = headers_WF[:, SENT].clamp(max=layout.capacity).repeat_interleave(layout.block_rows)
        written["scale"] = columns.scale_RG[row < sent_R]
    if columns.adapters_R is not None:
        written["adapters"] = columns.adapters_R
    return {**written, **_get_state(CallCounter(status, _LAYER))}


def _sum(ranks: Ranks, tokens: int, *, is_single: bool) -> Tensors:
    """Sum blocks with each position of the block of this rank, then after a failed call."""
    world, block_rows, hidden = ranks.world_size, 6, 65
    generator = torch.Generator().manual_seed(1)
    sums_SRH = torch.randn(
        2 * world, block_rows, hidden, generator=generator, dtype=torch.float32, device=_CPU
    ).bfloat16()
    # Without tokens, the table is empty, so that a kernel that reads it raises an error.
    row_of_token_WT = torch.randint(
        -1,
        block_rows,
        (world, 9 if tokens else 0),
        generator=generator,
        dtype=torch.int32,
        device=_CPU,
    )
    counter = CallCounter(DeviceStatus(world, _CPU), _LAYER)
    outputs = torch.full((3, tokens, hidden + 8), 5.0, dtype=torch.bfloat16, device=_CPU)
    for call, local_block in enumerate((ranks.rank, world + ranks.rank, ranks.rank)):
        if call == 2:
            counter.status.mark_failed()
            assert counter.status.failed.tolist() == [1]
        sum_blocks(
            BlockSums(sums_SRH, ranks, first_block=world, local_block=local_block),
            outputs[call, :, :hidden],
            None if is_single else row_of_token_WT,
            counter,
        )
    return {"output": outputs, **_get_state(counter)}


def _mask(ranks: Ranks) -> Tensors:
    """Mask the pairs of other ranks. One slot of this rank has no expert."""
    numbers_TK = torch.arange(
        -1, 3 * ranks.world_size * _SLOTS - 1, dtype=torch.int32, device=_CPU
    ).view(-1, 3)
    weights_TK = torch.ones(numbers_TK.shape, dtype=torch.float32, device=_CPU)
    mask_remote_pairs(numbers_TK, weights_TK, ranks, _SLOTS - 1)
    return {"slots": numbers_TK, "weights": weights_TK}


def _count_and_verify() -> Tensors:
    """Write the headers of two layers that share counters; verify headers with one wrong field."""
    world = 3
    status = DeviceStatus(world, _CPU)
    counters = [CallCounter(status, layer) for layer in (1, 2)]
    headers = torch.full((4, len(FIELDS)), -9, dtype=torch.int64, device=_CPU)
    for call, counter in enumerate((*counters, *counters)):
        if call % 2:
            counter.begin()
        counter.write_header(headers[call], 3 + call, refusal=NOT_REFUSED if call < 3 else 2)
    limits = status.limits(Capacity(_TOKENS, 4, equal_tokens=True))
    states = [status.failed.clone()]
    for changed_field in range(-1, len(FIELDS)):  # -1 changes no field
        headers_WF = headers[0].repeat(world, 1)
        if changed_field >= 0:
            headers_WF[1, changed_field] += 1
        status.verify(headers_WF, headers[0], limits)
        states += [status.failed.clone(), status._host_words.clone()]
    written = {f"state {index}": state for index, state in enumerate(states)}
    return {"headers": headers, **written, **_get_state(counters[0])}


def _verify_limits() -> Tensors:
    """Verify headers whose numbers of tokens and rows are at their limits, or beyond them."""
    world, local_rank = 5, 2
    max_tokens, max_rows = _TOKENS, 4
    # ((tokens, rows) of this rank, (tokens, rows) of the other ranks, whether the headers are wrong
    # if numbers of tokens may differ, whether they are wrong if they must be equal).
    header_cases = (
        ((0, 0), (0, 0), False, False),
        ((3, 2), (0, 0), False, True),
        ((3, 2), (max_tokens, max_rows), False, True),
        ((max_tokens, max_rows), (max_tokens, 0), False, False),
        ((3, 2), (3, max_rows), False, False),
        ((3, 2), (3, 0), False, False),
        ((3, 2), (3, max_rows + 1), True, True),
        ((3, 2), (3, -1), True, True),
        ((3, 2), (max_tokens + 1, 2), True, True),
        ((3, 2), (-1, 2), True, True),
        ((max_tokens + 1, 2), (max_tokens + 1, 2), True, True),
        ((-1, 2), (-1, 2), True, True),
        ((max_rows, max_rows), (max_rows, max_rows), False, False),
    )
    written = {}
    for index, (local, other, *is_wrong) in enumerate(header_cases):
        for equal_tokens in (False, True):
            status = DeviceStatus(world, _CPU)
            header = [0, 0, 0, *local, NOT_REFUSED, 0]  # layer, call and order are 0
            headers_WF = torch.tensor([header] * world, dtype=torch.int64, device=_CPU)
            local_header_F = headers_WF[local_rank].clone()
            headers_WF[-1, TOKENS : ROWS + 1] = torch.tensor(other, dtype=torch.int64, device=_CPU)
            limits = status.limits(Capacity(max_tokens, max_rows, equal_tokens=equal_tokens))
            status.verify(headers_WF, local_header_F, limits)
            states = status.failed.tolist(), status.failure() is not None
            assert states == ([int(is_wrong[equal_tokens])], is_wrong[equal_tokens]), index
            written[f"words {index}, {equal_tokens}"] = status._host_words.clone()
    return written


def _check_size(layout: BlockLayout) -> Tensors:
    """Check that a block is as small as its aligned sections allow."""
    sections, row_bytes = [*layout.sections.values()], layout.hidden * layout.dtype.itemsize
    ends = [start + math.prod(shape) * dtype.itemsize for start, shape, dtype in sections]
    unused = [start - end for end, (start, _, _) in zip(ends, sections[1:], strict=False)]
    smaller = layout.nbytes - _ALIGNMENT // math.gcd(_ALIGNMENT, row_bytes) * row_bytes
    assert smaller < ends[-1] <= layout.nbytes == layout.block_rows * row_bytes, layout
    assert layout.nbytes % _ALIGNMENT == 0, layout
    assert not any(start % _ALIGNMENT for start, _, _ in sections), layout
    assert all(0 <= nbytes < _ALIGNMENT for nbytes in unused), layout
    return {}


def _check_phases() -> Tensors:
    """Check the phases that the status reports during three calls, of which one ends."""
    status = DeviceStatus(2, _CPU)
    counter, header_F = (
        CallCounter(status, _LAYER),
        torch.zeros(len(FIELDS), dtype=torch.int64, device=_CPU),
    )
    for call in range(3):
        if call == 1:
            counter.begin()
        counter.write_header(header_F, 1, refusal=NOT_REFUSED)
    assert (status.phase(), status.progress()) == ("dispatch", (3, 0))
    limits = status.limits(Capacity(_TOKENS, _TOKENS))
    for _ in range(3):
        status.verify(header_F.repeat(2, 1), header_F, limits)
    assert (status.phase(), status.progress()) == ("combine", (3, 0))
    sums = BlockSums(
        torch.zeros(2, 1, 8, dtype=torch.float32, device=_CPU),
        Ranks(0, 2, _SLOTS),
        first_block=0,
        local_block=0,
    )
    sum_blocks(sums, torch.zeros(1, 8, dtype=torch.float32, device=_CPU), None, counter)
    assert (status.phase(), status.progress()) == ("combine", (3, 1))
    assert status.failure() is None
    return _get_state(counter)


def _check_known_pairs() -> Tensors:
    """Check the slots of known pairs. The last slot of this rank has no expert."""
    numbers_TK = torch.tensor(
        [[0, _SLOTS, -1], [2 * _SLOTS - 1, _SLOTS + 1, 2 * _SLOTS]], dtype=torch.int64, device=_CPU
    )
    slots_TK, weights_TK = (
        numbers_TK.to(torch.int32),
        torch.ones(2, 3, dtype=torch.float32, device=_CPU),
    )
    mask_remote_pairs(slots_TK, weights_TK, Ranks(1, 3, _SLOTS), _SLOTS - 1)
    assert slots_TK.tolist() == [[-1, 0, -1], [-1, 1, -1]]
    assert weights_TK.tolist() == [[0, 1, 0], [0, 1, 0]]
    return {"slots": slots_TK, "weights": weights_TK}
