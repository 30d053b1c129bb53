"""Choose a pairing by measurement: every valid pair is built, run and timed; the fastest wins."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import torch

from modular_kernel.catalog import check_all, make_kernel, this_machine
from modular_kernel.errors import IncompatibleError
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.quant import quantise_weights
from modular_kernel.support import Verdict
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.types import Machine, Problem


@dataclass(frozen=True)
class Candidate:
    """A pairing that was considered: its verdict, and its median time if it is valid."""

    verdict: Verdict
    seconds: float | None = None


def measure(
    problem: Problem, machine: Machine | None = None, *, repeats: int = 5
) -> tuple[Candidate, ...]:
    """Every pairing for `problem`; the valid ones timed on random inputs on this machine.

    seconds: median over `repeats` planned calls after one warm-up call, wall time to completion.
    Sorted: fastest first, then the refused ones.
    """
    machine = machine or this_machine()
    verdicts = check_all(problem, machine)
    inputs = random_inputs(problem, torch.device(machine.device))
    timed = [
        Candidate(v, _seconds(v, machine, inputs, repeats) if v.ok else None) for v in verdicts
    ]
    return tuple(sorted(timed, key=lambda c: (c.seconds is None, c.seconds or 0.0)))


def compose(problem: Problem, machine: Machine | None = None) -> FusedMoEModularKernel:
    """The fastest valid pair on this machine; IncompatibleError with all reasons if none is."""
    machine = machine or this_machine()
    candidates = measure(problem, machine)
    best = candidates[0] if candidates else None
    if best is None or best.seconds is None:
        reasons = [r for c in candidates for r in c.verdict.rejections]
        raise IncompatibleError(f"every pairing for {problem}", reasons)
    return make_kernel(
        best.verdict.prepare_finalize, best.verdict.experts, problem, machine=machine
    )


Inputs = tuple[torch.Tensor, ExpertWeights, Routing]


def random_inputs(problem: Problem, device: torch.device) -> Inputs:
    """Inputs for timing: normal values, weights scaled by 1/sqrt(fan-in), uniform routing."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, device=device, generator=generator)
        return (values * std).to(problem.dtype)

    e, h, i, k = problem.e, problem.hidden, problem.intermediate, problem.top_k
    weights = ExpertWeights(
        w1=normal(e, problem.w1_rows, h, std=h**-0.5),
        w2=normal(e, h, i, std=i**-0.5),
        b1=normal(e, problem.w1_rows) if problem.bias else None,
        b2=normal(e, h) if problem.bias else None,
        expert_map=_first_local(problem, device) if problem.expert_map else None,
    )
    if problem.scheme.static:
        # Reaches to 28: further out than x or h of such weights get.
        scale = torch.full((1,), 2.0**-4, device=device)
        weights = replace(weights, a1_scale=scale, a2_scale=scale.clone())
    if problem.scheme.quantised:
        weights = quantise_weights(weights, problem)
    choices = max(problem.experts, k)
    logits = torch.randn(problem.tokens, choices, device=device, generator=generator)
    values, ids = logits.topk(k, dim=-1)
    ids = (ids % problem.experts).to(problem.ids_dtype or torch.int32)
    routing = Routing(values.softmax(-1).float().contiguous(), ids.contiguous())
    return normal(problem.tokens, h), weights, routing


def _first_local(problem: Problem, device: torch.device) -> torch.Tensor:
    """An expert_map that puts experts [0, e) here and the others elsewhere."""
    ids = torch.arange(problem.experts, device=device, dtype=torch.int32)
    return torch.where(ids < problem.e, ids, -1).to(torch.int32)


def _seconds(verdict: Verdict, machine: Machine, inputs: Inputs, repeats: int) -> float:
    problem = verdict.problem
    kernel = make_kernel(verdict.prepare_finalize, verdict.experts, problem, machine=machine)
    plan = kernel.plan()

    def call() -> None:
        plan(*inputs)
        if machine.device == "cuda":
            torch.cuda.synchronize()

    call()
    return median(_wall(call) for _ in range(repeats))


def _wall(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
