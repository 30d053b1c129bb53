"""Fuzz targets: unusual counts, special float values, placements with copies, and torch.compile.

A placement maps experts to slots of ranks, possibly with several copies of an expert.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from modular_kernel.spec.lora import AdapterSpec
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.problem import Parallel, Problem
from modular_kernel.testing.stress.fuzz import samples
from modular_kernel.testing.stress.fuzz.calls import CallCase, build_call, call_cases
from modular_kernel.testing.stress.fuzz.independent_reference import IndependentReference
from modular_kernel.testing.stress.fuzz.junk import shorten
from modular_kernel.testing.stress.fuzz.outcome import (
    CORRECT,
    INVALID_ACCEPTED,
    TYPED_ERROR,
    WRONG_RESULT,
    FuzzOutcome,
    run_or_classify,
)
from modular_kernel.testing.stress.fuzz.samples import PROBLEM, E, H, I, K
from modular_kernel.testing.stress.fuzz.target import Target, import_object, seeds

# ------------------------------------------------------------------------------------------ counts


class _IndexOnly:
    """An object that defines only `__index__`."""

    def __index__(self) -> int:
        return 2


_counts = st.one_of(
    st.integers(-3, 9),
    st.sampled_from((2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63))),
    st.sampled_from((True, False, 2.0, 2.5, math.nan, math.inf, 1e30, -0.0, Fraction(2), 2 + 0j)),
    st.sampled_from((
        np.int8(2), np.int64(2), np.uint64(2**63), np.float32(2), np.bool_(True), np.array(2),
        np.array([2]), torch.tensor(2), torch.tensor([2]), torch.tensor(2.0), torch.tensor(True),
        "2", b"2", None, _IndexOnly(), (2,), [2], range(2),
    )),
)  # fmt: skip


def _make_count_function(
    path: str, names: tuple[str, ...], **fixed: Any
) -> tuple[Any, tuple[str, ...]]:
    return (lambda **arguments: import_object(path)(**(fixed | arguments))), names


_SIZES = {"num_experts": E, "hidden_size": H, "intermediate_size": I, "top_k": K}
# Maps a name to a function and the names of its arguments that are counts.
_COUNT_FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "Problem": (
        lambda **arguments: replace(PROBLEM, **arguments),
        ("tokens", "hidden", "intermediate", "experts", "top_k", "local_experts", "chunk_tokens",
         "max_received"),
    ),
    "with_tokens": (PROBLEM.with_tokens, ("tokens",)),
    "Parallel": (Parallel, ("world_size", "rank", "ranks_per_host")),
    "AdapterSpec": (lambda **sizes: AdapterSpec(**({"adapters": 2, "rank": 2} | sizes)),
                    ("adapters", "rank")),
    "Placement.linear": (
        lambda **sizes: Placement.linear(**({"experts": 4, "world_size": 2} | sizes)),
        ("experts", "world_size")),
    "Placement.round_robin": (
        lambda **sizes: Placement.round_robin(**({"experts": 4, "world_size": 2} | sizes)),
        ("experts", "world_size")),
    "expert_map": (Placement.linear(4, 2).expert_map, ("rank",)),
    "workspace_specs": (samples.make_torch_kernel().workspace_specs, ("tokens",)),
    "reserve_workspace": (samples.make_torch_kernel().reserve_workspace, ("tokens",)),
    "FusedMoE": _make_count_function("modular_kernel.layers.fused_moe:FusedMoE",
                             (*_SIZES, "layer_id", "max_tokens", "chunk_tokens"), **_SIZES),
    "warm_up": (lambda tokens: samples.make_loaded_layer().warm_up(tokens), ("tokens",)),
    "local_expert": (lambda expert_id: samples.make_fused_moe().local_expert(expert_id),
                     ("expert_id",)),
    "RouterSpec": _make_count_function("modular_kernel.spec.router:RouterSpec",
                               ("top_k", "groups", "topk_groups", "zero_experts"), top_k=2),
    "columns": (lambda experts: samples.make_router_spec().columns(experts), ("experts",)),
    "Router": _make_count_function("modular_kernel.layers.router:Router",
                           ("hidden_size", "num_experts", "vocabulary"),
                           spec=samples.make_router_spec(), hidden_size=H, num_experts=E),
    "Share": _make_count_function("modular_kernel.layers.rank_share:Share",
                          ("experts", "hidden", "intermediate"), experts=E, hidden=H,
                          intermediate=I),
    "moe_align_block_size": _make_count_function(
        "modular_kernel.ops.align:moe_align_block_size", ("block_size", "num_experts"),
        topk_ids_TK=torch.zeros(3, 2, dtype=torch.int32), block_size=16, num_experts=E),
}  # fmt: skip
_MAY_ALLOCATE = ("FusedMoE", "Router", "warm_up", "reserve_workspace", "moe_align_block_size")


def check_count_arguments(case: tuple[str, dict[int, Any]]) -> FuzzOutcome:
    """Pass unusual numbers as counts. Only integers may be accepted, and errors must be typed."""
    name, values = case
    function, names = _COUNT_FUNCTIONS[name]
    arguments = {names[index % len(names)]: value for index, value in values.items()}
    description = (
        f"{name}({', '.join(f'{n}={shorten(v)} {type(v).__name__}' for n, v in arguments.items())})"
    )
    is_huge = any(isinstance(v, int | np.integer) and int(v) > 2**12 for v in arguments.values())
    if is_huge and name in _MAY_ALLOCATE:
        return FuzzOutcome(TYPED_ERROR, description)  # not called, because it might use all memory
    result = run_or_classify(description, lambda: function(**arguments))
    if isinstance(result, FuzzOutcome):
        return result
    for number in arguments.values():
        if isinstance(number, float | str | bytes | complex | list | tuple | Fraction | np.ndarray):
            return FuzzOutcome(INVALID_ACCEPTED, description)
    return FuzzOutcome(CORRECT, description)


# ---------------------------------------------------------------------------------- special values

_VALUES = (0.0, -0.0, 1e-45, -1e-40, 1e-30, 1e4, -1e4, 3e4, 1.0, 2.0**-24, 6e-8, -6e-5)


@dataclass(frozen=True)
class SpecialCase:
    """A call with special values in x.

    values: (index, value) pairs that are written into x.
    scale: factor of x.
    weights_scale: factor of the router weights.
    """

    call: CallCase
    values: list[tuple[int, float]]
    scale: float
    weights_scale: float


def check_special_values(case: SpecialCase) -> FuzzOutcome:
    """Call with denormal, tiny, huge and signed zero values. The output must match float64."""
    call_or_outcome = build_call(case.call)
    if isinstance(call_or_outcome, FuzzOutcome):
        return call_or_outcome
    kernel, description, inputs = call_or_outcome
    problem: Problem = kernel.problem
    # Values beyond the range of a static scale saturate. In float16, the product of gate and up may
    # overflow even if the output does not.
    is_static = problem.scheme.static
    limit = 1.0 if is_static else {torch.float16: 100.0}.get(problem.dtype, math.inf)
    x_TH = (inputs.x_TH.double() * (1.0 if is_static else case.scale)).to(problem.dtype)
    for index, value in case.values:
        if x_TH.numel() and abs(value) <= limit:
            x_TH[torch.unravel_index(torch.tensor(index % x_TH.numel()), x_TH.shape)] = value
    saturates = is_static and problem.apply_router_weight_on_input
    weights_TK = inputs.routing.topk_weights_TK * (1.0 if saturates else case.weights_scale)
    inputs = replace(inputs, x_TH=x_TH, routing=replace(inputs.routing, topk_weights_TK=weights_TK))
    description = (
        f"{case.call.mode} of {description}, x {case.values} * {case.scale}, * {case.weights_scale}"
    )
    reference = IndependentReference(problem, x_TH.clone(), inputs.weights, inputs.routing)
    run = kernel.plan() if case.call.mode == "plan" else kernel
    result = run_or_classify(description, lambda: run(inputs.x_TH, inputs.weights, inputs.routing))
    if isinstance(result, FuzzOutcome):
        return (
            result
            if result.kind != TYPED_ERROR
            else FuzzOutcome(WRONG_RESULT, f"{description}: refused")
        )
    max_value = torch.finfo(problem.dtype).max
    # If the output is very large or small, intermediate values may overflow or underflow.
    rows = (reference.norms < max_value**0.5) & (reference.norms > 1e-3)
    rows &= reference.expected.isfinite().all(-1)
    mismatch = reference.find_mismatch(result, rows=rows) if bool(rows.any()) else ""
    return (
        FuzzOutcome(WRONG_RESULT, f"{description}: {mismatch}")
        if mismatch
        else FuzzOutcome(CORRECT, description)
    )


# ------------------------------------------------------------------------------- placement maps


@dataclass(frozen=True)
class PlacementCase:
    """A placement with copies.

    copies: (expert, rank) pairs, modulo the numbers of experts and ranks.
    seed: determines the order of experts, and the inputs.
    """

    experts_per_rank: int
    world_size: int
    copies: list[tuple[int, int]]
    seed: int


def check_placement_map(case: PlacementCase) -> FuzzOutcome:
    """Place experts with copies.

    (token, expert) pairs must go to a slot of their expert, and the sum of the outputs of all ranks
    must be correct.
    """
    experts = case.experts_per_rank * case.world_size
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(case.seed)).tolist()
    slots = tuple(tuple(order[r :: case.world_size]) for r in range(case.world_size))
    copies: dict[int, tuple[int, ...]] = {}
    for expert, rank in case.copies:
        experts_of_rank = copies.get(expert % experts, ())
        if (
            rank % case.world_size not in experts_of_rank
            and expert % experts not in slots[rank % case.world_size]
        ):
            copies[expert % experts] = (*experts_of_rank, rank % case.world_size)
    description = f"{slots} with copies {copies}"

    def run() -> str:
        base_placement = Placement(slots)
        placement = base_placement.with_copies(copies) if copies else base_placement
        if Placement.from_eplb(*_to_eplb(placement), join=True) != placement:
            return "from_eplb gives another placement"
        return _find_slot_mismatch(placement, experts, case.seed) or _find_sum_mismatch(
            base_placement, experts, case
        )

    mismatch = run_or_classify(description, run)
    if isinstance(mismatch, FuzzOutcome):
        return mismatch
    return (
        FuzzOutcome(WRONG_RESULT, f"{description}: {mismatch}")
        if mismatch
        else FuzzOutcome(CORRECT, description)
    )


def _to_eplb(placement: Placement) -> tuple[list[int], int]:
    width = max(map(len, placement.slots))
    # EPLB needs the same number of slots on each rank, so repeat the first expert of a rank.
    table = [
        e
        for experts_of_rank in placement.slots
        for e in (*experts_of_rank, *[experts_of_rank[0]] * (width - len(experts_of_rank)))
    ]
    return table, placement.world_size


def _find_slot_mismatch(placement: Placement, experts: int, seed: int) -> str:
    pairs_to_slots = import_object("modular_kernel.spec.placement:pairs_to_slots")
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, experts, (9, 3), generator=generator)
    ranks, slots, invalid = pairs_to_slots(ids, placement.tables(), first_token=seed % 5)
    if int(invalid):
        return f"{int(invalid)} invalid ids"
    for expert, rank, slot in zip(
        *(t.flatten().tolist() for t in (ids, ranks, slots)), strict=True
    ):
        if expert < 0 and (rank, slot) != (-1, -1):
            return f"a skipped pair goes to slot {slot} of rank {rank}"
        if expert >= 0 and placement.slots[rank][slot] != expert:
            return f"expert {expert} goes to slot {slot} of rank {rank}"
    return ""


def _find_sum_mismatch(base_placement: Placement, experts: int, case: PlacementCase) -> str:
    """Compute each rank's experts with an expert_map; compare the sum with the reference."""
    problem = replace(PROBLEM, experts=experts, top_k=min(K, experts))
    inputs = samples.make_call_inputs(case.seed, problem)
    summed_output = torch.zeros(PROBLEM.tokens, H)
    for rank, experts_of_rank in enumerate(base_placement.slots):
        local_problem = replace(problem, local_experts=len(experts_of_rank), expert_map=True)
        weights = replace(
            inputs.weights,
            w1=inputs.weights.w1[list(experts_of_rank)],
            w2=inputs.weights.w2[list(experts_of_rank)],
            expert_map=base_placement.expert_map(rank),
        )
        summed_output += samples.make_torch_kernel(local_problem)(
            inputs.x_TH, weights, inputs.routing
        )
    return samples.find_output_mismatch(summed_output, inputs, problem)


# ---------------------------------------------------------------------------------- compiled layers


def check_compiled_layer(case: tuple[str, list[int], int]) -> FuzzOutcome:
    """Compile a layer with dynamic shapes; call it with several numbers of tokens."""
    backend, sizes, seed = case
    description = f"torch.compile by {backend} of a layer for {sizes} tokens"
    torch._dynamo.reset()
    layer_inputs = samples.make_call_inputs(seed)
    layer = samples.make_loaded_layer(layer_inputs.weights)
    compiled_layer: Any = torch.compile(layer, backend=backend, dynamic=True)

    def run() -> str:
        for tokens in sizes:
            inputs = samples.make_call_inputs(seed, PROBLEM.with_tokens(tokens))
            inputs = replace(inputs, weights=layer_inputs.weights)
            mismatch = samples.find_output_mismatch(
                compiled_layer(inputs.x_TH, inputs.routing), inputs
            )
            if mismatch:
                return f"{tokens} tokens: {mismatch}"
        return ""

    mismatch = run_or_classify(description, run)
    if isinstance(mismatch, FuzzOutcome):
        return replace(mismatch, kind=WRONG_RESULT) if mismatch.kind == TYPED_ERROR else mismatch
    return (
        FuzzOutcome(WRONG_RESULT, f"{description}: {mismatch}")
        if mismatch
        else FuzzOutcome(CORRECT, description)
    )


_COUNT_CASES = st.tuples(
    st.sampled_from(sorted(_COUNT_FUNCTIONS)),
    st.dictionaries(st.integers(0, 59), _counts, min_size=1, max_size=2),
)
_SPECIAL_CASES = st.builds(
    SpecialCase,
    call=call_cases(("call", "plan")),
    values=st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(_VALUES)), max_size=4),
    scale=st.sampled_from((1.0, 1.0, 1e-3, 30.0)),
    weights_scale=st.sampled_from((1.0, 1.0, -1.0, 1e-3, 8.0)),
)
_PLACEMENT_CASES = st.builds(
    PlacementCase,
    experts_per_rank=st.integers(1, 4),
    world_size=st.integers(1, 4),
    copies=st.lists(st.tuples(st.integers(0, 15), st.integers(0, 3)), max_size=6),
    seed=seeds,
)
_COMPILED = st.tuples(
    st.sampled_from(("eager", "aot_eager")),
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    seeds,
)
TARGETS: tuple[Target[Any], ...] = (
    Target("count_arguments", 4, _COUNT_CASES, check_count_arguments),
    Target("special_values", 4, _SPECIAL_CASES, check_special_values, launches=True),
    Target("placement_maps", 2, _PLACEMENT_CASES, check_placement_map),
    Target("compiled_layers", 0.1, _COMPILED, check_compiled_layer),
)
