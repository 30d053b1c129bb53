"""Which cases a pairing is proven on.

`full`: rows in which every two values of two axes meet, drawn for the pairing (`cases_drawn`).
`smoke`: some that touch every axis. `axes`: a base, one change for each axis, products where axes
meet; for whoever wants problems of which one thing is unlike the base.

A case is a problem, a kind of routing, a manner of inputs and a seed, so it can be replayed on any
machine by the one line that `command` prints. Shapes are small: the interpreter runs them too.
"""

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from modular_kernel.catalog import check, load_catalog
from modular_kernel.support import Verdict
from modular_kernel.testing.cases_invariant import batch_invariant
from modular_kernel.testing.cases_quant import quantised
from modular_kernel.testing.inputs import ORDINARY, ROUTINGS, Manner
from modular_kernel.types import Combine, Machine, Problem, dtype_name

__all__ = ["BASE", "ROUTINGS", "Case", "Selection", "axes", "cases_for", "command", "pairings"]

Level = Literal["smoke", "full"]
Variant = tuple[Problem, str]


@dataclass(frozen=True)
class Case:
    """One proof to be made: a pairing by name, a problem, a kind of routing, and a seed.

    manner: how tensors lie, and what values they hold. by_turns: a second kernel, of another
    problem, runs between this one's calls.
    """

    prepare_finalize: str
    experts: str
    problem: Problem
    routing: str = "uniform"
    seed: int = 0
    manner: Manner = ORDINARY
    by_turns: bool = False

    def __str__(self) -> str:
        seed = f"-seed{self.seed}" if self.seed else ""
        pairing = f"{self.prepare_finalize}+{self.experts}"
        unusual = "".join(
            f"-{name}" if value is True else f"-{value}" for name, value in self._unusual().items()
        )
        return f"{pairing}-{self.problem}-{self.routing}{unusual}{seed}"

    def _unusual(self) -> dict[str, object]:
        """Options of the manner, where they are not the default."""
        options = {
            "layout": (self.manner.layout, ORDINARY.layout),
            "values": (self.manner.values, ORDINARY.values),
            "own-scales": (self.manner.own_scales, False),
            "by-turns": (self.by_turns, False),
        }
        return {name: value for name, (value, default) in options.items() if value != default}

    def options(self) -> dict[str, object]:
        """Options of `mk test --one` that the problem does not tell."""
        return {"routing": self.routing, "seed": self.seed, **self._unusual()}


@dataclass(frozen=True)
class Selection:
    """The cases a pairing must pass, and those that the rules refuse, each with its verdict."""

    cases: tuple[Case, ...]
    refused: tuple[tuple[Case, Verdict], ...]


# float32: nothing is hidden by rounding. Odd counts; H and I off every tile, yet multiples of 16,
# so that the 16-bit cases run the tiles that real models run.
BASE = Problem(tokens=19, hidden=48, intermediate=80, experts=5, top_k=2, dtype=torch.float32)

_FP16, _BF16 = torch.float16, torch.bfloat16
# Limits of about one standard deviation of the data, so that every clamp acts on many values.
_OAI = "swiglu_oai:alpha=1.702,limit=1.0,interleaved=true"
_OAI_SPLIT = "swiglu_oai:alpha=1.702,limit=1.0,interleaved=false"
_AFTER = "swiglu_clamp_after:limit=0.5"
_BEFORE = "swiglu_clamp_before:limit=0.5"


def cases_for(
    prepare_finalize: str, experts: str, machine: Machine, level: Level = "full"
) -> Selection:
    """Every case of `level` for a pairing, judged on `machine`."""
    cases: list[Case] = []
    refused: list[tuple[Case, Verdict]] = []
    for problem, routing in axes(BASE) if level == "full" else _smoke(BASE):
        case = Case(prepare_finalize, experts, problem, routing)
        verdict = check(prepare_finalize, experts, problem, machine)
        if verdict.ok:
            cases.append(case)
        else:
            refused.append((case, verdict))
    return Selection(tuple(cases), tuple(refused))


def pairings(machine: Machine, level: Level = "full") -> tuple[tuple[str, str], ...]:
    """Every pairing in the catalog that at least one case of `level` is valid for."""
    catalog = load_catalog()
    return tuple(
        (pf, experts)
        for pf in catalog.names("prepare_finalize")
        for experts in catalog.names("experts")
        if cases_for(pf, experts, machine, level).cases
    )


def axes(base: Problem) -> tuple[Variant, ...]:
    """`base` plus one change for each axis, plus small products over axes that interact."""
    groups: tuple[Iterable[Variant], ...] = (
        [(base, "uniform")],
        _tokens(base),
        _numbers(base),
        _activations(base),
        _biases(base),
        _router_weights(base),
        _combines(base),
        _inplace(base),
        _placements(base),
        _chunks(base),
        _routings(base),
        _shapes(base),
        quantised(base),
        batch_invariant(base),
    )
    return tuple(dict.fromkeys(variant for group in groups for variant in group))


def _smoke(base: Problem) -> tuple[Variant, ...]:
    """About eight cases that touch every axis."""
    weighted = replace(base, combine=Combine.TOPK_WEIGHTED, routed_scaling_factor=2.5)
    on_input = replace(base, apply_router_weight_on_input=True, top_k=1, bias=True)
    return (
        (base, "uniform"),
        (base.with_tokens(0), "uniform"),
        (replace(base, dtype=_BF16, activation=_OAI, bias=True), "skips"),
        (replace(base, dtype=_FP16, top_k=3, hidden=160, ids_dtype=torch.int64), "duplicates"),
        (on_input, "zipf"),
        (replace(base, expert_map=True, local_experts=3, activation="relu2"), "out_of_range"),
        (replace(base, tokens=17, chunk_tokens=8, inplace=True), "all_to_one"),
        (weighted, "empty_experts"),
    )


def _change(base: Problem, routing: str = "uniform", **changes: Any) -> Variant:
    """`base` with some fields changed, whatever their types."""
    return replace(base, **changes), routing


def _tokens(base: Problem) -> Iterator[Variant]:
    """No token, one, an odd number; and tile edges, where one expert gets exactly T rows.

    Parts choose their tiles by the mean rows of an expert, so larger edges have fewer experts.
    """
    for tokens in (0, 1, 7):
        yield _change(base, tokens=tokens)
    yield _change(base, tokens=1, dtype=_BF16, bias=True)
    for tokens in (15, 16, 17):
        yield _change(base, "all_to_one", tokens=tokens, top_k=1)
    yield _change(base, "all_to_one", tokens=65, top_k=1, experts=2)
    for tokens in (31, 32, 33, 63, 64, 65):
        yield _change(base, "all_to_one", tokens=tokens, top_k=1, experts=2, dtype=_BF16)
    for tokens in (127, 128, 129):
        yield _change(base, tokens=tokens, top_k=1, experts=1, dtype=_BF16)


def _numbers(base: Problem) -> Iterator[Variant]:
    """Element types of activations and of ids."""
    yield _change(base, dtype=_FP16)
    yield _change(base, dtype=_BF16)
    yield _change(base, fp32_precision="tf32")
    yield _change(base, ids_dtype=torch.int32)
    yield _change(base, ids_dtype=torch.int64)
    yield _change(base, "out_of_range", ids_dtype=torch.int64, top_k=3)


def _activations(base: Problem) -> Iterator[Variant]:
    """Every rule in float32, where nothing is hidden by rounding, and some in each other type."""
    split = ("gelu", "gelu_tanh", _OAI_SPLIT, _AFTER, _BEFORE, "relu2")
    for activation in (*split, _OAI, "silu:interleaved=true"):
        yield _change(base, activation=activation)
    for activation in ("gelu", _OAI, _AFTER, "relu2"):
        yield _change(base, activation=activation, dtype=_BF16)
    for activation in ("gelu_tanh", _BEFORE):
        yield _change(base, activation=activation, dtype=_FP16)
    yield _change(base, activation=_OAI, fp32_precision="tf32", bias=True)


def _biases(base: Problem) -> Iterator[Variant]:
    for dtype in (base.dtype, _BF16, _FP16):
        yield _change(base, dtype=dtype, bias=True)
    yield _change(base, "skips", bias=True, activation="relu2")
    yield _change(base, "duplicates", bias=True, activation=_OAI, dtype=_BF16, top_k=4)


def _router_weights(base: Problem) -> Iterator[Variant]:
    """Router weights on the input, the scaling factor, and K."""
    on_input = replace(base, apply_router_weight_on_input=True)
    for top_k in (1, 2):
        yield _change(on_input, top_k=top_k)
    for top_k in (1, 3):
        yield _change(on_input, top_k=top_k, bias=True, dtype=_BF16)
    yield _change(on_input, "skips", top_k=1, bias=True)
    yield _change(on_input, "duplicates", top_k=3, dtype=_FP16)
    for top_k in (1, 2, 3):
        yield _change(base, routed_scaling_factor=2.5, top_k=top_k)
    yield _change(base, routed_scaling_factor=2.5, top_k=8, experts=9, tokens=7)
    yield _change(base, "skips", routed_scaling_factor=2.5, top_k=3, dtype=_BF16, bias=True)
    yield _change(on_input, routed_scaling_factor=2.5, top_k=1)
    for top_k in (1, 3):
        yield _change(base, top_k=top_k)
    yield _change(base, top_k=8, tokens=9)
    yield _change(base, top_k=16, experts=17, tokens=5)


def _combines(base: Problem) -> Iterator[Variant]:
    """Top-k kept: weighted and scaled, or neither."""
    weighted = replace(base, combine=Combine.TOPK_WEIGHTED)
    unweighted = replace(base, combine=Combine.TOPK_UNWEIGHTED)
    for kept in (weighted, unweighted):
        yield _change(kept, routed_scaling_factor=2.5)
        yield _change(kept, "skips", top_k=3, dtype=_BF16, bias=True)
        yield _change(kept, "duplicates", apply_router_weight_on_input=True, top_k=1)
    yield _change(weighted, tokens=0)
    yield _change(unweighted, tokens=1, top_k=3)


def _inplace(base: Problem) -> Iterator[Variant]:
    inplace = replace(base, inplace=True)
    yield _change(inplace)
    yield _change(inplace, "duplicates", dtype=_BF16, top_k=3)
    yield _change(inplace, "skips", bias=True)
    yield _change(inplace, tokens=0)


def _placements(base: Problem) -> Iterator[Variant]:
    """Experts that are elsewhere, in any order; few experts, and many for few tokens."""
    mapped = replace(base, expert_map=True)
    yield _change(mapped)
    yield _change(mapped, local_experts=3)
    yield _change(mapped, "skips", local_experts=4, dtype=_BF16, top_k=3, bias=True)
    yield _change(mapped, "out_of_range", local_experts=2, inplace=True)
    yield _change(mapped, "all_to_one", local_experts=1, top_k=3)
    yield _change(mapped, local_experts=4, combine=Combine.TOPK_WEIGHTED)
    yield _change(base, experts=1, top_k=1)
    yield _change(base, experts=65, tokens=5, dtype=_BF16)
    yield _change(base, "zipf", experts=65, top_k=3, tokens=9)


def _chunks(base: Problem) -> Iterator[Variant]:
    """Chunks of C = 8 tokens: none, one less than one, one, one more, two; and what they meet."""
    chunked = replace(base, chunk_tokens=8)
    for tokens in (0, 7, 8, 9, 16):
        yield _change(chunked, tokens=tokens)
    yield _change(chunked, "out_of_range", dtype=_BF16, bias=True)
    yield _change(chunked, "duplicates", inplace=True, top_k=3)
    yield _change(chunked, "skips", combine=Combine.TOPK_WEIGHTED, chunk_tokens=7)
    yield _change(chunked, local_experts=3, expert_map=True, chunk_tokens=10)


def _routings(base: Problem) -> Iterator[Variant]:
    for routing in ROUTINGS:
        yield base, routing
    for routing in ("zipf", "duplicates", "skips", "out_of_range"):
        yield _change(base, routing, dtype=_BF16, top_k=3)


def _shapes(base: Problem) -> Iterator[Variant]:
    """H and I on and off every tile."""
    for hidden, intermediate in ((128, 64), (16, 32), (17, 19), (33, 47), (130, 96), (72, 136)):
        yield _change(base, hidden=hidden, intermediate=intermediate)
    yield _change(base, hidden=160, intermediate=96, dtype=_BF16, bias=True)
    yield _change(base, hidden=47, intermediate=33, dtype=_BF16, activation=_OAI)
    yield _change(base, hidden=104, intermediate=56, dtype=_FP16, activation="relu2")


def command(case: Case) -> str:
    """The line that proves this case alone, here or on another machine."""
    problem = case.problem
    options: dict[str, object] = {
        "pf-type": case.prepare_finalize,
        "experts-type": case.experts,
        "tokens": problem.tokens,
        "hidden": problem.hidden,
        "intermediate": problem.intermediate,
        "experts": problem.experts,
        "top-k": problem.top_k,
        "dtype": dtype_name(problem.dtype),
        "quant": problem.quant,
        "activation": problem.act,
        **_unusual(problem),
        **case.options(),
    }
    words = ["mk", "test", "--one"]
    for name, value in options.items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return shlex.join(words)


def _unusual(problem: Problem) -> dict[str, object]:
    """Options beyond the first eight, where they are not the default."""
    ids_dtype = problem.ids_dtype
    options = {
        "local-experts": (problem.local_experts, None),
        "ids-dtype": (None if ids_dtype is None else dtype_name(ids_dtype), None),
        "bias": (problem.bias, False),
        "expert-map": (problem.expert_map, False),
        "router-weight-on-input": (problem.apply_router_weight_on_input, False),
        "routed-scaling-factor": (problem.routed_scaling_factor, 1.0),
        "combine": (problem.combine.value, Combine.SUM.value),
        "inplace": (problem.inplace, False),
        "fp32-precision": (problem.fp32_precision, "ieee"),
        "chunk-tokens": (problem.chunk_tokens, None),
        "graph": (problem.graph, False),
        "batch-invariant": (problem.batch_invariant, False),
        "world-size": (problem.parallel.world_size, 1),
    }
    return {name: value for name, (value, default) in options.items() if value != default}
