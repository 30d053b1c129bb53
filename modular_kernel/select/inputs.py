"""Inputs, weights and expected outputs for timing, which are the same for all candidates.

The weights of each expert have their own seed. A rank can therefore create its own experts for the
layer, and any other experts for the reference, with the same result for every number of ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from modular_kernel.measure.cases import first_experts_map, quantize
from modular_kernel.measure.check import FACTOR
from modular_kernel.measure.roofline import expert_bytes, work_of
from modular_kernel.measure.routing_patterns import RoutingKind, draw, load_of
from modular_kernel.measure.timing import l2_bytes, rotation
from modular_kernel.reference import oracle, recipe
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import ExpertWeights, Routing

_SEED = 11
_ROWS_COMPARED = 8  # rows of an output that are compared
# Minimum number of values to compare: over fewer, the error of plain torch, which sets the
# tolerance, varies too much.
_MIN_VALUES = 512
_MAX_CHECKED = 8  # maximum number of calls that are checked
_FEW_TOKENS = 256  # up to this many tokens calls are short, so time _MAX_CALLS, not _MIN_CALLS
_MAX_CALLS, _MIN_CALLS = 4, 2
_EPS = 1e-6

Input = tuple[torch.Tensor, Routing]


def without_inplace(problem: Problem) -> Problem:
    """Return the problem without `inplace`, because several timed calls share their inputs."""
    return replace(problem, inplace=False)


def weight_bytes(problem: Problem) -> float:
    """Return the bytes that `make_weights` needs at its peak.

    These are the unquantized weights, and the quantized ones if there is a scheme.
    """
    unquantized = problem.e * expert_bytes(problem, QuantScheme.parse("none"))
    if not problem.scheme.quantized:
        return unquantized
    return unquantized + problem.e * expert_bytes(problem, problem.scheme)


def make_weights(
    problem: Problem, device: torch.device, is_over: Callable[[], bool] | None = None
) -> ExpertWeights:
    """Create random weights of this rank's experts, in slot order, quantized by the scheme.

    is_over: called before each expert; TimeoutError is raised once it returns True.
    """
    world = problem.parallel.world_size
    local_experts = (
        problem.placement.slots[problem.parallel.rank] if world > 1 else range(problem.e)
    )
    unquantized = _draw_weights(problem, tuple(local_experts), device, is_over)
    expert_map = first_experts_map(problem, device)
    if world > 1 and problem.expert_map:
        expert_map = problem.placement.expert_map(problem.parallel.rank).to(device)
    return quantize(replace(unquantized, expert_map=expert_map), problem)


def _draw_weights(
    problem: Problem,
    experts: Sequence[int],
    device: torch.device,
    is_over: Callable[[], bool] | None = None,
) -> ExpertWeights:
    """Draw unquantized weights, normal with standard deviation fan_in ** -0.5."""
    n, h, i, dtype = problem.w1_rows, problem.hidden, problem.intermediate, problem.dtype
    count = len(experts)
    w1 = torch.empty(count, n, h, dtype=dtype, device=device)
    w2 = torch.empty(count, h, i, dtype=dtype, device=device)
    b1 = torch.empty(count, n, dtype=dtype, device=device) if problem.bias else None
    b2 = torch.empty(count, h, dtype=dtype, device=device) if problem.bias else None
    for slot, expert in enumerate(experts):
        if is_over is not None and is_over():
            raise TimeoutError(f"{slot} of {count} experts' weights were made in time")
        generator = torch.Generator(device).manual_seed(_SEED + expert)
        w1[slot] = (
            torch.randn(n, h, dtype=torch.float32, device=device, generator=generator) * h**-0.5
        )
        w2[slot] = (
            torch.randn(h, i, dtype=torch.float32, device=device, generator=generator) * i**-0.5
        )
        if b1 is not None and b2 is not None:
            b1[slot] = torch.randn(n, dtype=torch.float32, device=device, generator=generator) / 2
            b2[slot] = torch.randn(h, dtype=torch.float32, device=device, generator=generator) / 2
    return ExpertWeights(w1, w2, b1, b2)


@dataclass(frozen=True)
class ExpectedRows:
    """Expected output of some rows for `call_inputs`.

    rows: indices of the rows. exact: the rows in float64, unquantized. recipe_error: norm of the
    error of a plain torch implementation of the scheme, which sets the tolerance.
    """

    call_inputs: Input
    rows: torch.Tensor
    exact: torch.Tensor
    recipe_error: float


@dataclass(frozen=True)
class SelectWorkload:
    """What is timed at one number of tokens.

    inputs: those of the calls of one round. expected: expected outputs of the calls that are
    checked. flush: whether to overwrite the L2 cache before each call, because a call could
    otherwise hit lines that its predecessor loaded.
    """

    problem: Problem
    weights: ExpertWeights
    inputs: tuple[Input, ...]
    expected: tuple[ExpectedRows, ...]
    flush: bool

    def find_error(self, outputs: Sequence[torch.Tensor]) -> str:
        """Describe the error of the outputs for the inputs of `expected`; "" if there is none."""
        squared_error = squared_norm = bound = 0.0
        for out, expected_rows in zip(outputs, self.expected, strict=True):
            if tuple(out.shape) != self.problem.output_shape or not bool(out.isfinite().all()):
                return "an output of another shape, or values that are not finite"
            squared_error += (
                float((out[expected_rows.rows].double() - expected_rows.exact).norm()) ** 2
            )
            squared_norm += float(expected_rows.exact.norm()) ** 2
            bound += expected_rows.recipe_error**2
        error, allowed = (
            (x / squared_norm) ** 0.5 if squared_norm else x for x in (squared_error, bound)
        )
        allowed = FACTOR * allowed + _EPS
        return "" if error <= allowed else f"wrong: relative error {error:.2e} > {allowed:.2e}"


def make_workload(
    problem: Problem,
    weights: ExpertWeights,
    kind: RoutingKind,
    *,
    replicated: bool,
) -> SelectWorkload:
    """Draw inputs of `problem.tokens` tokens for this rank, and compute the expected outputs.

    replicated: whether all ranks pass the same tokens.
    """
    device = weights.w1.device
    rank = 0 if replicated else problem.parallel.rank
    calls = _MAX_CALLS if problem.tokens <= _FEW_TOKENS else _MIN_CALLS
    values_per_call = min(problem.tokens, _ROWS_COMPARED) * problem.hidden
    checked = min(max(1, -(-_MIN_VALUES // values_per_call)), _MAX_CHECKED)
    drawn = [_draw_input(problem, kind, device, rank, n) for n in range(max(calls, checked))]
    expected = tuple(_expected_rows(problem, call_inputs) for call_inputs in drawn[:checked])
    inputs = tuple(drawn[:calls])
    load = load_of(inputs[0][1], _on_one_rank(problem), weights.expert_map)
    bytes_moved = work_of(problem, problem.scheme, [load]).bytes
    # Use a single set of weights, because the candidates' buffers need memory.
    flush = rotation(bytes_moved, float("inf"), problem.tokens, l2=l2_bytes(device), memory=0).flush
    return SelectWorkload(problem, weights, inputs, expected, flush)


def _on_one_rank(problem: Problem) -> Problem:
    """Return the problem with all experts on one rank, so that no pair is skipped."""
    if problem.parallel.world_size == 1:
        return problem
    single = type(problem.parallel)()
    return replace(problem, parallel=single, local_experts=None, expert_map=False)


def _draw_input(
    problem: Problem, kind: RoutingKind, device: torch.device, rank: int, number: int
) -> Input:
    generator = torch.Generator(device).manual_seed(problem.tokens * 4096 + rank * 16 + number)
    x_TH = torch.randn(
        problem.tokens, problem.hidden, dtype=torch.float32, device=device, generator=generator
    )
    return x_TH.to(problem.dtype), draw(problem, kind, generator)


def _expected_rows(problem: Problem, call_inputs: Input) -> ExpectedRows:
    """Compute the expected output of a few rows, with only the experts that they use."""
    x_TH, routing = call_inputs
    device = x_TH.device
    rows = torch.linspace(
        0, len(x_TH) - 1, min(len(x_TH), _ROWS_COMPARED), dtype=torch.float32, device=device
    ).long()
    row_routing = routing.of(rows)
    ids = sorted(set(row_routing.topk_ids_TK.flatten().tolist()))
    single_rank = _on_one_rank(problem)
    if single_rank.expert_map:  # pairs of experts on other ranks are skipped
        ids = [i for i in ids if i < problem.e] or [0]
    expert_map = torch.full((problem.experts,), -1, dtype=torch.int32, device=device)
    expert_map[torch.tensor(ids, dtype=torch.int64, device=device)] = torch.arange(
        len(ids), dtype=torch.int32, device=device
    )
    row_problem = replace(single_rank, tokens=len(rows), expert_map=True, local_experts=len(ids))
    unquantized = replace(_draw_weights(problem, ids, device), expert_map=expert_map)
    exact = oracle(x_TH[rows], unquantized, row_routing, replace(row_problem, quant="none"))
    reference = recipe(x_TH[rows], quantize(unquantized, row_problem), row_routing, row_problem)
    return ExpectedRows(call_inputs, rows, exact, float((reference - exact).norm()))
