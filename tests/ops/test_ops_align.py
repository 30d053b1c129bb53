"""moe_align_block_size: layout, order, partial blocks and skipped pairs, compared with a layout in
Python.
"""

import pytest
import torch

from modular_kernel.errors import DtypeError, RoutingError, ShapeError
from modular_kernel.ops import align as align_module
from modular_kernel.ops import count
from modular_kernel.ops.align import (
    align,
    align_specs,
    compute_aligned_length,
    moe_align_block_size,
)
from modular_kernel.spec.problem import IdSpace
from modular_kernel.tensors import DispatchedRouting
from modular_kernel.workspace import Workspace

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=["one-launch", "three-launches"])
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with one launch and with three. The number of pairs normally decides which."""
    if request.param == "three-launches":
        monkeypatch.setattr(align_module, "_MAX_SINGLE_LAUNCH_PAIRS", 0)


def expected_layout(
    ids: list[int], block: int, experts: int, *, ignore: bool = False
) -> tuple[list[int], list[int], int]:
    """Return the sorted ids, the expert ids and the padded length."""
    order, blocks = [], []
    for expert in range(0 if ignore else -1, experts):
        pairs = [p for p, i in enumerate(ids) if i == expert]
        order += pairs + [len(ids)] * (-len(pairs) % block)
        blocks += [expert] * -(-len(pairs) // block)
    return order, blocks, len(order)


def verify_layout(
    ids_TK: torch.Tensor, block: int, experts: int, expert_map: list[int] | None = None, **options
) -> None:
    mapping = None if expert_map is None else torch.tensor(expert_map, dtype=torch.int32)
    actual = moe_align_block_size(
        ids_TK.to(DEVICE),
        block,
        experts,
        expert_map=None if mapping is None else mapping.to(DEVICE),
        **options,
    )
    sorted_ids, expert_ids, num_tokens_post_padded = (t.cpu() for t in actual)
    expert_of_pair = [i if 0 <= i < experts else -1 for i in ids_TK.flatten().tolist()]
    if expert_map is not None:
        expert_of_pair = [expert_map[i] if i >= 0 else -1 for i in expert_of_pair]
    ignore = options.get("ignore_invalid", False)
    order, blocks, length = expected_layout(expert_of_pair, block, experts, ignore=ignore)
    assert sorted_ids.dtype == expert_ids.dtype == num_tokens_post_padded.dtype == torch.int32
    assert sorted_ids.numel() == compute_aligned_length(ids_TK.numel(), block, experts)
    assert expert_ids.numel() == -(-sorted_ids.numel() // block)
    assert num_tokens_post_padded.tolist() == [length]
    assert sorted_ids[:length].tolist() == order
    assert set(sorted_ids[length:].tolist()) <= {ids_TK.numel()}, "the tail is the sentinel"
    assert expert_ids[: length // block].tolist() == blocks
    assert set(expert_ids[length // block :].tolist()) <= {-1}, "the tail belongs to no expert"


def test_example_of_four_tokens() -> None:
    ids = torch.tensor([[2, 3, 4], [1, 2, 4], [1, 3, 4], [1, 2, 3]])
    sorted_ids, expert_ids, num_tokens_post_padded = moe_align_block_size(ids.to(DEVICE), 4, 5)
    assert sorted_ids.numel() == 30
    assert sorted_ids[:16].tolist() == [3, 6, 9, 12, 0, 4, 10, 12, 1, 7, 11, 12, 2, 5, 8, 12]
    assert expert_ids[:4].tolist() == [1, 2, 3, 4]
    assert num_tokens_post_padded.tolist() == [16]


def test_example_with_skipped_pairs() -> None:
    ids = torch.tensor([[0, 1, -1], [-1, 0, -1], [-1, 1, -1], [-1, 0, 1]])
    sorted_ids, expert_ids, num_tokens_post_padded = moe_align_block_size(ids.to(DEVICE), 4, 2)
    expected = [2, 3, 5, 6, 8, 9, 12, 12, 0, 4, 10, 12, 1, 7, 11, 12]
    assert sorted_ids[:16].tolist() == expected
    assert expert_ids[:4].tolist() == [-1, -1, 0, 1]
    assert num_tokens_post_padded.tolist() == [16]


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("block", [16, 32, 64, 128, 256])
def test_layout_with_all_block_sizes_and_id_dtypes(block: int, dtype: torch.dtype) -> None:
    ids = torch.randint(-1, 6, (50, 3), generator=torch.Generator().manual_seed(block))
    verify_layout(ids.to(dtype), block, 6)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("experts", [1, 2, 7, 64, 129, 1024])
def test_layout_with_few_and_many_experts(experts: int) -> None:
    generator = torch.Generator().manual_seed(experts)
    verify_layout(torch.randint(0, experts, (9, 2), generator=generator), 16, experts)
    verify_layout(torch.randint(-1, experts, (1, 1), generator=generator), 16, experts)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("ignore", [False, True])
@pytest.mark.parametrize(
    "ids",
    [
        [[-1, -1], [-1, -1]],
        [[0, 0], [0, 0], [0, 0]],
        [[3, 3], [-1, 3], [0, -1]],
        [[2, 1], [1, 2]],
    ],
    ids=["all-skipped", "one-expert", "mixed-with-repeats", "no-skips"],
)
def test_skipped_pairs_come_first_or_are_ignored(ids: list[list[int]], ignore: bool) -> None:
    verify_layout(torch.tensor(ids), 16, 4, ignore_invalid=ignore)


@pytest.mark.usefixtures("launches")
def test_pairs_in_many_chunks_keep_their_order() -> None:
    """The numbers of pairs must be summed over chunks."""
    ids = torch.randint(-1, 5, (333, 3), generator=torch.Generator().manual_seed(0))
    verify_layout(ids, 32, 5)
    verify_layout(ids, 32, 5, ignore_invalid=True)


def test_counts_are_scanned_in_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(align_module, "_MAX_SINGLE_LAUNCH_PAIRS", 0)
    monkeypatch.setattr(count, "_SCAN_BLOCK", 2)
    ids = torch.randint(-1, 3, (700, 1), generator=torch.Generator().manual_seed(2))
    verify_layout(ids, 16, 3)


def test_layout_with_many_pairs_or_experts() -> None:
    generator = torch.Generator().manual_seed(3)
    verify_layout(torch.randint(0, 3, (4097, 1), generator=generator), 64, 3)
    verify_layout(torch.randint(0, 600, (300, 2), generator=generator), 16, 600)
    verify_layout(torch.randint(0, 600, (700, 2), generator=generator), 16, 600)


@pytest.mark.usefixtures("launches")
def test_invalid_ids_are_counted_once() -> None:
    ids = torch.randint(0, 4, (200, 2), dtype=torch.int32, device=DEVICE)
    ids[::3, 0] = 7
    counter = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    routing = DispatchedRouting(None, ids, IdSpace.GLOBAL, 4, None, counter)
    workspace = Workspace(align_specs(400, 16, 4), torch.device(DEVICE))
    align(routing, block_size=16, num_local=4, workspace=workspace)
    assert counter.tolist() == [67]


@pytest.mark.usefixtures("launches")
def test_ids_out_of_range_are_skipped_or_raise() -> None:
    ids = torch.tensor([[0, 7], [-2, 1], [2**40, 3]])
    verify_layout(ids, 16, 4)
    with pytest.raises(RoutingError, match="7"):
        moe_align_block_size(ids, 16, 4, checked=True)


@pytest.mark.usefixtures("launches")
def test_experts_that_map_to_no_local_expert_are_skipped() -> None:
    ids = torch.tensor([[0, 5], [3, -1], [9, 2]])
    verify_layout(ids, 16, 6, expert_map=[-1, 1, 0, -1, -1, 2])


def test_no_tokens_give_no_blocks() -> None:
    sorted_ids, expert_ids, num_tokens_post_padded = moe_align_block_size(
        torch.empty(0, 2, dtype=torch.int64, device=DEVICE), 16, 4
    )
    assert sorted_ids.numel() == expert_ids.numel() == 0
    assert num_tokens_post_padded.tolist() == [0]


@pytest.mark.usefixtures("launches")
def test_repeated_calls_are_equal_bit_for_bit() -> None:
    ids = torch.randint(0, 8, (300, 4), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    first, second = moe_align_block_size(ids, 64, 8), moe_align_block_size(ids, 64, 8)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("ids", "block", "error"),
    [
        (torch.zeros(4, dtype=torch.int64), 16, ShapeError),
        (torch.zeros(2, 2), 16, DtypeError),
        (torch.zeros(2, 2, dtype=torch.int64), 24, ShapeError),
    ],
    ids=["rank", "dtype", "block-size"],
)
def test_invalid_ids_and_block_sizes_are_refused(
    ids: torch.Tensor, block: int, error: type[Exception]
) -> None:
    with pytest.raises(error, match="need"):
        moe_align_block_size(ids, block, 4)


def test_output_size_is_limited_by_the_number_of_pairs() -> None:
    assert compute_aligned_length(12, 4, 5) == 12 + 6 * 3
    assert compute_aligned_length(3, 16, 64) == 3 * 16
    specs = align_specs(3, 16, 64)
    assert Workspace(specs, torch.device("cpu")).take("align_experts", (3,)).numel() == 3
