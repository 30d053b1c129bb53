"""Declaration of where an experts part rounds, so that tests can detect any other rounding."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Roundings:
    """Points between x and the output rows where a part rounds to the problem's dtype.

    weights: dequantized weights, before the GEMMs. gate_up: results of GEMM 1 with bias, before
    the activation; otherwise they stay float32. rows: each pair's row, before router weights and
    sums; otherwise sums over top-k use the float32 GEMM results.

    Always rounded: h, before it is quantized or multiplied, and the layer's output. Never rounded:
    router weights, scales, and partial sums of GEMMs and of top-k, which are float32.
    """

    weights: bool = False
    gate_up: bool = False
    rows: bool = True
