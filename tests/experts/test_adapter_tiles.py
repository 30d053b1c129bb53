"""u of adapters in the layout that products with TMA read, in the interpreter, and the layers that
use it.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from experts.triton.adapters import TileShrinkOutput
from experts.triton.configs.select import on_device
from experts.triton.contiguous import supported_paths
from experts.triton.grouped_tma.adapters import TileShrink, round_up_to_box, tile_specs
from experts.triton.launch_config import Device
from modular_kernel.interpreter.access_log import ACCESS_LOG
from modular_kernel.ops.sort import SortedPairs, max_tile_count
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights
from modular_kernel.workspace import Workspace

BASE = Problem(12, 32, 48, 3, 1, lora="adapters=5,rank=20")
ENDS = (7, 7, 12)  # rows of three experts, of which one has none
TILE = 16


def made(slots: torch.Tensor, a: torch.Tensor, x_TH: torch.Tensor) -> TileShrinkOutput:
    """Return the output of a launch of `TileShrink` into poisoned memory; each element is written
    once.
    """
    rank = a.shape[2] // 2
    problem = replace(BASE, lora=f"adapters=5,rank={rank}")
    specs = tile_specs(problem, 12, max_tile_count(12, TILE, 3))
    workspace = Workspace(specs, slots.device, poison=True)
    tiles = torch.tensor([0, 2, 9, 0, 7, 9, 7, 12, 9, 2], dtype=torch.int32)
    token_of_row = torch.arange(11, -1, -1, dtype=torch.int32)
    starts = torch.tensor([0, *ENDS], dtype=torch.int32)
    order = SortedPairs(token_of_row.argsort().int()[:, None], token_of_row, tiles, starts)
    adapters = TileShrink(slots, problem, workspace, order, TILE)
    b = torch.zeros(5, 3, 96, rank)
    with ACCESS_LOG.races() as races:
        found: Any = adapters.shrink_x(x_TH, ExpertWeights(a, a, lora_a13=a, lora_b13=b))
    assert races == []
    assert isinstance(found, TileShrinkOutput)
    workspace.check_red_zones()
    return found


@pytest.mark.cpu
@pytest.mark.parametrize("rank", [20, 40])
@pytest.mark.parametrize("named", ["some", "nobody"])
def test_u_of_the_slots_of_a_tile_is_adjacent(named: str, rank: int) -> None:
    """In one box of 64 columns and in two, which have separate programs."""
    generator = torch.Generator().manual_seed(1)
    x_TH = torch.randn(12, 32, generator=generator).bfloat16()
    a = torch.randn(5, 3, 2 * rank, 32, generator=generator).bfloat16()
    slots = torch.tensor([4, -1, 1, 1, 0, 4, 0, -1, 1, 0, -1, 5], dtype=torch.int32)
    if named == "nobody":
        slots = torch.full_like(slots, -1)
    a[3] = torch.nan  # of no token
    found = made(slots, a, x_TH)
    width = round_up_to_box(2 * rank)
    assert (width, found.up_offset) == ({20: 64, 40: 128}[rank], rank)
    for tile, (expert, first, end) in enumerate(((0, 0, 7), (2, 7, 12))):
        tokens = [11 - row for row in range(first, end)]
        there = sorted({int(slots[t]) for t in tokens if 0 <= int(slots[t]) < 5})
        assert found.tile_slots[tile, : 1 + len(there)].tolist() == [len(there), *there]
        for row, token in zip(range(first, end), tokens, strict=True):
            for place, slot in enumerate(there):
                u = found.u[row, place * width : (place + 1) * width].float()
                want = torch.zeros(width)
                if int(slots[token]) == slot:
                    want[: 2 * rank] = a[slot, expert].float() @ x_TH[token].float()
                torch.testing.assert_close(u, want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, True),
        ({"dtype": torch.float16}, True),
        ({"lora": "adapters=8,rank=256"}, True),
        ({"lora": "adapters=9,rank=8"}, False),  # too many steps more
        ({"lora": "adapters=2,rank=12"}, False),  # rows of B not on 16 bytes
        ({"activation": "silu:interleaved=true"}, False),  # two u for one box of rows
        ({"activation": "silu:interleaved=true", "lora": "adapters=2,rank=8,a13=shared"}, True),
        ({"quant": "fp8_w8a8_channel"}, False),  # u has 16 bits
        ({"batch_invariant": True}, False),
    ],
    ids=str,
)
def test_layers_that_append_adapters_to_the_depth_of_products(
    change: dict[str, Any], taken: bool
) -> None:
    problem = replace(BASE, **{"lora": "adapters=4,rank=16", **change})
    with on_device(Device.from_name("NVIDIA H200")):
        assert ("grouped_tma" in supported_paths(problem)) is taken
