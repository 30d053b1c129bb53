"""Weights, inputs and expected outputs with which `compose` times and checks layers.

`select.search` creates the weights once, and a `TimingWorkload` for each number of tokens.

Each expert has its own seed. The weights therefore do not depend on the number of ranks, and a rank
can create experts of other ranks to compute the expected outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from modular_kernel.measure.cases import make_expert_map, quantize
from modular_kernel.measure.check import MAX_ERROR_RATIO
from modular_kernel.measure.roofline import compute_work, expert_bytes
from modular_kernel.measure.routing_patterns import RoutingKind, count_load, draw_routing
from modular_kernel.measure.timing import choose_rotation, l2_bytes
from modular_kernel.reference import float64_reference, rounded_reference
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import ExpertWeights, Routing

_SEED = 11
_MAX_ROWS = 8  # number of rows of an output that are compared
# Minimum number of values to compare. The tolerance is derived from the error of plain torch, which
# varies too much with fewer values.
_MIN_VALUES = 512
_MAX_CHECKED_CALLS = 8
_FEW_TOKENS = 256  # with up to 256 tokens, calls are short, and _MAX_CALLS calls are timed
_MAX_CALLS, _MIN_CALLS = 4, 2
_EPS = 1e-6

Input = tuple[torch.Tensor, Routing]  # x_TH and the routing of one call


def weight_bytes(problem: Problem) -> float:
    """Return the peak memory of `make_weights` in bytes.

    With a quantization scheme, the unquantized and the quantized weights exist at the same time.
    """
    unquantized = problem.e * expert_bytes(problem, QuantScheme.parse("none"))
    if not problem.scheme.quantized:
        return unquantized
    return unquantized + problem.e * expert_bytes(problem, problem.scheme)


def make_weights(
    problem: Problem, device: torch.device, is_time_over: Callable[[], bool] | None = None
) -> ExpertWeights:
    """Create random weights of this rank's experts, quantized by the problem's scheme.

    is_time_over: called before each expert is drawn.

    Raises TimeoutError if `is_time_over` returns True.
    """
    world = problem.parallel.world_size
    local_experts = (
        problem.placement.slots[problem.parallel.rank] if world > 1 else range(problem.e)
    )
    unquantized = _draw_weights(problem, tuple(local_experts), device, is_time_over)
    expert_map = make_expert_map(problem, device)
    if world > 1 and problem.expert_map:
        expert_map = problem.placement.expert_map(problem.parallel.rank).to(device)
    return quantize(replace(unquantized, expert_map=expert_map), problem)


def _draw_weights(
    problem: Problem,
    experts: Sequence[int],
    device: torch.device,
    is_time_over: Callable[[], bool] | None = None,
) -> ExpertWeights:
    """Draw unquantized weights of `experts`, normal with standard deviation fan_in ** -0.5."""
    n, h, i, dtype = problem.w1_rows, problem.hidden, problem.intermediate, problem.dtype
    num_experts = len(experts)
    w1 = torch.empty(num_experts, n, h, dtype=dtype, device=device)
    w2 = torch.empty(num_experts, h, i, dtype=dtype, device=device)
    b1 = torch.empty(num_experts, n, dtype=dtype, device=device) if problem.bias else None
    b2 = torch.empty(num_experts, h, dtype=dtype, device=device) if problem.bias else None
    for slot, expert in enumerate(experts):
        if is_time_over is not None and is_time_over():
            raise TimeoutError(f"weights of {slot} of {num_experts} experts were created in time")
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
    """Expected values of some output rows of one call.

    call_inputs: the inputs of the call.
    rows: indices of the R compared rows, (R,) int64.
    exact: values of these rows, (R, H), computed in float64 from unquantized weights.
    torch_error: norm of the error of plain torch with the roundings of the scheme
        (`reference.rounded_reference`) on these rows, which determines the tolerance.
    """

    call_inputs: Input
    rows: torch.Tensor
    exact: torch.Tensor
    torch_error: float


@dataclass(frozen=True)
class TimingWorkload:
    """Weights, inputs and expected outputs for timing at one number of tokens.

    inputs: the inputs of the calls of one round.
    expected: the expected outputs of the calls that are checked before timing.
    flush: whether to overwrite the L2 cache before each call, because it could still hold data of
        the previous call.
    """

    problem: Problem
    weights: ExpertWeights
    inputs: tuple[Input, ...]
    expected: tuple[ExpectedRows, ...]
    flush: bool

    def find_error(self, outputs: Sequence[torch.Tensor]) -> str:
        """Return why the outputs of the checked calls are wrong; "" if they are correct."""
        squared_error = squared_norm = squared_torch_error = 0.0
        for out, expected_rows in zip(outputs, self.expected, strict=True):
            if tuple(out.shape) != self.problem.output_shape or not bool(out.isfinite().all()):
                return "an output of another shape, or values that are not finite"
            squared_error += (
                float((out[expected_rows.rows].double() - expected_rows.exact).norm()) ** 2
            )
            squared_norm += float(expected_rows.exact.norm()) ** 2
            squared_torch_error += expected_rows.torch_error**2
        error, torch_error = (
            (squared / squared_norm) ** 0.5 if squared_norm else squared
            for squared in (squared_error, squared_torch_error)
        )
        max_error = MAX_ERROR_RATIO * torch_error + _EPS
        return "" if error <= max_error else f"wrong: relative error {error:.2e} > {max_error:.2e}"


def make_workload(
    problem: Problem,
    weights: ExpertWeights,
    kind: RoutingKind,
    *,
    replicated: bool,
) -> TimingWorkload:
    """Draw inputs of `problem.tokens` tokens for this rank, and compute the expected outputs.

    kind: distribution of tokens over experts.
    replicated: whether all ranks pass the same tokens.
    """
    device = weights.w1.device
    rank = 0 if replicated else problem.parallel.rank
    num_calls = _MAX_CALLS if problem.tokens <= _FEW_TOKENS else _MIN_CALLS
    values_per_call = min(problem.tokens, _MAX_ROWS) * problem.hidden
    num_checked = min(max(1, -(-_MIN_VALUES // values_per_call)), _MAX_CHECKED_CALLS)
    drawn_inputs = [
        _draw_input(problem, kind, device, rank, n) for n in range(max(num_calls, num_checked))
    ]
    expected = tuple(
        _compute_expected_rows(problem, call_inputs) for call_inputs in drawn_inputs[:num_checked]
    )
    inputs = tuple(drawn_inputs[:num_calls])
    load = count_load(inputs[0][1], _make_single_rank_problem(problem), weights.expert_map)
    bytes_moved = compute_work(problem, problem.scheme, [load]).bytes
    # memory=0 allows a single set of weights, which leaves memory for the buffers of the layer.
    flush = choose_rotation(
        bytes_moved, float("inf"), problem.tokens, l2=l2_bytes(device), memory=0
    ).flush
    return TimingWorkload(problem, weights, inputs, expected, flush)


def _make_single_rank_problem(problem: Problem) -> Problem:
    """Return the problem with all experts on one rank."""
    if problem.parallel.world_size == 1:
        return problem
    single_rank = type(problem.parallel)()
    return replace(problem, parallel=single_rank, local_experts=None, expert_map=False)


def _draw_input(
    problem: Problem, kind: RoutingKind, device: torch.device, rank: int, index: int
) -> Input:
    generator = torch.Generator(device).manual_seed(problem.tokens * 4096 + rank * 16 + index)
    x_TH = torch.randn(
        problem.tokens, problem.hidden, dtype=torch.float32, device=device, generator=generator
    )
    return x_TH.to(problem.dtype), draw_routing(problem, kind, generator)


def _compute_expected_rows(problem: Problem, call_inputs: Input) -> ExpectedRows:
    """Compute the expected values of evenly spaced rows."""
    x_TH, routing = call_inputs
    device = x_TH.device
    rows = torch.linspace(
        0, len(x_TH) - 1, min(len(x_TH), _MAX_ROWS), dtype=torch.float32, device=device
    ).long()
    row_routing = routing.of(rows)
    ids = sorted(set(row_routing.topk_ids_TK.flatten().tolist()))
    single_rank = _make_single_rank_problem(problem)
    if single_rank.expert_map:  # only experts [0, e) are local, see make_weights
        ids = [i for i in ids if i < problem.e] or [0]
    expert_map = torch.full((problem.experts,), -1, dtype=torch.int32, device=device)
    expert_map[torch.tensor(ids, dtype=torch.int64, device=device)] = torch.arange(
        len(ids), dtype=torch.int32, device=device
    )
    row_problem = replace(single_rank, tokens=len(rows), expert_map=True, local_experts=len(ids))
    unquantized = replace(_draw_weights(problem, ids, device), expert_map=expert_map)
    exact = float64_reference(
        x_TH[rows], unquantized, row_routing, replace(row_problem, quant="none")
    )
    rounded = rounded_reference(
        x_TH[rows], quantize(unquantized, row_problem), row_routing, row_problem
    )
    return ExpectedRows(call_inputs, rows, exact, float((rounded - exact).norm()))
