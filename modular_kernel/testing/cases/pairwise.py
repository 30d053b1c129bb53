"""Pairwise-covering cases of a pairing: every pair of values of two axes occurs in some case.

`draw_pairwise_cases` draws rows over `AXES` for a pairing on a machine. Rows that a rule refuses
are never drawn. If no valid row contains a pair of values, the pair is impossible and is reported
with the reason of the rule.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from operator import itemgetter
from typing import Any

import torch

from modular_kernel.catalog import load_catalog
from modular_kernel.compatibility.rules import judge
from modular_kernel.errors import ConfigurationError
from modular_kernel.quant.quantized_weights import weight_specs
from modular_kernel.spec.problem import (
    MAX_TOP_K,
    UNGATED,
    ActivationSpec,
    Combine,
    Machine,
    Parallel,
    Problem,
)
from modular_kernel.testing.cases.adapters import SLOT_PATTERNS
from modular_kernel.testing.cases.case import Case
from modular_kernel.testing.cases.covering import Axis, CoveringArray, Row, Space, covering_array
from modular_kernel.testing.cases.inputs import (
    LAYOUTS,
    ROUTING_KINDS,
    InputVariation,
    routes_any_pair,
)
from modular_kernel.testing.cases.quantized import SCHEMES, list_schemes
from modular_kernel.testing.cases.row_order import apply_part_row_order
from modular_kernel.testing.cases.value_kinds import (
    HANDPICKED_VALUES,
    VALUES,
    find_unsupported_reason,
)

_FP32, _FP16, _BF16 = torch.float32, torch.float16, torch.bfloat16

# Limits of about one standard deviation of the data, so that every clamp acts on many values.
_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "swiglu_oai": "swiglu_oai:alpha=1.702,limit=1.0",
    "swiglu_clamp_after": "swiglu_clamp_after:limit=0.5",
    "swiglu_clamp_before": "swiglu_clamp_before:limit=0.5",
    "relu2": "relu2",
    "gelu_clamped": "gelu:limit=0.5",
    "situ": "situ:alpha=1.5,limit=0.7",
    "silu_no_mul": "silu_no_mul",
    "gelu_no_mul": "gelu_no_mul",
}

# Values of `placement`: how many of the E experts are local, and whether there is an expert map.
_PLACEMENTS = ("all", "mapped", "half_mapped", "one_mapped")

# Values of `chunks`: the maximum number of tokens per chunk, as a function of the number of tokens.
_CHUNKS: dict[str, Callable[[int], int | None]] = {
    "none": lambda _tokens: None,
    "whole": lambda tokens: max(1, tokens),
    "one_more": lambda tokens: max(1, tokens - 1),  # the last chunk has one token
    "ragged": lambda tokens: max(1, -(-2 * tokens // 5)),  # three chunks, the last one shorter
}

# The default value of each axis comes first.
#
# hidden, intermediate: multiples and non-multiples of the schemes' blocks, of tiles, and of the
# width of loads.
#
# tokens: values around the lower thresholds at which parts change code paths or tile sizes. If one
# expert gets all tokens, this is also the number of rows of that expert.
#
# experts: values around the thresholds of the kernels that count and sort.
AXES = (
    Axis("quant", ("none", *SCHEMES)),
    Axis("numbers", ((_BF16, "ieee"), (_FP32, "ieee"), (_FP32, "tf32"), (_FP16, "ieee"))),
    Axis("activation", tuple(_ACTIVATIONS)),
    Axis("interleaved", (False, True)),
    Axis("bias", (False, True)),
    Axis("tokens", (7, 0, 1, 4, 5, 8, 9, 16, 17, 33, 65, 129), frozenset({0}), varies_cost=True),
    Axis("hidden", (48, 16, 17, 32, 33, 50, 64, 104, 128, 160), varies_cost=True),
    Axis("intermediate", (64, 24, 19, 32, 40, 47, 80, 128, 136), varies_cost=True),
    Axis("experts", (5, 1, 2, 17, 65, 300), varies_cost=True),
    Axis("top_k", (2, 1, 3, 8, 16, 17, 22, MAX_TOP_K), varies_cost=True),
    Axis("placement", _PLACEMENTS, varies_cost=True),
    Axis("routing", ROUTING_KINDS, frozenset({"all_skipped"})),
    Axis("ids", (None, torch.int32, torch.int64)),
    Axis("weight_on_input", (False, True)),
    Axis("scaling", (1.0, 2.5)),
    Axis("combine", (Combine.SUM, Combine.TOPK_WEIGHTED, Combine.TOPK_UNWEIGHTED)),
    Axis("inplace", (False, True)),
    Axis("chunks", tuple(_CHUNKS), varies_cost=True),
    Axis("layout", LAYOUTS),
    Axis("own_scales", (False, True)),
    Axis("values", tuple(values for values in VALUES if values not in HANDPICKED_VALUES)),
    Axis("by_turns", (False, True), varies_cost=True),
    Axis("batch_invariant", (False, True), varies_cost=True),
    Axis("seed", (0, 1, 2)),
)
# Axes for pairings that support adapters. They are separate, so that the rows of other pairings do
# not depend on them. The ranks of adapters are multiples and non-multiples of a block, and span
# more than one block. With three or more adapters, some slots are unused.
LORA_AXES = (
    Axis(
        "lora",
        (
            "none",
            "adapters=1,rank=16",
            "adapters=3,rank=7,a13=shared",
            "adapters=8,rank=33,outer=shared",
            "adapters=3,rank=80",
        ),
        varies_cost=True,
    ),
    Axis("named", SLOT_PATTERNS),
)
_ALL_AXES = (*AXES, *LORA_AXES)


@cache
def _list_all_axes() -> tuple[Axis, ...]:
    """Return AXES and LORA_AXES, with the schemes of other packages as values of `quant`."""
    values = ("none", *list_schemes())
    return tuple(replace(a, values=values) if a.name == "quant" else a for a in _ALL_AXES)


_ONE_RANK = Parallel()
_ALWAYS_ROUTED = ("uniform", "all_to_one", "zipf", "empty_experts", "duplicates")  # all ids valid


@cache
def _parse_activation(name: str, interleaved: bool) -> ActivationSpec:
    spec = _ACTIVATIONS[name]
    if spec in UNGATED:
        if interleaved:
            raise ConfigurationError("activation", got=f"{spec}, interleaved", need="gate and up")
    elif interleaved or name == "swiglu_oai":
        spec += f"{',' if ':' in spec else ':'}interleaved={str(interleaved).lower()}"
    return ActivationSpec.parse(spec)


def build_problem(row: dict[str, Any]) -> Problem:
    """Build the problem of a row, given as {axis: value}.

    Raises ConfigurationError if the values do not form a valid problem.
    """
    experts, tokens = row["experts"], row["tokens"]
    num_local = {"half_mapped": (experts + 1) // 2, "one_mapped": 1}
    dtype, precision = row["numbers"]
    return Problem(
        tokens=tokens,
        hidden=row["hidden"],
        intermediate=row["intermediate"],
        experts=experts,
        top_k=row["top_k"],
        dtype=dtype,
        quant=row["quant"],
        activation=_parse_activation(row["activation"], row["interleaved"]),
        local_experts=num_local.get(row["placement"]),
        ids_dtype=row["ids"],
        bias=row["bias"],
        expert_map=row["placement"] != "all",
        apply_router_weight_on_input=row["weight_on_input"],
        routed_scaling_factor=row["scaling"],
        combine=row["combine"],
        inplace=row["inplace"],
        fp32_precision=precision,
        chunk_tokens=_CHUNKS[row["chunks"]](tokens),
        batch_invariant=row["batch_invariant"],
        lora=row.get("lora", "none"),
        parallel=_ONE_RANK,
    )


def build_case(prepare_finalize: str, experts: str, row: dict[str, Any]) -> Case:
    """Build the case of a row, given as {axis: value}."""
    variation = InputVariation(
        row["layout"], row["values"], row["own_scales"], row.get("named", SLOT_PATTERNS[0])
    )
    return Case(
        prepare_finalize,
        experts,
        apply_part_row_order(build_problem(row), experts),
        row["routing"],
        row["seed"],
        variation,
        row["by_turns"],
    )


def _list_input_rejections(problem: Problem, row: dict[str, Any]) -> tuple[str, ...]:
    reasons = []
    if row["routing"] == "beyond_int32" and problem.ids_dtype is torch.int32:
        reasons.append("[routing] beyond_int32: int32 ids cannot hold these values")
    if row["own_scales"]:
        dtypes: tuple[torch.dtype, ...] = ()
        if problem.scheme.quantized:
            dtypes = weight_specs(problem)["w1_scale"].dtypes
        if problem.dtype is _FP32 or problem.dtype not in dtypes:
            reasons.append(f"[own_scales] {problem.quant}: scales have no such dtype")
    if problem.adapters is None and row.get("named", SLOT_PATTERNS[0]) != SLOT_PATTERNS[0]:
        reasons.append(f"[named] {row['named']}: there are no adapters")
    if (reason := find_unsupported_reason(problem, row["values"])) is not None:
        reasons.append(reason)
    return tuple(reasons)


# Axes that do not affect the problem. Rows that differ only in these axes share one check.
_INPUT_AXES = frozenset({"routing", "layout", "own_scales", "values", "by_turns", "seed", "named"})


def _make_problem_getter(axes: tuple[Axis, ...]) -> Callable[[Row], Row]:
    """Return a function that extracts the sub-row of the axes that determine the problem."""
    return itemgetter(*(i for i, axis in enumerate(axes) if axis.name not in _INPUT_AXES))


@lru_cache(maxsize=2**14)  # enough for one pairing; the next pairing reuses most entries
def _build_problem_from_subrow(subrow: Row) -> Problem | str:
    """Build a problem from its sub-row, or return the reason why the problem is invalid."""
    axes = (axis for axis in _list_all_axes() if axis.name not in _INPUT_AXES)
    named_values = zip(axes, subrow, strict=False)  # without LORA_AXES the subrow is shorter
    try:
        return build_problem({axis.name: axis.values[i] for axis, i in named_values})
    except ConfigurationError as error:
        return str(error)


def build_space(prepare_finalize: str, experts: str, machine: Machine) -> Space:
    """Build the space of rows over AXES whose rejections are those of a pairing on a machine.

    LORA_AXES are included if both parts support adapters.
    """
    catalog = load_catalog()
    prepare_part, experts_part = (
        catalog.prepare_finalize(prepare_finalize),
        catalog.experts(experts),
    )
    axes = _list_all_axes()
    if not (prepare_part.requires.lora and experts_part.requires.lora):
        axes = axes[: len(AXES)]
    get_problem_subrow = _make_problem_getter(axes)
    judged_problems: dict[Row, tuple[Problem | None, Sequence[str]]] = {}

    def judge_problem_subrow(subrow: Row) -> tuple[Problem | None, Sequence[str]]:
        problem_or_reason = _build_problem_from_subrow(subrow)
        if isinstance(problem_or_reason, str):
            return None, (problem_or_reason,)
        problem = apply_part_row_order(problem_or_reason, experts_part)
        return problem, tuple(
            map(str, judge(prepare_part, experts_part, problem, machine).rejections)
        )

    def list_rejections(row: Row) -> Sequence[str]:
        subrow = get_problem_subrow(row)
        if subrow not in judged_problems:
            judged_problems[subrow] = judge_problem_subrow(subrow)
        problem, reasons = judged_problems[subrow]
        if problem is None or reasons:
            return reasons
        return _list_input_rejections(problem, _name_values(row))

    return Space(axes, list_rejections, _computes_row, estimate_cost)


def _name_values(row: Row) -> dict[str, Any]:
    """Return a row as {axis: value}."""
    axes = _list_all_axes()[: len(row)]  # without LORA_AXES the row is shorter
    return {axis.name: axis.values[i] for axis, i in zip(axes, row, strict=True)}


_AXIS_INDEX = {axis.name: index for index, axis in enumerate(_ALL_AXES)}


def _make_subrow_getter(*names: str) -> Callable[[Sequence[int]], Row]:
    return itemgetter(*(_AXIS_INDEX[name] for name in names))


def _get_values(subrow: Row, *names: str) -> tuple[Any, ...]:
    """Return the values of the axes `names`, given their indices."""
    return tuple(AXES[_AXIS_INDEX[name]].values[i] for name, i in zip(names, subrow, strict=True))


# Axes that determine the routing, the number of blocks of rows, and the work per block.
_ROUTING_AXES = ("tokens", "experts", "top_k", "placement", "routing", "seed")
_BLOCK_AXES = ("tokens", "top_k", "experts", "placement", "chunks")
_WORK_AXES = ("numbers", "hidden", "intermediate", "by_turns", "batch_invariant")
_get_routing_subrow, _get_blocks_subrow = (
    _make_subrow_getter(*_ROUTING_AXES),
    _make_subrow_getter(*_BLOCK_AXES),
)
_get_work_subrow = _make_subrow_getter(*_WORK_AXES)


def _computes_row(row: Row) -> bool:
    """Return whether a valid row computes any (token, expert) pair."""
    return _computes_any_pair(_get_routing_subrow(row))


@cache
def _computes_any_pair(subrow: Row) -> bool:
    tokens, experts, top_k, placement, routing, seed = _get_values(subrow, *_ROUTING_AXES)
    if not tokens or routing == "all_skipped":
        return False
    if placement in ("all", "mapped") and routing in _ALWAYS_ROUTED:
        return True
    num_local = {"half_mapped": (experts + 1) // 2, "one_mapped": 1}.get(placement)
    mapped = placement != "all"
    # The drawn ids do not depend on the other fields of the problem.
    problem = Problem(tokens, 1, 1, experts, top_k, local_experts=num_local, expert_map=mapped)
    return routes_any_pair(problem, routing, 1000 * seed)


def estimate_cost(row: Sequence[int]) -> float:
    """Estimate the interpreter's time in seconds: blocks of rows times tiles of weights."""
    call_seconds, tile_seconds = _estimate_blocks(_get_blocks_subrow(row))
    calls, tiles = _estimate_work(_get_work_subrow(row))
    return calls * (call_seconds + tile_seconds * tiles)


@cache
def _estimate_blocks(subrow: Row) -> tuple[float, float]:
    """Return the fixed seconds of a call, and the additional seconds per tile of weights."""
    tokens, top_k, experts, placement, chunks = _get_values(subrow, *_BLOCK_AXES)
    num_local = {"one_mapped": 1, "half_mapped": (experts + 1) // 2}.get(placement, experts)
    pairs, chunk_count = tokens * top_k, {"ragged": 3, "one_more": 2}.get(chunks, 1)
    blocks = min(pairs, num_local) * (chunk_count + 1) / 2 + pairs / 16
    return 0.4 + 0.3 * chunk_count, 0.01 * blocks


@cache
def _estimate_work(subrow: Row) -> tuple[float, int]:
    """Return the number of calls, and the number of weight tiles in each call."""
    (dtype, _), hidden, intermediate, by_turns, batch_invariant = _get_values(subrow, *_WORK_AXES)
    tile_size = 32 if dtype is _FP32 or hidden % 16 or intermediate % 16 else 64
    tiles = int(2 * -(-hidden // tile_size) * -(-intermediate // tile_size))
    return float(1 + 0.3 * by_turns + 0.5 * batch_invariant), tiles


@cache
def draw_pairwise_cases(
    prepare_finalize: str, experts: str, machine: Machine
) -> tuple[CoveringArray, tuple[Case, ...]]:
    """Draw a pairing's covering array on a machine; return it with the case of each row."""
    array = covering_array(build_space(prepare_finalize, experts, machine))
    return array, tuple(
        build_case(prepare_finalize, experts, _name_values(row)) for row in array.rows
    )
