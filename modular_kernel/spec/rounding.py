"""Declaration of where an experts part rounds, so that tests can detect any other rounding."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Roundings:
    """Whether a part rounds intermediate values to the problem's dtype.

    weights: dequantized weights, before the GEMMs. gate_up: results of GEMM 1 with bias, before
    the activation; otherwise they stay float32. rows: results of GEMM 2, before router weights and
    the sum over top-k; otherwise these use the float32 results.

    Always rounded: h, before it is quantized or multiplied, and the layer's output. Never rounded:
    router weights, scales, and partial sums of GEMMs and of top-k, which are float32.
    """

    weights: bool = False
    gate_up: bool = False
    rows: bool = True
