"""Minimum bytes and flops of the LoRA adapters of a call, for the roofline.

Tokens are assumed to be distributed evenly over the L adapter slots. An expert with n pairs then
reads the matrices of

    L (1 - (1 - 1/L)^n)

slots, the expected number of distinct ones. Per slot, the A matrices have r H + R I values and the
B matrices N R + H R. Each is read once; matrices that all experts share are read once per slot in
use. The products A x and A h can stay on chip and are not counted. R is the rank; r is 2 R, or R if
the gate and up projections share one A or if there is no gate. With P pairs, the flops are

    layer       2 P (N H + I H)
    adapters    2 P (r H + N R + R I + H R)

so adapters add a fraction of R (1/H + 1/I), or R (2/(3 I) + 1/H) with a shared A.
"""

from dataclasses import dataclass
from math import prod

from modular_kernel.spec.problem import Problem


@dataclass(frozen=True)
class AdapterWork:
    """Work of one adapter matrix in a call: flops, and bytes read."""

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: "AdapterWork") -> "AdapterWork":
        return AdapterWork(self.flops + other.flops, self.bytes + other.bytes)


NO_WORK = AdapterWork()
# Fields of ExpertWeights, without the prefix "lora_".
MATRICES = ("a13", "b13", "a2", "b2")


def adapter_bytes(problem: Problem) -> int:
    """Return the bytes of one adapter slot for all experts of a rank; 0 without adapters."""
    spec = problem.adapters
    if spec is None:
        return 0
    sizes = problem.e, problem.w1_rows, problem.hidden, problem.intermediate
    return spec.slot_numel(*sizes) * problem.dtype.itemsize


def adapter_work(problem: Problem, pairs: float, touched: float) -> dict[str, AdapterWork]:
    """Return the work of each of MATRICES.

    pairs: number of (token, expert) pairs on this rank. touched: number of experts with a pair.
    """
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
    """Return the work of all adapter matrices together. For the arguments, see `adapter_work`."""
    return sum(adapter_work(problem, pairs, touched).values(), NO_WORK)


def _distinct_slots(slots: int, draws: float) -> float:
    """Return the expected number of distinct slots in `draws` uniform draws."""
    return float(slots * (1.0 - (1.0 - 1.0 / slots) ** draws))
