"""The output u = A x of LoRA adapters, in the layout that the TMA kernel reads (interpreted).

The kernel appends u to the depth of the tokens, so that one GEMM adds B u to the output.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from experts.triton.adapters import TileShrinkOutput
from experts.triton.configs.select import on_device
from experts.triton.grouped_tma.adapters import TileShrink, round_up_to_box, shrink_buffer_specs
from experts.triton.launch_config import Device
from experts.triton.standard import supported_paths
from modular_kernel.interpreter.access_log import ACCESS_LOG
from modular_kernel.ops.sort import SortedPairs, max_tile_count
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights
from modular_kernel.workspace import Workspace

BASE = Problem(12, 32, 48, 3, 1, lora="adapters=5,rank=20")
ENDS = (7, 7, 12)  # the row after the last row of each expert, of which the second has no rows
TILE = 16


def launch_shrink(slots: torch.Tensor, a: torch.Tensor, x_TH: torch.Tensor) -> TileShrinkOutput:
    """Launch `TileShrink` into poisoned memory, and assert that no element is written twice."""
    rank = a.shape[2] // 2
    problem = replace(BASE, lora=f"adapters=5,rank={rank}")
    specs = shrink_buffer_specs(problem, 12, max_tile_count(12, TILE, 3))
    workspace = Workspace(specs, slots.device, poison=True)
    tiles = torch.tensor([0, 2, 9, 0, 7, 9, 7, 12, 9, 2], dtype=torch.int32)
    token_of_row = torch.arange(11, -1, -1, dtype=torch.int32)
    starts = torch.tensor([0, *ENDS], dtype=torch.int32)
    order = SortedPairs(token_of_row.argsort().int()[:, None], token_of_row, tiles, starts)
    adapters = TileShrink(slots, problem, workspace, order, TILE)
    b = torch.zeros(5, 3, 96, rank)
    with ACCESS_LOG.races() as races:
        output: Any = adapters.shrink_x(x_TH, ExpertWeights(a, a, lora_a13=a, lora_b13=b))
    assert races == []
    assert isinstance(output, TileShrinkOutput)
    workspace.check_red_zones()
    return output


@pytest.mark.cpu
@pytest.mark.parametrize("rank", [20, 40])
@pytest.mark.parametrize("named", ["some", "nobody"])
def test_outputs_of_the_slots_of_a_tile_are_adjacent(named: str, rank: int) -> None:
    """With rank 20, u has one box of 64 columns. With rank 40, u has two boxes, which separate
    programs compute.
    """
    generator = torch.Generator().manual_seed(1)
    x_TH = torch.randn(12, 32, generator=generator).bfloat16()
    a = torch.randn(5, 3, 2 * rank, 32, generator=generator).bfloat16()
    slots = torch.tensor([4, -1, 1, 1, 0, 4, 0, -1, 1, 0, -1, 5], dtype=torch.int32)
    if named == "nobody":
        slots = torch.full_like(slots, -1)
    a[3] = torch.nan  # no token has this adapter
    output = launch_shrink(slots, a, x_TH)
    width = round_up_to_box(2 * rank)
    assert (width, output.up_offset) == ({20: 64, 40: 128}[rank], rank)
    for tile, (expert, first, end) in enumerate(((0, 0, 7), (2, 7, 12))):
        tokens = [11 - row for row in range(first, end)]
        used_slots = sorted({int(slots[t]) for t in tokens if 0 <= int(slots[t]) < 5})
        expected_slots = [len(used_slots), *used_slots]
        assert output.tile_slots[tile, : len(expected_slots)].tolist() == expected_slots
        for row, token in zip(range(first, end), tokens, strict=True):
            for index, slot in enumerate(used_slots):
                u = output.u[row, index * width : (index + 1) * width].float()
                expected = torch.zeros(width)
                if int(slots[token]) == slot:
                    expected[: 2 * rank] = a[slot, expert].float() @ x_TH[token].float()
                torch.testing.assert_close(u, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("change", "is_supported"),
    [
        ({}, True),
        ({"dtype": torch.float16}, True),
        ({"lora": "adapters=8,rank=256"}, True),
        ({"lora": "adapters=9,rank=8"}, False),  # too many additional steps of the depth
        ({"lora": "adapters=2,rank=12"}, False),  # rows of B are not aligned to 16 bytes
        ({"activation": "silu:interleaved=true"}, False),  # gate and up rows need different u
        ({"activation": "silu:interleaved=true", "lora": "adapters=2,rank=8,a13=shared"}, True),
        ({"quant": "fp8_w8a8_channel"}, False),  # u has 16 bits
        ({"batch_invariant": True}, False),
    ],
    ids=str,
)
def test_supported_layers_append_adapters_to_the_gemm_depth(
    change: dict[str, Any], is_supported: bool
) -> None:
    problem = replace(BASE, **{"lora": "adapters=4,rank=16", **change})
    with on_device(Device.from_name("NVIDIA H200")):
        assert ("grouped_tma" in supported_paths(problem)) is is_supported
