"""Tiles of the dequantised path: which problems it serves, and how many experts go at once.

Its products are the permuted path's, of weights that a launch has written as bf16 before.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import torch

from experts import tile_permuted
from experts.tile_shapes import DEQUANTISED, Device, Gemm, Tile, TilePair, Violation, gemms
from modular_kernel.types import Problem

LEAST_ROWS = 96  # mean rows of an expert from which the path pays
_MOST_BYTES = 1 << 30  # of dequantised weights at a time, unless one expert has more


@lru_cache(maxsize=1 << 10)
def plain(problem: Problem) -> Problem:
    """The same layer with unquantised weights."""
    return replace(problem, quant="none")


def serves(problem: Problem, device: Device) -> bool:
    """Whether the kernels of this path can compute `problem` on `device`.

    Weights alone are quantised. fp16 has too few exponents for every weight that a scale gives.
    """
    scheme = problem.scheme
    weights_alone = scheme.quantised and not scheme.quantises_activations
    if not weights_alone or problem.dtype is not torch.bfloat16:
        return False
    return tile_permuted.serves(plain(problem), device)


def violations(tile: Tile, gemm: Gemm, problem: Problem, device: Device) -> Iterator[Violation]:
    """Every reason not to launch `tile` for this GEMM of `problem` on this path."""
    unquantised = gemms(plain(problem))[gemm.index - 1]
    for violation in tile_permuted.violations(tile, unquantised, "plain", device):
        yield replace(
            violation, need=violation.need.replace("permuted path", f"{DEQUANTISED} path")
        )


def experts_at_once(problem: Problem) -> int:
    """How many experts' matrices are dequantised and multiplied before the next ones are."""
    largest = max(problem.w1_rows, problem.intermediate) * problem.hidden * problem.dtype.itemsize
    groups = -(-problem.e // max(1, _MOST_BYTES // largest))
    return -(-problem.e // groups)


def values_at_once(problem: Problem) -> int:
    """Elements of the buffer that holds `experts_at_once` matrices of either product."""
    return experts_at_once(problem) * max(problem.w1_rows, problem.intermediate) * problem.hidden


def default(problem: Problem) -> TilePair:
    """The tiles without a tuned file: the permuted path's for unquantised weights."""
    return replace(tile_permuted.default(plain(problem)), path=DEQUANTISED)
