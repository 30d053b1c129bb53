"""Minimum bytes and flops of the LoRA adapters in a call, for `roofline` and `stage_roofline`.

Each token uses one of L adapter slots, the positions of the layer's adapter pool. An adapter adds
B (A x) to each GEMM of an expert:

    GEMM 1    w1 x + B13 (A13 x)    A13 (r, H), B13 (N, R)
    GEMM 2    w2 h + B2 (A2 h)      A2 (R, I),  B2 (H, R)

R is the rank of the adapter. r is R if there is no gate or if the gate and up projections share one
A. Otherwise r is 2 R, and each projection uses its own R values of A13 x. N is the number of rows
of w1: 2 I with a gate, else I. With P routed (token, expert) pairs, the flops are

    layer       2 P (N H + I H)
    adapters    2 P (r H + N R + R I + H R)

so adapters add a fraction of R (1/H + 1/I), or of R (2/(3 I) + 1/H) if gate and up share one A.

Each matrix that is used is read once. Tokens are assumed to be distributed evenly over the slots.
The expected number of slots whose matrices an expert with n pairs uses is then

    L (1 - (1 - 1/L)^n)

A matrix that all experts share is read once for each slot in use. The products A x and A h can stay
on chip, so their bytes are not counted.
"""

from dataclasses import dataclass
from math import prod

from modular_kernel.spec.problem import Problem


@dataclass(frozen=True)
class AdapterWork:
    """Work of adapter matrices in a call: flops, and bytes read."""

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: "AdapterWork") -> "AdapterWork":
        return AdapterWork(self.flops + other.flops, self.bytes + other.bytes)


NO_WORK = AdapterWork()
# Fields of ExpertWeights, without the prefix "lora_".
MATRICES = ("a13", "b13", "a2", "b2")


def adapter_bytes(problem: Problem) -> int:
    """Return the bytes of the matrices of one adapter slot on one rank; 0 without adapters."""
    spec = problem.adapters
    if spec is None:
        return 0
    sizes = problem.e, problem.w1_rows, problem.hidden, problem.intermediate
    return spec.slot_numel(*sizes) * problem.dtype.itemsize


def adapter_work(problem: Problem, pairs: float, touched: float) -> dict[str, AdapterWork]:
    """Return the work of each of MATRICES.

    pairs: number of (token, expert) pairs on this rank.
    touched: number of experts with at least one pair.

    Names are those of the fields of ExpertWeights, such as "a13" for lora_a13.
    """
    spec = problem.adapters
    if spec is None or not pairs:
        return dict.fromkeys(MATRICES, NO_WORK)
    shapes = spec.shapes(1, problem.w1_rows, problem.hidden, problem.intermediate)
    matrices_read = touched * _estimate_distinct_slots(spec.adapters, pairs / touched)
    slots_in_use = _estimate_distinct_slots(spec.adapters, pairs / problem.top_k)
    work = {}
    for name in MATRICES:
        values = prod(shapes[f"lora_{name}"][2:])
        is_shared = spec.outer_shared and name in ("a13", "b2")
        num_read = slots_in_use if is_shared else matrices_read
        bytes_read = values * num_read * problem.dtype.itemsize
        work[name] = AdapterWork(2.0 * pairs * values, bytes_read)
    return work


def total_adapter_work(problem: Problem, pairs: float, touched: float) -> AdapterWork:
    """Return the sum of `adapter_work` over all matrices. The arguments are the same."""
    return sum(adapter_work(problem, pairs, touched).values(), NO_WORK)


def _estimate_distinct_slots(slots: int, draws: float) -> float:
    """Return the expected number of distinct slots in `draws` draws with replacement."""
    return float(slots * (1.0 - (1.0 - 1.0 / slots) ** draws))
