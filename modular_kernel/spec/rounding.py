"""What an experts part says of its arithmetic, so that one rounding more can be told from it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Roundings:
    """Where a part rounds to the problem's dtype on the way from x to its rows.

    weights: dequantized weights, before they are multiplied. gate_up: GEMM 1's results, with
    their bias, before the activation; otherwise they stay float32. rows: each pair's row, before
    router weights and sums; otherwise sums over top-k start from float32 products.

    Always rounded are h, before it is quantized or multiplied, and what the layer returns. Never
    rounded are router weights, scales, partial sums of products and of top-k: those are float32.
    """

    weights: bool = False
    gate_up: bool = False
    rows: bool = True
