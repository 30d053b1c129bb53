"""`Roundings`: which intermediate values an experts part rounds to the problem's dtype.

Tests compare a part with a reference that rounds only these values.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Roundings:
    """Whether a part rounds intermediate values to the problem's dtype.

    weights: round dequantized weights before the GEMMs.
    gate_up: round the results of GEMM 1, including the bias, before the activation. If False, they
        stay float32.
    rows: round the results of GEMM 2 before they are weighted and summed over top-k. If False, they
        stay float32.

    A part always rounds the output of the activation and the layer's output. It never rounds router
    weights, scales, or partial sums of GEMMs and of top-k, which are float32.
    """

    weights: bool = False
    gate_up: bool = False
    rows: bool = True
