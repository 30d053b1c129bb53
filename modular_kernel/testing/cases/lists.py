"""Lists of test cases for a pairing.

- full: a pairwise-covering set of cases (`pairwise`), and hand-picked shapes (`handpicked`).
- smoke: a few cases that together touch every axis.
- axes: a base problem, and variants that change one property or a few properties that interact.
  Tests that compare variants with the base problem use this list.

A case consists of a problem, a kind of routing, an input variation and a seed. Shapes are small,
because the interpreter must also run them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch

from modular_kernel.catalog import check, load_catalog
from modular_kernel.compatibility.support import Verdict
from modular_kernel.spec.problem import MAX_TOP_K, Combine, Machine, Problem
from modular_kernel.testing.cases.case import Case, command
from modular_kernel.testing.cases.covering import has_valid_row
from modular_kernel.testing.cases.handpicked import list_handpicked_cases
from modular_kernel.testing.cases.inputs import ROUTING_KINDS
from modular_kernel.testing.cases.invariant import list_batch_invariant_variants
from modular_kernel.testing.cases.pairwise import build_space, draw_pairwise_cases
from modular_kernel.testing.cases.quantized import list_quantized_variants
from modular_kernel.testing.cases.row_order import apply_part_row_order
from modular_kernel.testing.cases.smoke import list_smoke_variants

__all__ = [
    "BASE",
    "ROUTING_KINDS",
    "Case",
    "Selection",
    "cases_by_axes",
    "cases_for",
    "command",
    "list_axis_variants",
    "pairings",
]

Level = Literal["smoke", "full"]
Variant = tuple[Problem, str]  # the second value is the kind of routing


@dataclass(frozen=True)
class Selection:
    """Cases for a pairing.

    Attributes:
        cases: valid cases, which the pairing must pass.
        refused: cases that the rules refuse, with their verdicts.
        num_covered: number of pairs of axis values that the pairwise cases cover.
        impossible: (value, value, reason) for each pair of axis values that no valid case contains.
    """

    cases: tuple[Case, ...]
    refused: tuple[tuple[Case, Verdict], ...]
    num_covered: int = 0
    impossible: tuple[tuple[str, str, str], ...] = ()


# float32, so that rounding does not hide errors. Counts are odd. H and I are not multiples of the
# tiles, but multiples of 16, so that the 16-bit cases use the same tiles as real models.
BASE = Problem(tokens=19, hidden=48, intermediate=80, experts=5, top_k=2, dtype=torch.float32)

_FP16, _BF16 = torch.float16, torch.bfloat16
# Limits of about one standard deviation of the data, so that every clamp acts on many values.
_SWIGLU_OAI = "swiglu_oai:alpha=1.702,limit=1.0,interleaved=true"
_SWIGLU_OAI_SPLIT = "swiglu_oai:alpha=1.702,limit=1.0,interleaved=false"
_CLAMP_AFTER = "swiglu_clamp_after:limit=0.5"
_CLAMP_BEFORE = "swiglu_clamp_before:limit=0.5"


def cases_for(
    prepare_finalize: str, experts: str, machine: Machine, level: Level = "full"
) -> Selection:
    """Return the cases of `level` for a pairing, checked for `machine`.

    With level "full", `Selection.refused` contains the base case if no case is supported.
    Otherwise, it is empty.
    """
    if level == "smoke":
        candidates = (
            Case(
                prepare_finalize,
                experts,
                apply_part_row_order(problem, experts),
                routing,
                variation=variation,
            )
            for problem, routing, variation in list_smoke_variants(BASE)
        )
        return _select(candidates, machine)
    array, cases = draw_pairwise_cases(prepare_finalize, experts, machine)
    num_covered, describe = len(array.covered_pairs), array.space.describe
    impossible = tuple(
        (describe(a), describe(b), reason) for (a, b), reason in array.impossible.items()
    )
    base = apply_part_row_order(BASE, experts)
    refused_base = (
        Case(prepare_finalize, experts, base),
        check(prepare_finalize, experts, base, machine),
    )
    if not cases:
        return Selection((), (refused_base,), num_covered, impossible)
    handpicked = list_handpicked_cases(prepare_finalize, experts, machine)
    return Selection((*cases, *handpicked), (), num_covered, impossible)


def cases_by_axes(prepare_finalize: str, experts: str, machine: Machine) -> Selection:
    """Return the cases of the axis variants of BASE for a pairing, checked for `machine`."""
    candidates = (
        Case(prepare_finalize, experts, apply_part_row_order(problem, experts), routing)
        for problem, routing in list_axis_variants(BASE)
    )
    return _select(candidates, machine)


def _select(candidates: Iterable[Case], machine: Machine) -> Selection:
    cases: list[Case] = []
    refused: list[tuple[Case, Verdict]] = []
    for case in candidates:
        verdict = check(case.prepare_finalize, case.experts, case.problem, machine)
        if verdict.ok:
            cases.append(case)
        else:
            refused.append((case, verdict))
    return Selection(tuple(cases), tuple(refused))


def pairings(machine: Machine, level: Level = "full") -> tuple[tuple[str, str], ...]:
    """Return every pairing in the catalog with at least one valid case of `level`."""
    catalog = load_catalog()
    return tuple(
        (pf, experts)
        for pf in catalog.names("prepare_finalize")
        for experts in catalog.names("experts")
        if _has_valid_case(pf, experts, machine, level)
    )


@cache
def _has_valid_case(prepare_finalize: str, experts: str, machine: Machine, level: Level) -> bool:
    if level == "smoke":
        return bool(cases_for(prepare_finalize, experts, machine, level).cases)
    return has_valid_row(build_space(prepare_finalize, experts, machine))


def list_axis_variants(base: Problem) -> tuple[Variant, ...]:
    """Return `base`, variants that change one axis each, and combinations of interacting axes."""
    groups: tuple[Iterable[Variant], ...] = (
        [(base, "uniform")],
        _vary_tokens(base),
        _vary_dtypes(base),
        _vary_activations(base),
        _vary_biases(base),
        _vary_router_weights(base),
        _vary_combines(base),
        _vary_inplace(base),
        _vary_placements(base),
        _vary_chunks(base),
        _vary_routings(base),
        _vary_shapes(base),
        list_quantized_variants(base),
        list_batch_invariant_variants(base),
        _vary_adapters(base),
    )
    return tuple(dict.fromkeys(variant for group in groups for variant in group))


def _make_variant(base: Problem, routing: str = "uniform", **changes: Any) -> Variant:
    return replace(base, **changes), routing


def _vary_tokens(base: Problem) -> Iterator[Variant]:
    """Yield variants with 0, 1 and 7 tokens, then with token counts around the tile sizes.

    Around the tile sizes, all tokens are routed to one expert. Parts choose tiles by the mean
    number of rows per expert, so the variants for larger tiles have fewer experts.
    """
    for tokens in (0, 1, 7):
        yield _make_variant(base, tokens=tokens)
    yield _make_variant(base, tokens=1, dtype=_BF16, bias=True)
    for tokens in (15, 16, 17):
        yield _make_variant(base, "all_to_one", tokens=tokens, top_k=1)
    yield _make_variant(base, "all_to_one", tokens=65, top_k=1, experts=2)
    for tokens in (31, 32, 33, 63, 64, 65):
        yield _make_variant(base, "all_to_one", tokens=tokens, top_k=1, experts=2, dtype=_BF16)
    for tokens in (127, 128, 129):
        yield _make_variant(base, tokens=tokens, top_k=1, experts=1, dtype=_BF16)


def _vary_dtypes(base: Problem) -> Iterator[Variant]:
    yield _make_variant(base, dtype=_FP16)
    yield _make_variant(base, dtype=_BF16)
    yield _make_variant(base, fp32_precision="tf32")
    yield _make_variant(base, ids_dtype=torch.int32)
    yield _make_variant(base, ids_dtype=torch.int64)
    yield _make_variant(base, "out_of_range", ids_dtype=torch.int64, top_k=3)


def _vary_activations(base: Problem) -> Iterator[Variant]:
    """Yield variants with every activation function.

    Most are in float32, so that rounding does not hide errors.
    """
    common = ("gelu", "gelu_tanh", _SWIGLU_OAI_SPLIT, _CLAMP_AFTER, _CLAMP_BEFORE, "relu2")
    rare = ("situ:alpha=1.5,limit=0.7", "gelu:limit=0.5", "silu_no_mul", "gelu_tanh_no_mul")
    for activation in (*common, *rare, _SWIGLU_OAI, "silu:interleaved=true"):
        yield _make_variant(base, activation=activation)
    for activation in ("gelu", _SWIGLU_OAI, _CLAMP_AFTER, "relu2"):
        yield _make_variant(base, activation=activation, dtype=_BF16)
    for activation in ("gelu_tanh", _CLAMP_BEFORE):
        yield _make_variant(base, activation=activation, dtype=_FP16)
    yield _make_variant(base, activation=_SWIGLU_OAI, fp32_precision="tf32", bias=True)


def _vary_biases(base: Problem) -> Iterator[Variant]:
    for dtype in (base.dtype, _BF16, _FP16):
        yield _make_variant(base, dtype=dtype, bias=True)
    yield _make_variant(base, "skips", bias=True, activation="relu2")
    yield _make_variant(base, "duplicates", bias=True, activation=_SWIGLU_OAI, dtype=_BF16, top_k=4)


def _vary_router_weights(base: Problem) -> Iterator[Variant]:
    """Yield variants with router weights applied to the input, scaling factors, and other K."""
    on_input = replace(base, apply_router_weight_on_input=True)
    for top_k in (1, 2):
        yield _make_variant(on_input, top_k=top_k)
    for top_k in (1, 3):
        yield _make_variant(on_input, top_k=top_k, bias=True, dtype=_BF16)
    yield _make_variant(on_input, "skips", top_k=1, bias=True)
    yield _make_variant(on_input, "duplicates", top_k=3, dtype=_FP16)
    for top_k in (1, 2, 3):
        yield _make_variant(base, routed_scaling_factor=2.5, top_k=top_k)
    yield _make_variant(base, routed_scaling_factor=2.5, top_k=8, experts=9, tokens=7)
    yield _make_variant(base, "skips", routed_scaling_factor=2.5, top_k=3, dtype=_BF16, bias=True)
    yield _make_variant(on_input, routed_scaling_factor=2.5, top_k=1)
    for top_k in (1, 3):
        yield _make_variant(base, top_k=top_k)
    yield _make_variant(base, top_k=8, tokens=9)
    yield _make_variant(base, top_k=16, experts=17, tokens=5)
    yield _make_variant(base, top_k=17, experts=18, tokens=3, dtype=_BF16)
    yield _make_variant(base, "skips", top_k=22, experts=40, tokens=3, routed_scaling_factor=5.0)
    yield _make_variant(base, "duplicates", top_k=MAX_TOP_K, experts=33, tokens=2, bias=True)


def _vary_combines(base: Problem) -> Iterator[Variant]:
    """Yield variants that keep the top-k dimension in the output, weighted or unweighted."""
    weighted = replace(base, combine=Combine.TOPK_WEIGHTED)
    unweighted = replace(base, combine=Combine.TOPK_UNWEIGHTED)
    for unreduced in (weighted, unweighted):
        yield _make_variant(unreduced, routed_scaling_factor=2.5)
        yield _make_variant(unreduced, "skips", top_k=3, dtype=_BF16, bias=True)
        yield _make_variant(unreduced, "duplicates", apply_router_weight_on_input=True, top_k=1)
    yield _make_variant(weighted, tokens=0)
    yield _make_variant(unweighted, tokens=1, top_k=3)


def _vary_inplace(base: Problem) -> Iterator[Variant]:
    inplace = replace(base, inplace=True)
    yield _make_variant(inplace)
    yield _make_variant(inplace, "duplicates", dtype=_BF16, top_k=3)
    yield _make_variant(inplace, "skips", bias=True)
    yield _make_variant(inplace, tokens=0)


def _vary_placements(base: Problem) -> Iterator[Variant]:
    """Yield variants with remote experts, with a single expert, and with many experts."""
    mapped = replace(base, expert_map=True)
    yield _make_variant(mapped)
    yield _make_variant(mapped, local_experts=3)
    yield _make_variant(mapped, "skips", local_experts=4, dtype=_BF16, top_k=3, bias=True)
    yield _make_variant(mapped, "out_of_range", local_experts=2, inplace=True)
    yield _make_variant(mapped, "all_to_one", local_experts=1, top_k=3)
    yield _make_variant(mapped, local_experts=4, combine=Combine.TOPK_WEIGHTED)
    yield _make_variant(base, experts=1, top_k=1)
    yield _make_variant(base, experts=65, tokens=5, dtype=_BF16)
    yield _make_variant(base, "zipf", experts=65, top_k=3, tokens=9)


def _vary_chunks(base: Problem) -> Iterator[Variant]:
    """Yield variants with token counts around a chunk of 8 tokens, and with other options."""
    chunked = replace(base, chunk_tokens=8)
    for tokens in (0, 7, 8, 9, 16):
        yield _make_variant(chunked, tokens=tokens)
    yield _make_variant(chunked, "out_of_range", dtype=_BF16, bias=True)
    yield _make_variant(chunked, "duplicates", inplace=True, top_k=3)
    yield _make_variant(chunked, "skips", combine=Combine.TOPK_WEIGHTED, chunk_tokens=7)
    yield _make_variant(chunked, local_experts=3, expert_map=True, chunk_tokens=10)


def _vary_adapters(base: Problem) -> Iterator[Variant]:
    """Yield variants with LoRA ranks that are not multiples of a block, and shared matrices."""
    with_adapters = replace(base, lora="adapters=3,rank=7")
    yield _make_variant(with_adapters)
    yield _make_variant(with_adapters, "skips", dtype=_BF16, bias=True, activation=_SWIGLU_OAI)
    yield _make_variant(with_adapters, lora="adapters=4,rank=80,outer=shared", activation="relu2")
    yield _make_variant(
        with_adapters, lora="adapters=8,rank=16,a13=shared", dtype=_FP16, chunk_tokens=8
    )
    yield _make_variant(with_adapters, top_k=1, apply_router_weight_on_input=True, bias=True)


def _vary_routings(base: Problem) -> Iterator[Variant]:
    for routing in ROUTING_KINDS:
        yield base, routing
    for routing in ("zipf", "duplicates", "skips", "out_of_range"):
        yield _make_variant(base, routing, dtype=_BF16, top_k=3)


def _vary_shapes(base: Problem) -> Iterator[Variant]:
    """Yield variants whose H and I are, or are not, multiples of the tile sizes."""
    for hidden, intermediate in ((128, 64), (16, 32), (17, 19), (33, 47), (130, 96), (72, 136)):
        yield _make_variant(base, hidden=hidden, intermediate=intermediate)
    yield _make_variant(base, hidden=160, intermediate=96, dtype=_BF16, bias=True)
    yield _make_variant(base, hidden=47, intermediate=33, dtype=_BF16, activation=_SWIGLU_OAI)
    yield _make_variant(base, hidden=104, intermediate=56, dtype=_FP16, activation="relu2")
