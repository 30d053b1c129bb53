"""The launches over symmetric memory compile for sm_90 without spills, at a model's sizes."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modular_kernel import Problem, Routing
from modular_kernel.contracts import Call
from modular_kernel.ops.quantise import Quantised
from modular_kernel.placement import Placement
from modular_kernel.testing.compile import CompileRecord, check, record_compiles
from modular_kernel.types import Parallel
from modular_kernel.workspace import Workspace
from prepare_finalize.symm_launch import Exchange, Slot, quantises_on_the_way, sections

META = torch.device("meta")


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def compiled(problem: Problem) -> list[CompileRecord]:
    """A dispatch that waits, one that does not and its arrival, and the combine."""
    views: dict[str, Any] = {
        name: empty(*section.shape, dtype=section.dtype)
        for name, section in sections(problem).items()
    }
    views.setdefault("scale_RG", None)
    slot = Slot(**views, dispatches=empty(2), combines=empty(2))
    manager: Any = SimpleNamespace(
        rank=problem.parallel.rank,
        world_size=problem.parallel.world_size,
        failed=empty(1),
        status=empty(1, dtype=torch.int64),
        patience=10**10,
    )
    tokens, deltas = problem.tokens, empty(manager.world_size, dtype=torch.int64)
    exchange = Exchange(manager, problem, slot, deltas, empty(tokens), tokens)
    x = empty(tokens, problem.hidden, dtype=problem.dtype)
    routing = Routing(
        empty(tokens, problem.top_k, dtype=torch.float32), empty(tokens, problem.top_k)
    )
    tables, call = problem.placement.tables(META), Call(Workspace({}, META), empty(1))
    quantised = None
    if problem.scheme.quantises_activations and not quantises_on_the_way(
        problem.scheme, problem.hidden
    ):
        scale = empty(1, dtype=torch.float32)
        if slot.scale_RG is not None:
            scale = empty(tokens, slot.scale_RG.shape[1], dtype=torch.float32)
        quantised = Quantised(empty(tokens, problem.hidden, dtype=slot.x_RH.dtype), scale)
    with record_compiles() as records:
        for wait in (True, False):
            exchange.send(x, routing, tables, call, quantised=quantised, wait=wait)
        exchange.receive()
        exchange.combine(x)
    return records


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tokens": 4096, "parallel": Parallel(4, rank=3)},
        {"quant": "fp8_w8a8_block"},
        {"quant": "fp8_w8a8_channel", "tokens": 1024},
        {"quant": "int8_w8a8_block:block=96x96", "hidden": 2880},
        {"quant": "fp8_w8a8_tensor:static=true"},
        {"parallel": Parallel(2, Placement.linear(8, 2))},
    ],
    ids=str,
)
def test_compiles_without_spills(change: dict[str, Any]) -> None:
    problem = Problem(64, 7168, 2048, experts=8, top_k=8, parallel=Parallel(2, rank=1))
    records = compiled(replace(problem, **change))
    assert [record.kernel for record in records] == [
        "dispatch_kernel",
        "dispatch_kernel",
        "arrival_kernel",
        "combine_kernel",
    ]
    assert [reason for record in records for reason in check(record)] == []
