"""sort_pairs: rows of pairs and tiles of rows, compared with a layout in Python."""

import pytest
import torch

from modular_kernel.ops import count
from modular_kernel.ops.sort import max_tile_count, sort_pairs, sort_specs
from modular_kernel.spec.problem import IdSpace
from modular_kernel.tensors import DispatchedRouting
from modular_kernel.workspace import Workspace

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def verify_sort(
    ids_TK: torch.Tensor, block_m: int, experts: int, expert_map: list[int] | None = None
) -> None:
    ids_TK = ids_TK.to(DEVICE)
    mapping = None if expert_map is None else torch.tensor(expert_map, dtype=torch.int32)
    counter = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    routing = DispatchedRouting(
        None,
        ids_TK,
        IdSpace.GLOBAL,
        experts if mapping is None else len(mapping),
        None if mapping is None else mapping.to(DEVICE),
        counter,
    )
    workspace = Workspace(
        sort_specs(*ids_TK.shape, block_m, experts), torch.device(DEVICE), poison=True
    )
    actual = sort_pairs(routing, block_m=block_m, num_local=experts, workspace=workspace)
    expert_of_pair = [i if 0 <= i < routing.num_experts else -1 for i in ids_TK.flatten().tolist()]
    if expert_map is not None:
        expert_of_pair = [expert_map[i] if i >= 0 else -1 for i in expert_of_pair]
    order = [p for e in range(experts) for p, i in enumerate(expert_of_pair) if i == e]
    rows = [order.index(p) if i >= 0 else -1 for p, i in enumerate(expert_of_pair)]
    assert actual.row_of_pair_TK.flatten().tolist() == rows
    tokens = [p // ids_TK.shape[1] for p in order]
    assert actual.token_of_row[: len(order)].tolist() == tokens
    starts, tiles, start = [0], [], 0
    for expert in range(experts):
        end = start + expert_of_pair.count(expert)
        starts.append(end)
        tiles += [[expert, row, end] for row in range(start, end, block_m)]
        start = end
    assert actual.starts.tolist() == starts
    assert len(tiles) <= actual.max_tiles == max_tile_count(ids_TK.numel(), block_m, experts)
    assert actual.tiles[-1] == len(tiles)
    actual_tiles = actual.tiles[: 3 * actual.max_tiles].view(3, -1)[:, : len(tiles)]
    assert actual_tiles.T.tolist() == tiles
    workspace.check_red_zones()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("block_m", [16, 64, 128])
def test_rows_and_tiles_equal_the_python_layout(block_m: int, dtype: torch.dtype) -> None:
    ids = torch.randint(-1, 6, (150, 3), generator=torch.Generator().manual_seed(block_m))
    verify_sort(ids.to(dtype), block_m, 6)


@pytest.mark.parametrize("experts", [1, 2, 7, 64, 129, 600])
def test_sort_with_few_and_many_experts(experts: int) -> None:
    generator = torch.Generator().manual_seed(experts)
    verify_sort(torch.randint(0, experts, (9, 2), generator=generator), 16, experts)
    verify_sort(torch.randint(-1, experts, (1, 1), generator=generator), 16, experts)


@pytest.mark.parametrize(
    "ids",
    [
        [[-1, -1], [-1, -1]],
        [[0, 0], [0, 0], [0, 0]],
        [[3, 3], [-1, 3], [0, -1]],
        [[0, 7], [-2, 1], [2**40, 3]],
    ],
    ids=["all-skipped", "one-expert", "mixed-with-repeats", "out-of-range"],
)
def test_skipped_pairs_get_no_row(ids: list[list[int]]) -> None:
    verify_sort(torch.tensor(ids), 16, 4)


def test_counts_are_scanned_in_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(count, "_SCAN_BLOCK", 2)
    ids = torch.randint(-1, 3, (700, 1), generator=torch.Generator().manual_seed(2))
    verify_sort(ids, 16, 3)


def test_experts_that_map_to_no_local_expert_get_no_rows() -> None:
    verify_sort(torch.tensor([[0, 5], [3, -1], [9, 2]]), 16, 3, expert_map=[-1, 1, 0, -1, -1, 2])
