"""Odd numbers: counts of every kind, special floating-point values, and placements with copies."""

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
from modular_kernel.testing.stress.fuzz.junk import shorten
from modular_kernel.testing.stress.fuzz.oracle import Oracle
from modular_kernel.testing.stress.fuzz.outcome import (
    ACCEPTED,
    RIGHT,
    TYPED,
    WRONG,
    FuzzOutcome,
    run_or_outcome,
)
from modular_kernel.testing.stress.fuzz.samples import PROBLEM, E, H, I, K
from modular_kernel.testing.stress.fuzz.target import Target, import_name, seeds

# ------------------------------------------------------------------------------------------ counts


class _Index:
    """An object that only converts to an index."""

    def __index__(self) -> int:
        return 2


_counts = st.one_of(
    st.integers(-3, 9),
    st.sampled_from((2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63))),
    st.sampled_from((True, False, 2.0, 2.5, math.nan, math.inf, 1e30, -0.0, Fraction(2), 2 + 0j)),
    st.sampled_from((
        np.int8(2), np.int64(2), np.uint64(2**63), np.float32(2), np.bool_(True), np.array(2),
        np.array([2]), torch.tensor(2), torch.tensor([2]), torch.tensor(2.0), torch.tensor(True),
        "2", b"2", None, _Index(), (2,), [2], range(2),
    )),
)  # fmt: skip


def _module_call(place: str, names: tuple[str, ...], **fixed: Any) -> tuple[Any, tuple[str, ...]]:
    return (lambda **given: import_name(place)(**(fixed | given))), names


_SIZES = {"num_experts": E, "hidden_size": H, "intermediate_size": I, "top_k": K}
_BY_COUNT: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "Problem": (
        lambda **given: replace(PROBLEM, **given),
        ("tokens", "hidden", "intermediate", "experts", "top_k", "local_experts", "chunk_tokens",
         "max_received"),
    ),
    "with_tokens": (PROBLEM.with_tokens, ("tokens",)),
    "Parallel": (Parallel, ("world_size", "rank", "ranks_per_host")),
    "AdapterSpec": (lambda **g: AdapterSpec(**({"adapters": 2, "rank": 2} | g)),
                    ("adapters", "rank")),
    "Placement.linear": (lambda **g: Placement.linear(**({"experts": 4, "world_size": 2} | g)),
                         ("experts", "world_size")),
    "Placement.round_robin": (
        lambda **g: Placement.round_robin(**({"experts": 4, "world_size": 2} | g)),
        ("experts", "world_size")),
    "expert_map": (Placement.linear(4, 2).expert_map, ("rank",)),
    "workspace_specs": (samples.kernel().workspace_specs, ("tokens",)),
    "reserve_workspace": (samples.kernel().reserve_workspace, ("tokens",)),
    "FusedMoE": _module_call("modular_kernel.layers.fused_moe:FusedMoE",
                             (*_SIZES, "layer_id", "max_tokens", "chunk_tokens"), **_SIZES),
    "warm_up": (lambda tokens: samples.loaded_layer().warm_up(tokens), ("tokens",)),
    "local_expert": (lambda expert_id: samples.fused_moe().local_expert(expert_id),
                     ("expert_id",)),
    "RouterSpec": _module_call("modular_kernel.spec.router:RouterSpec",
                               ("top_k", "groups", "topk_groups", "zero_experts"), top_k=2),
    "columns": (lambda experts: samples.router_spec().columns(experts), ("experts",)),
    "Router": _module_call("modular_kernel.layers.router:Router",
                           ("hidden_size", "num_experts", "vocabulary"),
                           spec=samples.router_spec(), hidden_size=H, num_experts=E),
    "Share": _module_call("modular_kernel.layers.rank_share:Share",
                          ("experts", "hidden", "intermediate"), experts=E, hidden=H,
                          intermediate=I),
    "moe_align_block_size": _module_call(
        "modular_kernel.ops.align:moe_align_block_size", ("block_size", "num_experts"),
        topk_ids_TK=torch.zeros(3, 2, dtype=torch.int32), block_size=16, num_experts=E),
}  # fmt: skip
_MAY_ALLOCATE = ("FusedMoE", "Router", "warm_up", "reserve_workspace", "moe_align_block_size")


def count_arguments(case: tuple[str, dict[int, Any]]) -> FuzzOutcome:
    """Pass odd numbers as counts: accepted as the integers that they are, or a typed error."""
    name, values = case
    function, names = _BY_COUNT[name]
    given = {names[place % len(names)]: value for place, value in values.items()}
    what = f"{name}({', '.join(f'{n}={shorten(v)} {type(v).__name__}' for n, v in given.items())})"
    is_huge = any(isinstance(v, int | np.integer) and int(v) > 2**12 for v in given.values())
    if is_huge and name in _MAY_ALLOCATE:
        return FuzzOutcome(TYPED, what)  # all memory may be needed
    result = run_or_outcome(what, lambda: function(**given))
    if isinstance(result, FuzzOutcome):
        return result
    for number in given.values():
        if isinstance(number, float | str | bytes | complex | list | tuple | Fraction | np.ndarray):
            return FuzzOutcome(ACCEPTED, what)
    return FuzzOutcome(RIGHT, what)


# ---------------------------------------------------------------------------------- special values

_VALUES = (0.0, -0.0, 1e-45, -1e-40, 1e-30, 1e4, -1e4, 3e4, 1.0, 2.0**-24, 6e-8, -6e-5)


@dataclass(frozen=True)
class SpecialCase:
    """A call whose x has special values. value: at (place), or scale: of all of x."""

    call: CallCase
    values: list[tuple[int, float]]
    scale: float
    weights_scale: float


def special_values(case: SpecialCase) -> FuzzOutcome:
    """Call with denormal, tiny, huge and signed zero values: as in float64, or as it overflows."""
    built = build_call(case.call)
    if isinstance(built, FuzzOutcome):
        return built
    kernel, what, inputs = built
    problem: Problem = kernel.problem
    # A static scale is made for values of ordinary size: larger ones saturate. In float16 the
    # product of gate and up may overflow where the output does not.
    is_static = problem.scheme.static
    limit = 1.0 if is_static else {torch.float16: 100.0}.get(problem.dtype, math.inf)
    x_TH = (inputs.x_TH.double() * (1.0 if is_static else case.scale)).to(problem.dtype)
    for place, value in case.values:
        if x_TH.numel() and abs(value) <= limit:
            x_TH[torch.unravel_index(torch.tensor(place % x_TH.numel()), x_TH.shape)] = value
    saturates = is_static and problem.apply_router_weight_on_input
    scores = inputs.routing.topk_weights_TK * (1.0 if saturates else case.weights_scale)
    inputs = replace(inputs, x_TH=x_TH, routing=replace(inputs.routing, topk_weights_TK=scores))
    what = f"{case.call.mode} of {what}, x {case.values} * {case.scale}, * {case.weights_scale}"
    oracle = Oracle(problem, x_TH.clone(), inputs.weights, inputs.routing)
    run = kernel.plan() if case.call.mode == "plan" else kernel
    result = run_or_outcome(what, lambda: run(inputs.x_TH, inputs.weights, inputs.routing))
    if isinstance(result, FuzzOutcome):
        return result if result.kind != TYPED else FuzzOutcome(WRONG, f"{what}: refused")
    largest = torch.finfo(problem.dtype).max
    # Steps between may overflow, or vanish, where the result would not.
    rows = (oracle.norms < largest**0.5) & (oracle.norms > 1e-3)
    rows &= oracle.expected.isfinite().all(-1)
    fault = oracle.fault(result, rows=rows) if bool(rows.any()) else ""
    return FuzzOutcome(WRONG, f"{what}: {fault}") if fault else FuzzOutcome(RIGHT, what)


# ------------------------------------------------------------------------------- placement maps


@dataclass(frozen=True)
class PlacementCase:
    """A placement with copies. order: a seed; copies: (expert, rank) pairs, modulo their number."""

    experts_per_rank: int
    world: int
    copies: list[tuple[int, int]]
    seed: int


def placement_maps(case: PlacementCase) -> FuzzOutcome:
    """Place experts with copies: pairs go to their experts, and the sum over ranks is right."""
    experts = case.experts_per_rank * case.world
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(case.seed)).tolist()
    slots = tuple(tuple(order[r :: case.world]) for r in range(case.world))
    copies: dict[int, tuple[int, ...]] = {}
    for expert, rank in case.copies:
        held = copies.get(expert % experts, ())
        if rank % case.world not in held and expert % experts not in slots[rank % case.world]:
            copies[expert % experts] = (*held, rank % case.world)
    what = f"{slots} with copies {copies}"

    def run() -> str:
        base = Placement(slots)
        placed = base.with_copies(copies) if copies else base
        if Placement.from_eplb(*_eplb(placed), join=True) != placed:
            return "from_eplb gives another placement"
        return _slots_fault(placed, experts, case.seed) or _sum_fault(base, experts, case)

    fault = run_or_outcome(what, run)
    if isinstance(fault, FuzzOutcome):
        return fault
    return FuzzOutcome(WRONG, f"{what}: {fault}") if fault else FuzzOutcome(RIGHT, what)


def _eplb(placed: Placement) -> tuple[list[int], int]:
    width = max(map(len, placed.slots))
    # EPLB has as many slots on each rank; the first expert of a rank fills the others.
    table = [e for held in placed.slots for e in (*held, *[held[0]] * (width - len(held)))]
    return table, placed.world_size


def _slots_fault(placed: Placement, experts: int, seed: int) -> str:
    pairs_to_slots = import_name("modular_kernel.spec.placement:pairs_to_slots")
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, experts, (9, 3), generator=generator)
    ranks, slots, invalid = pairs_to_slots(ids, placed.tables(), first_token=seed % 5)
    if int(invalid):
        return f"{int(invalid)} invalid ids"
    for expert, rank, slot in zip(
        *(t.flatten().tolist() for t in (ids, ranks, slots)), strict=True
    ):
        if expert < 0 and (rank, slot) != (-1, -1):
            return f"a skipped pair goes to slot {slot} of rank {rank}"
        if expert >= 0 and placed.slots[rank][slot] != expert:
            return f"expert {expert} goes to slot {slot} of rank {rank}"
    return ""


def _sum_fault(base: Placement, experts: int, case: PlacementCase) -> str:
    """Sum the outputs of ranks that hold their experts by an expert_map."""
    problem = replace(PROBLEM, experts=experts, top_k=min(K, experts))
    given = samples.inputs(case.seed, problem)
    total = torch.zeros(PROBLEM.tokens, H)
    for rank, held in enumerate(base.slots):
        local = replace(problem, local_experts=len(held), expert_map=True)
        weights = replace(
            given.weights,
            w1=given.weights.w1[list(held)],
            w2=given.weights.w2[list(held)],
            expert_map=base.expert_map(rank),
        )
        total += samples.kernel(local)(given.x_TH, weights, given.routing)
    return samples.fault_of(total, given, problem)


# ---------------------------------------------------------------------------------- compiled layers


def compiled_layers(case: tuple[str, list[int], int]) -> FuzzOutcome:
    """Compile a layer with dynamic shapes; call it with several numbers of tokens."""
    backend, sizes, seed = case
    what = f"torch.compile by {backend} of a layer for {sizes} tokens"
    torch._dynamo.reset()
    given = samples.inputs(seed)
    layer = samples.loaded_layer(given.weights)
    compiled: Any = torch.compile(layer, backend=backend, dynamic=True)

    def run() -> str:
        for tokens in sizes:
            called = samples.inputs(seed, PROBLEM.with_tokens(tokens))
            called = replace(called, weights=given.weights)
            fault = samples.fault_of(compiled(called.x_TH, called.routing), called)
            if fault:
                return f"{tokens} tokens: {fault}"
        return ""

    fault = run_or_outcome(what, run)
    if isinstance(fault, FuzzOutcome):
        return replace(fault, kind=WRONG) if fault.kind == TYPED else fault
    return FuzzOutcome(WRONG, f"{what}: {fault}") if fault else FuzzOutcome(RIGHT, what)


_COUNT_CASES = st.tuples(
    st.sampled_from(sorted(_BY_COUNT)),
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
    world=st.integers(1, 4),
    copies=st.lists(st.tuples(st.integers(0, 15), st.integers(0, 3)), max_size=6),
    seed=seeds,
)
_COMPILED = st.tuples(
    st.sampled_from(("eager", "aot_eager")),
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    seeds,
)
TARGETS: tuple[Target[Any], ...] = (
    Target("count_arguments", 4, _COUNT_CASES, count_arguments),
    Target("special_values", 4, _SPECIAL_CASES, special_values, launches=True),
    Target("placement_maps", 2, _PLACEMENT_CASES, placement_maps),
    Target("compiled_layers", 0.1, _COMPILED, compiled_layers),
)
