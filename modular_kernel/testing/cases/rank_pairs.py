"""Pairwise-covering rows for cases with several ranks.

Every possible pair of values of two axes occurs in some row. The rows are drawn once per number of
ranks, for the least restrictive parts. The module `ranks` turns them into cases, and
replaces a row that a part refuses with the nearest supported case, if there is one.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from modular_kernel.catalog import check, this_machine
from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.problem import Parallel, Problem
from modular_kernel.testing.cases.adapters import SLOT_PATTERNS
from modular_kernel.testing.cases.covering import Axis, CoveringArray, Row, Space, covering_array
from modular_kernel.testing.cases.inputs import InputVariation
from modular_kernel.testing.cases.value_kinds import find_unsupported_reason

_FP32, _FP16, _BF16 = torch.float32, torch.float16, torch.bfloat16
_OAI = "swiglu_oai:alpha=1.702,limit=1.0,interleaved=true"
_LEAST_RESTRICTIVE_PARTS = "TorchAll2AllPrepareAndFinalize", "TorchExperts"

# Numbers of tokens per rank, repeated cyclically; some ranks have none or one.
_TOKEN_COUNTS = ((7, 4, 0, 5), (0, 5), (5, 0), (0, 0, 0, 7), (1, 0), (17, 3))
_ROUTING_KINDS = (
    "uniform",
    "skips",
    "duplicates",
    "out_of_range",
    "beyond_int32",
    "all_to_one",
)
_SCHEMES = (
    "none",
    "fp8_w8a8_tensor",
    "fp8_w8a8_block:block=32x32",
    "int8_w8a8_channel",
    "int4_w4a16_group:group=32,zero_points=true",
    "nvfp4_w4a16",
)
RANK_AXES = (
    Axis("placement", ("linear", "round_robin", "copies")),
    Axis("tokens", _TOKEN_COUNTS),
    Axis("routing", _ROUTING_KINDS),
    Axis("quant", _SCHEMES),
    Axis("dtype", (_BF16, _FP32, _FP16)),
    Axis("lora", ("none", "adapters=3,rank=7", "adapters=4,rank=20,a13=shared,outer=shared")),
    Axis("slot_pattern", SLOT_PATTERNS),
    Axis("values", ("ordinary", "zero_rows", "signed", "ties")),
    Axis("bias", (False, True)),
    Axis("top_k", (2, 1, 3, 22)),
    Axis("activation", ("silu", _OAI, "relu2")),
    Axis("ids", (None, torch.int32, torch.int64)),
    Axis("scaling", (1.0, 2.5)),
    Axis("weight_on_input", (False, True)),
    Axis("inplace", (False, True)),
    Axis("checked", (True, False)),
)


def name_values(row: Row) -> dict[str, Any]:
    """Return a row as {axis: value}."""
    return {axis.name: axis.values[i] for axis, i in zip(RANK_AXES, row, strict=True)}


def build_problem(row: Row, world_size: int) -> Problem:
    """Build the problem of a row, without `parallel`.

    Raises ConfigurationError if the problem is invalid.
    """
    values = name_values(row)
    return Problem(
        tokens=max(values["tokens"]),
        hidden=64,
        intermediate=96,
        experts=2 * world_size + 1,
        top_k=values["top_k"],
        dtype=values["dtype"],
        quant=values["quant"],
        activation=values["activation"],
        ids_dtype=values["ids"],
        bias=values["bias"],
        apply_router_weight_on_input=values["weight_on_input"],
        routed_scaling_factor=values["scaling"],
        inplace=values["inplace"],
        lora=values["lora"],
    )


def build_variation(row: Row) -> InputVariation:
    """Build the input variation of a row."""
    values = name_values(row)
    return InputVariation(values=values["values"], slot_pattern=values["slot_pattern"])


@cache
def draw_rank_array(world_size: int) -> CoveringArray:
    """Draw a covering array over RANK_AXES for the least restrictive parts."""
    machine = this_machine(device="cpu")

    @cache
    def list_problem_rejections(problem: Problem) -> tuple[str, ...]:
        rank_problem = replace(problem, parallel=Parallel(world_size))
        return tuple(map(str, check(*_LEAST_RESTRICTIVE_PARTS, rank_problem, machine).rejections))

    def list_rejections(row: Row) -> tuple[str, ...]:
        values = name_values(row)
        try:
            problem = build_problem(row, world_size)
        except ConfigurationError as error:
            return (str(error),)
        if reasons := list_problem_rejections(problem):
            return reasons
        if values["routing"] == "beyond_int32" and values["ids"] is torch.int32:
            return ("[routing] beyond_int32: int32 ids cannot hold these values",)
        if problem.adapters is None and values["slot_pattern"] != SLOT_PATTERNS[0]:
            return ("[slot_pattern]: there are no adapters",)
        reason = find_unsupported_reason(problem, values["values"])
        return () if reason is None else (reason,)

    return covering_array(Space(RANK_AXES, list_rejections, lambda _row: True, lambda _row: 1.0))
