"""What adapters cost: the least bytes and flops of their products, by rank and pairs.

Tokens name the L slots evenly. An expert with n pairs reads the matrices of
L (1 - (1 - 1/L)^n) of them: as many as n such draws meet. A (r H + R I) and B (N R + H R) values of
each are read once, where experts share one once for each slot that is met at all; u = A x and A h
need not leave the chip. r is 2 R, or R where gate and up have one A, or without a gate. Beside the
layer's 2 P (N H + I H) the products have 2 P (r H + N R + R I + H R) flops: R (1/H + 1/I) of them,
or R (2/(3 I) + 1/H) with one A.
"""

from dataclasses import dataclass
from math import prod

from modular_kernel.spec.problem import Problem


@dataclass(frozen=True)
class AdapterWork:
    """Of one product's A, or B, over a call: flops, and bytes of matrices."""

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: "AdapterWork") -> "AdapterWork":
        return AdapterWork(self.flops + other.flops, self.bytes + other.bytes)


NO_WORK = AdapterWork()
# Of ExpertWeights, without the word before it.
MATRICES = ("a13", "b13", "a2", "b2")


def adapter_bytes(problem: Problem) -> int:
    """Return the bytes of one slot of a rank's experts; 0 without adapters."""
    spec = problem.adapters
    if spec is None:
        return 0
    sizes = problem.e, problem.w1_rows, problem.hidden, problem.intermediate
    return spec.slot_numbers(*sizes) * problem.dtype.itemsize


def adapter_work(problem: Problem, pairs: float, touched: float) -> dict[str, AdapterWork]:
    """Return the work of each of MATRICES. pairs: of the call here. touched: experts with one."""
    spec = problem.adapters
    if spec is None or not pairs:
        return dict.fromkeys(MATRICES, NO_WORK)
    shapes = spec.shapes(1, problem.w1_rows, problem.hidden, problem.intermediate)
    by_expert = touched * _met(spec.adapters, pairs / touched)
    once = _met(spec.adapters, pairs / problem.top_k)
    found = {}
    for name in MATRICES:
        numbers = prod(shapes[f"lora_{name}"][2:])
        shared = spec.outer_shared and name in ("a13", "b2")
        read = numbers * (once if shared else by_expert) * problem.dtype.itemsize
        found[name] = AdapterWork(2.0 * pairs * numbers, read)
    return found


def whole_work(problem: Problem, pairs: float, touched: float) -> AdapterWork:
    """Return the work of all of them."""
    return sum(adapter_work(problem, pairs, touched).values(), NO_WORK)


def _met(slots: int, draws: float) -> float:
    """Return how many of as many slots that many even draws meet, on average."""
    return float(slots * (1.0 - (1.0 - 1.0 / slots) ** draws))
