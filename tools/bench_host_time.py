"""Measure the host time of the public calls of a layer on one GPU.

    python tools/bench_host_time.py --json host.json
    python tools/bench_host_time.py --profile fp8_w8a8_block:64

A time is the median of `--calls` calls, each issued to an idle GPU. All calls of a row are timed
alternately, ten at a time, so that other load on the host affects all of them. The calls are:

- a kernel, and a kernel with a new `ExpertWeights` and `Routing` in every call
- a plan
- the operator that compiled models call, with the kernel's tensors
- `FusedMoE` with a router
- `fused_experts`, for the schemes that it supports
- the kernel and `FusedMoE` under `torch.set_default_device`
- the kernel in deterministic mode, without `torch.utils.deterministic.fill_uninitialized_memory`
"""

import argparse
import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import triton

from modular_kernel.catalog import make_kernel
from modular_kernel.integrations.fused_moe import fused_experts
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.operators.experts import EXPERTS_FORWARD
from modular_kernel.operators.pairing import Pairing, serialize_layer
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.router import RouterSpec
from modular_kernel.tensors import Routing
from modular_kernel.testing.cases.inputs import Inputs
from modular_kernel.testing.random_inputs import random_inputs

PAIR = ("MoEPrepareAndFinalizeNoEP", "TritonExperts")
LAYER = Problem(1024, hidden=2048, intermediate=512, experts=256, top_k=8)
SCHEMES = {
    "none": {},
    "fp8_w8a8_block": {"use_fp8_w8a8": True, "block_shape": [128, 128]},
    "int4_w4a16_group": {"use_int4_w4a16": True, "block_shape": [0, 128]},
    "mxfp4_w4a16": None,
}
TOKENS = (1, 64, 1024)
_CALLS_PER_ROUND, _WARMUP_CALLS = 10, 2
Call = Callable[[], object]


@dataclass
class TimedCall:
    """A call, the context in which it is timed, and its times in microseconds so far."""

    call: Call
    context: Callable[[], AbstractContextManager[None]] = nullcontext
    times_us: list[float] = field(default_factory=list)

    def run(self, count: int) -> None:
        """Add the times of `count` calls. The GPU is idle at the start of each call."""
        with self.context():
            for _ in range(_WARMUP_CALLS):
                self.call()
            for _ in range(count):
                torch.cuda.synchronize()
                start = time.perf_counter()
                self.call()
                self.times_us.append((time.perf_counter() - start) * 1e6)
            torch.cuda.synchronize()


@contextmanager
def use_deterministic_mode() -> Iterator[None]:
    """Enable deterministic mode, but do not fill new tensors."""
    torch.use_deterministic_algorithms(True)
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(False)


@contextmanager
def use_default_device() -> Iterator[None]:
    """Make "cuda" the default device, which adds a function mode to each call of torch."""
    torch.set_default_device("cuda")
    try:
        yield
    finally:
        torch.set_default_device(None)


def make_public_calls(quant: str, tokens: int, inputs: Inputs) -> dict[str, Call]:
    """Return the calls to time, by name.

    inputs: the tensors of `make_layer_inputs(quant)`.
    """
    problem = replace(LAYER, quant=quant, tokens=tokens)
    weights, routing = inputs.weights, inputs.routing.of(slice(tokens))
    x_TH = inputs.x_TH[:tokens].clone()
    routing = Routing(routing.topk_weights_TK.clone(), routing.topk_ids_TK.clone())
    kernel = make_kernel(*PAIR, problem)
    plan = kernel.plan()
    spec = RouterSpec(problem.top_k, renormalize=True)
    layer = FusedMoE(
        problem.experts, problem.hidden, problem.intermediate, quant_config=None if quant == "none"
        else quant, params_dtype=problem.dtype, router=spec, device="cuda",
    )  # fmt: skip
    layer.set_weights(weights)
    logits = torch.randn(tokens, problem.experts, device="cuda", dtype=problem.dtype)
    fields = {name: t for name, t in vars(weights).items() if t is not None}
    operator_arguments = ",".join(fields), serialize_layer(problem), str(Pairing(*PAIR))
    ids_and_weights = routing.topk_ids_TK, routing.topk_weights_TK
    calls: dict[str, Call] = {
        "kernel": lambda: kernel(x_TH, weights, routing),
        "kernel, new objects": lambda: kernel(
            x_TH, replace(weights), Routing(routing.topk_weights_TK, routing.topk_ids_TK)
        ),
        "plan": lambda: plan(x_TH, weights, routing),
        "operator": lambda: EXPERTS_FORWARD(
            x_TH, *ids_and_weights, list(fields.values()), *operator_arguments
        ),
        "FusedMoE": lambda: layer(x_TH, logits),
    }
    flags = SCHEMES[quant]
    if flags is not None:
        scales = {"w1_scale": weights.w1_scale, "w2_scale": weights.w2_scale} if flags else {}
        topk_output = (routing.topk_weights_TK, routing.topk_ids_TK, None)
        calls["fused_experts"] = lambda: fused_experts(
            x_TH, weights.w1, weights.w2, topk_output, **flags, **scales
        )
    shape = tuple(x_TH.shape)
    calls["torch.empty"] = lambda: torch.empty(shape, dtype=x_TH.dtype, device=x_TH.device)
    return calls


def make_layer_inputs(quant: str) -> Inputs:
    """Return random tensors of LAYER in a scheme. Host time does not depend on the values."""
    return Inputs(*random_inputs(replace(LAYER, quant=quant), torch.device("cuda")))


def measure(quant: str, tokens: int, inputs: Inputs, calls: int) -> dict[str, object]:
    """Return one row: host times in microseconds, by call."""
    public_calls = make_public_calls(quant, tokens, inputs)
    timed_calls = {name: TimedCall(call) for name, call in public_calls.items()}
    for name in ("kernel", "FusedMoE"):
        timed_calls[f"{name}, default device"] = TimedCall(public_calls[name], use_default_device)
    timed_calls["kernel, deterministic"] = TimedCall(public_calls["kernel"], use_deterministic_mode)
    with torch.no_grad():
        for _ in range(-(-calls // _CALLS_PER_ROUND)):
            for timed_call in timed_calls.values():
                timed_call.run(_CALLS_PER_ROUND)
    medians = {name: round(statistics.median(t.times_us), 2) for name, t in timed_calls.items()}
    return {"quant": quant, "tokens": tokens, **medians}


def profile(cell: str) -> None:
    """Print where the host time of one cell's calls goes."""
    quant, _, tokens = cell.partition(":")
    with torch.no_grad():
        for name, call in make_public_calls(quant, int(tokens), make_layer_inputs(quant)).items():
            for _ in range(10):
                call()
            profiler = cProfile.Profile()
            profiler.enable()
            for _ in range(2000):
                call()
            profiler.disable()
            torch.cuda.synchronize()
            print(f"== {name}")
            pstats.Stats(profiler).sort_stats("tottime").print_stats(16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", metavar="SCHEME:TOKENS")
    arguments = parser.parse_args()
    if arguments.profile:
        profile(arguments.profile)
        return
    rows = []
    for quant in SCHEMES:
        inputs = make_layer_inputs(quant)
        for tokens in TOKENS:
            row = measure(quant, tokens, inputs, arguments.calls)
            print(*(f"{name} {value}" for name, value in row.items()), sep="; ", flush=True)
            rows.append(row)
    if arguments.json:
        versions = {"torch": torch.__version__, "triton": triton.__version__}
        record = {"gpu": torch.cuda.get_device_name(), "versions": versions, "host_us": rows}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
