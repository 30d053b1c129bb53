"""What the contiguous and the batched Triton experts bind for their two products."""

from dataclasses import dataclass

import torch

from experts.tiles import Tile
from modular_kernel.ops.activation import activation_constants, up_rows
from modular_kernel.tensors import ExpertWeights
from modular_kernel.types import Problem


@dataclass(frozen=True)
class Product:
    """One of the two products: its weights, bias, output width and activation.

    w: (e, rows, depth), any strides. columns: output values per row. step, up_row: column n uses
    weight row n * step, and n * step + up_row for its up value.
    """

    w: torch.Tensor
    bias: torch.Tensor | None
    columns: int
    step: int
    up_row: int
    constants: dict[str, object]

    @property
    def depth(self) -> int:
        return self.w.shape[2]

    def arguments(self, tile: Tile, precision: str) -> dict[str, object]:
        """Kernel arguments that do not depend on how rows are found."""
        bias = self.w if self.bias is None else self.bias
        return {
            "b_ptr": self.w,
            "bias_ptr": bias,
            "columns": self.columns,
            "depth": self.depth,
            "up_row": self.up_row,
            "up_offset": self.up_row * self.w.stride(1),  # 64-bit in Python, whatever its size
            "stride_be": self.w.stride(0),
            "stride_bn": self.w.stride(1),
            "stride_bk": self.w.stride(2),
            "stride_bias": 0 if self.bias is None else self.bias.stride(0),
            "ROW_STEP": self.step,
            "HAS_BIAS": self.bias is not None,
            "EVEN_K": self.depth % tile.block_k == 0,
            "PRECISION": precision,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "GROUP_M": tile.group_m,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            **self.constants,
        }


def first_product(weights: ExpertWeights, problem: Problem) -> Product:
    """x W1^T with the activation behind it: H in, I out."""
    spec = problem.act
    step, up_row = up_rows(spec, problem.intermediate)
    constants = {**activation_constants(spec), "GATED": spec.gated}
    return Product(weights.w1, weights.b1, problem.intermediate, step, up_row, constants)


def second_product(weights: ExpertWeights, problem: Problem) -> Product:
    """h W2^T: I in, H out, no activation."""
    constants: dict[str, object] = {
        "KIND": "identity",
        "ALPHA": 0.0,
        "LIMIT": 0.0,
        "GATED": False,
    }
    return Product(weights.w2, weights.b2, problem.hidden, 1, 0, constants)
