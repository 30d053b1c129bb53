"""Minimum bytes and flops of the adapters' products, by rank and number of pairs.

Tokens are distributed evenly over the L slots. An expert with n pairs reads the matrices of

    L (1 - (1 - 1/L)^n)

slots, the expected number of distinct ones. Each of these has r H + R I values in A and N R + H R
in B, which are read once; matrices that experts share are read once per slot in use; u = A x and A
h can stay on chip. r is 2 R, or R if gate and up share one A, or without a gate. The flops are

    layer       2 P (N H + I H)
    adapters    2 P (r H + N R + R I + H R)

which is a fraction of R (1/H + 1/I), or R (2/(3 I) + 1/H) with a shared A.
"""

from dataclasses import dataclass
from math import prod

from modular_kernel.spec.problem import Problem


@dataclass(frozen=True)
class AdapterWork:
    """The work with one A, or one B, in a call: flops, and bytes of matrices."""

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: "AdapterWork") -> "AdapterWork":
        return AdapterWork(self.flops + other.flops, self.bytes + other.bytes)


NO_WORK = AdapterWork()
# Fields of ExpertWeights, without the prefix "lora_".
MATRICES = ("a13", "b13", "a2", "b2")


def adapter_bytes(problem: Problem) -> int:
    """Return the bytes of one slot of a rank's experts; 0 without adapters."""
    spec = problem.adapters
    if spec is None:
        return 0
    sizes = problem.e, problem.w1_rows, problem.hidden, problem.intermediate
    return spec.slot_numel(*sizes) * problem.dtype.itemsize


def adapter_work(problem: Problem, pairs: float, touched: float) -> dict[str, AdapterWork]:
    """Return the work with each of MATRICES. pairs: computed here. touched: experts with a pair."""
    spec = problem.adapters
    if spec is None or not pairs:
        return dict.fromkeys(MATRICES, NO_WORK)
    shapes = spec.shapes(1, problem.w1_rows, problem.hidden, problem.intermediate)
    matrices_read = touched * _distinct_slots(spec.adapters, pairs / touched)
    slots_in_use = _distinct_slots(spec.adapters, pairs / problem.top_k)
    work = {}
    for name in MATRICES:
        values = prod(shapes[f"lora_{name}"][2:])
        shared = spec.outer_shared and name in ("a13", "b2")
        bytes_read = values * (slots_in_use if shared else matrices_read) * problem.dtype.itemsize
        work[name] = AdapterWork(2.0 * pairs * values, bytes_read)
    return work


def total_adapter_work(problem: Problem, pairs: float, touched: float) -> AdapterWork:
    """Return the work with all matrices."""
    return sum(adapter_work(problem, pairs, touched).values(), NO_WORK)


def _distinct_slots(slots: int, draws: float) -> float:
    """Return the expected number of distinct slots in `draws` uniform draws."""
    return float(slots * (1.0 - (1.0 - 1.0 / slots) ** draws))
