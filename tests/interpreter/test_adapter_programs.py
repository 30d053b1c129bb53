"""Grids and block sizes of the kernels that apply LoRA adapters."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import modular_kernel as mk
from experts.triton import adapters
from modular_kernel.catalog import this_machine
from modular_kernel.machine import prefer_torch_reference
from modular_kernel.ops import moe_lora_stages
from modular_kernel.ops.moe_lora import MoELoRABatchInfo, run_moe_lora
from modular_kernel.ops.moe_lora_stages import PairBatch
from modular_kernel.spec.problem import Problem
from modular_kernel.testing.cases.inputs import make_inputs

CPU, GPU = torch.device("cpu"), torch.device("cuda")
PROBLEM = Problem(9, 32, 48, 3, 2, torch.float32, lora="adapters=3,rank=80", batch_invariant=True)
Launches = list[tuple[tuple[int, ...], dict[str, Any]]]


def record_launches(monkeypatch: pytest.MonkeyPatch, module: Any, *, run: bool) -> Launches:
    """Record the grid and the arguments of every launch of `module` from now on."""
    launches: Launches = []
    launch = module.launch

    def record_launch(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
        launches.append((grid, arguments))
        if run:
            launch(kernel, grid, **arguments)

    monkeypatch.setattr(module, "launch", record_launch)
    return launches


@pytest.mark.parametrize(
    ("pair", "axis"),
    [
        (("MoEPrepareAndFinalizeNoEP", "TritonExperts"), 2),
        (("MoEPrepareAndFinalizeNoEP", "GroupedGemmExperts"), 2),
        (("BatchedPrepareAndFinalize", "BatchedTritonExperts"), 0),
    ],
)
def test_rows_of_a_are_divided_among_programs(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[str, str], axis: int
) -> None:
    """A program has up to 64 rows of A. A has 160 rows for gate and up, and 80 for down."""
    launches = record_launches(monkeypatch, adapters, run=True)
    inputs = make_inputs(PROBLEM, "uniform", CPU)
    mk.make_kernel(*pair, PROBLEM, machine=this_machine(device="cpu"))(
        inputs.x_TH, inputs.weights, inputs.routing
    )
    assert [(grid[1], a["lora_a_rows"], a["BLOCK_RANK"]) for grid, a in launches] == [
        (3, 160, 64), (2, 80, 64),
    ]  # fmt: skip
    for grid, arguments in launches:
        assert arguments["SLOT_PROGRAMS"] == 2  # for three slots
        assert grid[axis] % 2 == 0


@pytest.mark.parametrize(
    ("block_m", "rows", "depth", "dtype", "blocks"),
    [
        (16, 40, 4096, torch.bfloat16, (16, 256)),
        (32, 40, 4096, torch.bfloat16, (64, 128)),
        (32, 20, 4096, torch.bfloat16, (32, 128)),
        (32, 4, 4096, torch.bfloat16, (16, 256)),
        (64, 512, 4096, torch.bfloat16, (64, 64)),
        (256, 64, 4096, torch.float32, (64, 32)),
        (16, 40, 65, torch.bfloat16, (16, 128)),
        (16, 40, 64, torch.bfloat16, (16, 64)),
        (16, 40, 8, torch.bfloat16, (16, 32)),
    ],
)
def test_steps_have_more_columns_with_few_rows(
    block_m: int, rows: int, depth: int, dtype: torch.dtype, blocks: tuple[int, int]
) -> None:
    """A step loads at most 24 KiB of x and A, and from 32 columns to the whole row."""
    problem = replace(PROBLEM, dtype=dtype)
    for slots in (1, 9):
        a = torch.empty(slots, 3, rows, depth, device="meta", dtype=dtype)
        block_sizes = adapters.make_shrink_arguments(a, depth, problem, block_m)
        assert (block_sizes["BLOCK_RANK"], block_sizes["BLOCK_K"]) == blocks
        assert block_sizes["SLOT_PROGRAMS"] == min(slots, 8)
        cpu_block_sizes = adapters.make_shrink_arguments(
            a.new_empty(slots, 3, 1, 1, device=CPU), 1, problem, 16
        )
        assert cpu_block_sizes["SLOT_PROGRAMS"] == min(slots, 2)


@pytest.mark.parametrize(
    ("depth", "pairs", "blocks"),
    [
        (2048, 16, (4, 2048, 8)),
        (4096, 16, (4, 4096, 8)),
        (4096, 17, (4, 2048, 8)),
        (4097, 16, (2, 8192, 16)),
        (32768, 16, (2, 16384, 16)),
        (4097, 17, (1, 4096, 8)),
    ],
)
def test_up_to_16_pairs_use_larger_blocks(
    depth: int, pairs: int, blocks: tuple[int, int, int]
) -> None:
    assert adapters.shrink_few_blocks(depth, pairs, GPU) == blocks
    assert adapters.shrink_few_blocks(depth, pairs, CPU) == (16, 2048, 8)


@pytest.mark.parametrize(
    ("dtype", "depth", "output_block"), [(torch.float32, 32, 64), (torch.bfloat16, 64, 128)]
)
@pytest.mark.parametrize(("rank", "rows"), [(1, 16), (16, 16), (17, 32), (33, 32)])
def test_block_sizes_of_moe_lora(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    depth: int,
    output_block: int,
    rank: int,
    rows: int,
) -> None:
    """17 pairs need two blocks. A step reads 128 bytes of a row, and a program writes 256."""
    columns = 32 if dtype is torch.float32 else 64
    launches = record_launches(monkeypatch, moe_lora_stages, run=False)
    ids, ranks = torch.zeros(17, 1, dtype=torch.int32), torch.full((2, 3), rank)
    batch = PairBatch(ids, ids[:, 0], ranks)
    a, b = torch.zeros(2, 3, rank, 96, dtype=dtype), torch.zeros(2, 3, 130, rank, dtype=dtype)
    x, u = torch.zeros(17, 96, dtype=dtype), torch.zeros(17, 1, rank, dtype=dtype)
    output = torch.zeros(17, 130, dtype=dtype)
    with prefer_torch_reference(enabled=False):
        moe_lora_stages.moe_lora_a(x, a, batch)
        moe_lora_stages.moe_lora_gate_up_b(u, b, batch)
        moe_lora_stages.moe_lora_down_combine(u, b, batch, ids.float(), torch.ones(2), output)
    (a_grid, a_arguments), (b_grid, b_arguments), (down_grid, down_arguments) = launches
    assert a_grid == (2, -(-rank // rows))
    assert (a_arguments["BLOCK_RANK"], a_arguments["BLOCK_K"]) == (rows, depth)
    assert b_grid == (2, -(-65 // columns))
    assert (b_arguments["BLOCK_RANK"], b_arguments["BLOCK_INTERMEDIATE"]) == (rows, columns)
    assert down_grid == (2, -(-130 // output_block))
    assert (down_arguments["BLOCK_RANK"], down_arguments["BLOCK_HIDDEN"]) == (rows, output_block)


def test_lora_branch_sorts_pairs_by_adapter_and_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program reads the matrices of an adapter and expert once for all of its rows."""
    launches = record_launches(monkeypatch, moe_lora_stages, run=False)
    ids = torch.tensor([[1, 0], [0, 1], [1, 0], [-1, 1]], dtype=torch.int32)
    info = MoELoRABatchInfo(torch.tensor([1, 0, 1, -1]), torch.full((2,), 4), torch.ones(2))
    shapes = (4, 8), (12, 4), (4, 6), (8, 4)
    buffers = [torch.zeros(2, 2, *shape) for shape in shapes]
    x, output = torch.zeros(4, 8), torch.zeros(4, 8)
    with prefer_torch_reference(enabled=False):
        run_moe_lora(x, ids, torch.ones(4, 2), info, *buffers, output, strategy="staged")
    orders = [
        arguments["pair_order_ptr"].tolist()
        for _, arguments in launches
        if arguments.get("HAS_PAIR_ORDER")
    ]
    assert orders == [[2, 3, 1, 5, 0, 4, 6, 7]] * 3
