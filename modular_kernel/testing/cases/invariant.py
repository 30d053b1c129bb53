"""Cases of batch invariance: every scheme that supports it, and options that reorder rows.

The experts get so many rows, and K is so large in the GEMMs, that the output bits change if a part
selects tiles or the order of a sum by the number of tokens.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from modular_kernel.spec.problem import Combine, Problem

Variant = tuple[Problem, str]  # the second value is the kind of routing

_SCHEMES = (
    "none",
    "fp8_w8a8_tensor:static=true",
    "fp8_w8a8_channel",
    "fp8_w8a8_block:block=48x64",
    "fp8_w8a16_channel",
    "int8_w8a8_channel",
    "int8_w8a16_group:group=64",
    "int4_w4a16_group:group=64",
    "int4_w4a16_act_order:group=64",
    "mxfp4_w4a16",
    "nvfp4_w4a16",
)


def list_batch_invariant_variants(base: Problem) -> Iterator[Variant]:
    """Yield variants with each scheme in bf16, with float32, and with options that move rows."""
    wide = replace(
        base,
        tokens=34,
        hidden=160,
        intermediate=96,
        experts=2,
        top_k=1,
        dtype=torch.bfloat16,
        batch_invariant=True,
    )

    def make_variant(routing: str = "uniform", **changes: Any) -> Variant:
        return replace(wide, **changes), routing

    for quant in _SCHEMES:
        yield make_variant(quant=quant)
    yield make_variant(dtype=torch.float32)
    yield make_variant("skips", combine=Combine.TOPK_WEIGHTED, bias=True)
    yield make_variant("zipf", top_k=2, chunk_tokens=8, dtype=torch.float16)
    yield make_variant("duplicates", top_k=2, apply_router_weight_on_input=True)
    yield make_variant("out_of_range", expert_map=True, local_experts=1, inplace=True)
