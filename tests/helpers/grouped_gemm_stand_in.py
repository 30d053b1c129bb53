"""A torch stand-in for grouped GEMM kernels that multiplies tile by tile."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from experts.triton.configs.select import on_device
from experts.triton.grouped.base import GemmRows
from experts.triton.grouped_w4.bitwise_reference import untile_weights
from experts.triton.grouped_w4.grouped_w4_path import GroupedW4Path
from experts.triton.grouped_w4.layout import TiledWeights, choose_packed_format, list_tile_rows
from experts.triton.launch_config import Device, LaunchConfig
from experts.triton.operands import GemmOperands
from modular_kernel.ops.activation import activation_constants
from modular_kernel.ops.sort import SortedPairs
from modular_kernel.reference import activation
from modular_kernel.testing.cases.lists import BASE

H200 = Device("NVIDIA H200", tma=True)
OAI = "swiglu_oai:alpha=1.702,limit=1.2,interleaved=true"
MXFP4 = replace(
    BASE, tokens=19, hidden=160, intermediate=96, dtype=torch.bfloat16, quant="mxfp4_w4a16"
)


def make_gemm_fixture(path: type, multiply: Callable[..., None]) -> Any:
    """Return a fixture that simulates an H200 and replaces `path.multiply` in a module's tests."""

    @pytest.fixture(name="_h200_products", autouse=True)
    def h200_products(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(path, "multiply", multiply)
        with on_device(H200):
            yield

    return h200_products


def multiply_tiles(
    rows: GemmRows,
    weight_of: Callable[[int], torch.Tensor],
    bias: torch.Tensor | None,
    spec: Any,
    tile: LaunchConfig,
    order: SortedPairs,
    out: torch.Tensor,
) -> None:
    """Multiply rows by weight_of(expert), (N, K), in float32; add the bias; apply the activation.

    spec: the activation, or None.
    """
    max_tiles = order.max_tiles
    for i in range(int(order.tiles[-1])):
        expert, first, end = (int(order.tiles[j * max_tiles + i]) for j in range(3))
        rows_of_tile = slice(first, min(first + tile.block_m, end))
        a = (
            rows.values[rows_of_tile]
            if rows.tokens is None
            else rows.values[rows.tokens[rows_of_tile].long()]
        )
        value = a.float() @ weight_of(expert).float().T
        if bias is not None:
            value = value + bias[expert].float()
        out[rows_of_tile] = (value if spec is None else activation(value, spec)).to(out.dtype)


def multiply_w4(
    self: GroupedW4Path,
    rows: GemmRows,
    product: GemmOperands,
    tile: LaunchConfig,
    order: SortedPairs,
    out: torch.Tensor,
) -> None:
    """Multiply by the tiled weights that the kernel would unpack in registers."""
    assert rows.tokens is None
    assert product.scale is not None
    assert product.tiles is not None
    assert product.tile_scales is not None
    gated, depth = bool(product.constants["GATED"]), rows.values.shape[1]
    packed_format = choose_packed_format(product.scheme, depth, product.scale.dtype)
    tiled = TiledWeights(product.tiles, product.tile_scales)
    source_rows = list_tile_rows(
        product.size_n, product.gate_stride, product.up_row_offset, gated=gated
    ).flatten()
    valid_rows = (source_rows >= 0).nonzero()[:, 0]
    spec = None if product.constants["ACTIVATION"] == "identity" else self.problem.act
    assert (
        spec is None or activation_constants(spec)["ACTIVATION"] == product.constants["ACTIVATION"]
    )

    def weight_of(expert: int) -> torch.Tensor:
        expert_tiles = TiledWeights(*(part[expert : expert + 1] for part in tiled))
        w = torch.empty(len(valid_rows), depth)
        w[source_rows[valid_rows]] = untile_weights(expert_tiles, packed_format)[
            0, valid_rows, :depth
        ]
        if product.global_scale is not None:
            matrix = (
                torch.arange(len(w))
                // max(1, product.up_row_offset)
                % product.global_scale.shape[1]
            )
            w *= product.global_scale[expert, matrix][:, None]
        return w

    multiply_tiles(rows, weight_of, product.bias, spec, tile, order, out)
