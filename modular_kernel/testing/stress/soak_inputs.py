"""Draw the input sets of a soak test (`soak`), and check the output of a call.

Every rank draws the tokens and routing of all ranks from the same random numbers, and uses its own
slice of them. It can thus compute the expected output without communication.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from modular_kernel.reference import float64_reference
from modular_kernel.spec.problem import Parallel, Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.cases.inputs import FencedCopier, Inputs, make_inputs
from modular_kernel.testing.cases.rank_inputs import inputs_of_rank
from modular_kernel.testing.verify.over_ranks import compute_rounded_reference

_CPU = torch.device("cpu")
_SKEWS = (0.0, 0.5, 1.2, 4.0)  # expert probabilities are proportional to n ** -skew, n = 1, 2, ...
_IDLE_PROBABILITY = 0.15  # probability that a rank has no tokens
_SKIP_PROBABILITY = 0.05  # probability that a token skips one of its experts
ERROR_FACTOR = 2.0  # largest allowed error of a call, as a multiple of the error of plain torch
# Bound of the error of a row, relative to the typical row error of plain torch. The bound is large,
# because thousands of rows are compared and some of them have a large error.
ROW_ERROR_FACTOR = 8.0
_EPS = 1e-6


@dataclass
class SoakInputs:
    """The inputs of one call.

    Attributes:
        tokens_W: number of tokens of each rank.
        global_inputs: the tokens of all ranks and the weights of all experts, on the CPU.
        local_tokens: the slice of this rank's tokens.
        x_TH, routing: the tokens and the routing of this rank, on its device.
        replay: replays a captured call, which writes `out`; None if no call was captured.
        out: the output tensor of the captured call.
    """

    tokens_W: tuple[int, ...]
    global_inputs: Inputs
    local_tokens: slice
    x_TH: torch.Tensor
    routing: Routing
    replay: Callable[[], object] | None = None
    out: torch.Tensor | None = None

    def refill(self, new: "SoakInputs") -> None:
        """Copy the values of another input set with the same sizes into these tensors."""
        self.global_inputs = new.global_inputs
        self.x_TH.copy_(new.x_TH)
        self.routing.topk_weights_TK.copy_(new.routing.topk_weights_TK)
        self.routing.topk_ids_TK.copy_(new.routing.topk_ids_TK)


class SoakInputSource:
    """Draws input sets for one rank.

    problem: the problem of the rank.
    rng: random numbers; it must have the same state on all ranks.
    replicated: whether all ranks pass the same tokens.
    ids_dtype: dtype of topk_ids.
    """

    def __init__(
        self,
        problem: Problem,
        device: torch.device,
        rng: random.Random,
        *,
        replicated: bool,
        ids_dtype: torch.dtype,
    ) -> None:
        self.problem, self.device, self.rng = problem, device, rng
        self._replicated, self._ids_dtype = replicated, ids_dtype
        global_problem = replace(problem, parallel=Parallel(), graph=False, tokens=1)
        all_inputs = make_inputs(global_problem, "uniform", _CPU)
        self._all_weights = all_inputs.weights
        # All calls use the same weights, because plans and graphs bind their addresses.
        self.weights: ExpertWeights = inputs_of_rank(
            all_inputs, slice(0), problem, FencedCopier(device), strided=False
        ).weights

    def draw_inputs(self, tokens_W: tuple[int, ...] | None = None) -> SoakInputs:
        """Draw a new input set.

        tokens_W: number of tokens of each rank; None means to draw this as well.
        """
        parallel, rng = self.problem.parallel, self.rng
        if tokens_W is None:
            max_tokens = self.problem.tokens
            counts = [rng.randint(1, max_tokens) for _ in range(parallel.world_size)]
            counts = [0 if rng.random() < _IDLE_PROBABILITY else count for count in counts]
            tokens_W = (counts[0],) * len(counts) if self._replicated else tuple(counts)
        num_tokens = tokens_W[0] if self._replicated else sum(tokens_W)
        start = 0 if self._replicated else sum(tokens_W[: parallel.rank])
        local_tokens = slice(start, start + tokens_W[parallel.rank])
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        routing = self._draw_routing(num_tokens, _SKEWS[rng.randrange(len(_SKEWS))], generator)
        x_TH = torch.randn(num_tokens, self.problem.hidden, generator=generator)
        x_TH = x_TH.to(self.problem.dtype)
        local_routing = Routing(
            routing.topk_weights_TK[local_tokens].to(self.device, copy=True),
            routing.topk_ids_TK[local_tokens].to(self.device, copy=True),
        )
        global_inputs = Inputs(x_TH, self._all_weights, routing)
        return SoakInputs(
            tokens_W,
            global_inputs,
            local_tokens,
            x_TH[local_tokens].to(self.device, copy=True),
            local_routing,
        )

    def _draw_routing(self, tokens: int, skew: float, generator: torch.Generator) -> Routing:
        experts, top_k = self.problem.experts, self.problem.top_k
        probabilities = torch.arange(1, experts + 1).float() ** -skew
        probabilities = probabilities[torch.randperm(experts, generator=generator)]
        ids = torch.empty(0, top_k, dtype=torch.int64)
        if tokens:
            ids = torch.multinomial(probabilities.expand(tokens, -1), top_k, generator=generator)
        ids[torch.rand(ids.shape, generator=generator) < _SKIP_PROBABILITY] = -1
        weights = torch.rand(ids.shape, generator=generator) + 0.1
        return Routing(weights, ids.to(self._ids_dtype))


def compare_with_float64_reference(
    inputs: SoakInputs, out: torch.Tensor, problem: Problem
) -> tuple[float, str]:
    """Compare this rank's output, (T, H), with the float64 reference. Synchronizes the device.

    Returns (error relative to its bound, message). The message is "" if the output is correct. The
    bound depends on the error of plain torch for the tokens of all ranks.
    """
    global_inputs, tokens = inputs.global_inputs, len(inputs.global_inputs.x_TH)
    if not tokens:
        return 0.0, ""
    global_problem = replace(problem, parallel=Parallel(), graph=False).with_tokens(tokens)
    global_exact = float64_reference(
        global_inputs.x_TH, global_inputs.weights, global_inputs.routing, global_problem
    ).double()
    rounding_error_T = (compute_rounded_reference(global_inputs, problem) - global_exact).norm(
        dim=1
    )
    output, exact = out.cpu().double(), global_exact[inputs.local_tokens]
    local_rounding_error = rounding_error_T[inputs.local_tokens]
    if output.shape != exact.shape or not bool(output.isfinite().all()):
        return float("inf"), f"shape {tuple(output.shape)}, or values that are not finite"
    row_errors = (output - exact).norm(dim=1)
    relative_error = float(rounding_error_T.norm() / (global_exact.norm() + _EPS))
    rounding_error = max(float(local_rounding_error.norm()), relative_error * float(exact.norm()))
    bound = ERROR_FACTOR * rounding_error + _EPS
    error_ratio = float(row_errors.norm()) / bound
    row_norms = exact.norm(dim=1)
    is_wrong_row = row_errors > ROW_ERROR_FACTOR * (
        relative_error * torch.maximum(row_norms, row_norms.mean()) + _EPS
    )
    if error_ratio > 1 or bool(is_wrong_row.any()):
        message = (
            f"the error of the output is {error_ratio:.2f} times its bound, and "
            f"{int(is_wrong_row.sum())} rows have an error above the bound of a row"
        )
        return error_ratio, message
    return error_ratio, ""
