"""Cases of TorchExperts and NaiveBatchedExperts in which matrix products depend on the CPU.

Inner dimensions are not multiples of 32, and rows of weights, activations and adapters are padded
with NaN.
"""

from dataclasses import replace
from itertools import cycle

import torch

from modular_kernel.spec.problem import Combine, Problem
from modular_kernel.testing import Case
from modular_kernel.testing.cases.inputs import LAYOUTS, InputVariation

TORCH = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
BATCHED = ("BatchedPrepareAndFinalize", "NaiveBatchedExperts")

# Two cases that have failed on a CPU with AMX. In the first, the infinity of a token changed
# another token. In the second, the NaN of an unused row changed the previous row.
REGRESSION_CASES = (
    Case(
        *TORCH,
        Problem(
            7, 160, 80, 1, 3, quant="fp8_w8a16_tensor", chunk_tokens=7, expert_map=True,
            activation="swiglu_oai:alpha=1.702,limit=1.0,interleaved=false",
            ids_dtype=torch.int64, lora="adapters=3,rank=7,a13=shared",
        ),
        "empty_experts", 1, InputVariation(values="inf_token"),
    ),
    Case(
        *BATCHED,
        Problem(
            33, 16, 136, 5, 16, quant="int8_w8a16_group:group=64", activation="gelu_tanh",
            ids_dtype=torch.int64, combine=Combine.TOPK_WEIGHTED,
            lora="adapters=8,rank=33,outer=shared",
        ),
        "uniform", 2, InputVariation(values="large", has_short_scales=True), interleaved_calls=True,
    ),
)  # fmt: skip

_BASE = Problem(tokens=33, hidden=72, intermediate=40, experts=3, top_k=2)
_QUANTS = (
    *("none", "int8_w8a16_group:group=64"),
    *("none", "fp8_w8a8_channel", "int4_w4a16_group:group=32"),
)
_LORAS = ("none", "adapters=3,rank=7,a13=shared", "adapters=2,rank=33")
_VALUES = ("ordinary", "nan_token", "inf_token")


def _make_varied_cases() -> tuple[Case, ...]:
    """Return a case for each pairing, layout and dtype, with alternating schemes and values."""
    quants, loras, values = cycle(_QUANTS), cycle(_LORAS), cycle(_VALUES)
    cases = []
    for pair in (TORCH, BATCHED):
        for layout in LAYOUTS:
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                problem = replace(_BASE, dtype=dtype, quant=next(quants), lora=next(loras))
                variation = InputVariation(layout, next(values))
                cases.append(Case(*pair, problem, variation=variation))
        next(values)
    return tuple(cases)


CASES = (*REGRESSION_CASES, *_make_varied_cases())
