"""Overlapping launches do not read data before the launch that writes it has ended."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

from modular_kernel.catalog import make_kernel
from modular_kernel.replay.launch.pdl import pdl_arguments
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import Routing
from modular_kernel.testing.random_inputs import random_inputs

PAIR = ("MoEPrepareAndFinalizeNoEP", "TritonExperts")
BASE = Problem(tokens=64, hidden=512, intermediate=384, experts=8, top_k=2)
DELAY_NS = 100_000
CALLS = 6


@triton.jit
def late_copy_kernel(
    from_ptr, to_ptr, numel, NS: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr = False
):
    """Copy `from` to `to`, but only NS nanoseconds after the next launch was allowed to begin."""
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    start = globaltimer()
    now = start
    while now - start < NS:
        now = globaltimer()
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    tl.store(to_ptr + offsets, tl.load(from_ptr + offsets, mask=mask), mask=mask)


def launch_late_copy(source: torch.Tensor, target: torch.Tensor) -> None:
    grid = (triton.cdiv(source.numel(), 1024),)
    late_copy_kernel[grid](
        source, target, source.numel(), NS=DELAY_NS, BLOCK=1024, **pdl_arguments()
    )


@pytest.mark.parametrize("tokens", [5, 64, 300])
@pytest.mark.parametrize("quant", ["none", "fp8_w8a8_channel", "fp8_w8a8_block"])
def test_inputs_written_by_a_late_kernel_are_read(quant: str, tokens: int) -> None:
    problem = replace(BASE, tokens=tokens, quant=quant)
    all_inputs = random_inputs(problem.with_tokens(CALLS * tokens), torch.device("cuda"))
    weights, routing = all_inputs[1], all_inputs[2]
    inputs = list(
        zip(
            all_inputs[0].split(tokens),
            routing.topk_weights_TK.split(tokens),
            routing.topk_ids_TK.split(tokens),
            strict=True,
        )
    )
    plan = make_kernel(*PAIR, problem).plan()
    expected_outputs = [plan(x_TH, weights, Routing(w, ids)).clone() for x_TH, w, ids in inputs]
    x_TH, ids_TK = inputs[0][0].clone(), inputs[0][2].clone()
    outputs = [torch.empty_like(y_TH) for y_TH in expected_outputs]

    def run_all_calls() -> None:
        for (late_TH, weights_TK, late_ids_TK), out_TH in zip(inputs, outputs, strict=True):
            launch_late_copy(late_ids_TK, ids_TK)
            launch_late_copy(late_TH, x_TH)
            plan(x_TH, weights, Routing(weights_TK, ids_TK), out=out_TH)

    run_all_calls()
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected_outputs, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_all_calls()
    for _ in range(3):
        for out_TH in outputs:
            out_TH.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected_outputs, strict=True))
