"""Launches of the symmetric-memory kernels on meta tensors, for `mk compile`.

`mk compile` compiles every kernel without a GPU. Meta tensors supply the shapes and dtypes
for which kernels are compiled.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from modular_kernel.contracts import CallState
from modular_kernel.ops.quantize import QuantizedRows
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.problem import MAX_TOP_K, Parallel, Problem
from modular_kernel.tensors import Routing
from modular_kernel.workspace import Workspace
from prepare_finalize.common.compile_cases import META, empty, problems_with
from prepare_finalize.symm_mem.launch import (
    CallBuffers,
    SymmetricExchange,
    buffer_sections,
    quantizes_in_dispatch,
)

_CHANGES: tuple[dict[str, Any], ...] = (
    {"quant": "fp8_w8a8_tensor:static=true"},
    {"parallel": Parallel(2, Placement.linear(8, 2))},
    {"lora": "adapters=4,rank=16"},
    {"top_k": 22, "experts": 64},
    {"top_k": MAX_TOP_K, "experts": 64, "quant": "fp8_w8a8_channel"},
)


def problems() -> tuple[Problem, ...]:
    """Return problems that together cover every variant of the launches."""
    return problems_with(_CHANGES)


def launch_all(problem: Problem) -> None:
    """Launch all kernels: `send` with and without a wait, `receive`, and `combine`."""
    views: dict[str, Any] = {
        name: empty(*section.shape, dtype=section.dtype)
        for name, section in buffer_sections(problem).items()
    }
    views.setdefault("scale_RG", None)
    buffers = CallBuffers(**views, dispatches=empty(2), combines=empty(2))
    manager: Any = SimpleNamespace(
        rank=problem.parallel.rank,
        world_size=problem.parallel.world_size,
        failed=empty(1),
        status=empty(1, dtype=torch.int64),
        timeout_ns=10**10,
    )
    tokens, peer_address_offsets = problem.tokens, empty(manager.world_size, dtype=torch.int64)
    exchange = SymmetricExchange(
        manager, problem, buffers, peer_address_offsets, empty(tokens), tokens
    )
    x = empty(tokens, problem.hidden, dtype=problem.dtype)
    routing = Routing(
        empty(tokens, problem.top_k, dtype=torch.float32), empty(tokens, problem.top_k)
    )
    tables, call = problem.placement.tables(META), CallState(Workspace({}, META), empty(1))
    quantized = None
    if problem.scheme.dispatched_quantized and not quantizes_in_dispatch(
        problem.scheme, problem.hidden
    ):
        scale = empty(1, dtype=torch.float32)
        if buffers.scale_RG is not None:
            scale = empty(tokens, buffers.scale_RG.shape[1], dtype=torch.float32)
        quantized = QuantizedRows(empty(tokens, problem.hidden, dtype=buffers.x_RH.dtype), scale)
    exchange.send(x, routing, tables, call, quantized=quantized, wait=True)
    if buffers.adapters_R is not None:
        routing = replace(routing, adapters_T=empty(tokens))
    exchange.send(x, routing, tables, call, quantized=quantized, wait=False)
    exchange.receive()
    exchange.combine(x)
