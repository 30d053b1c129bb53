"""Measure how well cases cover the code paths of an experts component ("part").

A part selects its code path by the shape of a call. A scheme may therefore have many cases, none of
which enters its fast path. Coverage is measured in combinations (`PathCombination`) of a code path,
a quantization scheme, and the value of one property of the call, such as "bias=True".
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from modular_kernel.catalog import check, load_catalog
from modular_kernel.contracts import PermuteExpertsUnpermute
from modular_kernel.quant.quantized_weights import weight_specs
from modular_kernel.spec.problem import Machine, Problem, dtype_name
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import ExpertWeights
from modular_kernel.testing.cases.adapters import SLOT_PATTERNS
from modular_kernel.testing.cases.case import Case
from modular_kernel.testing.cases.inputs import LAYOUTS, InputVariation, make_inputs
from modular_kernel.testing.cases.quantized import choose_short_scale_dtype, list_schemes

# Token counts that select different paths. They are ascending, so that the first count that enters
# a path gives the cheapest case for the path.
_TOKENS = (1, 3, 9, 33, 97, 289)
# Few experts, so that the mean number of rows per expert covers small and large values.
_BASE = Problem(
    tokens=_TOKENS[-1], hidden=128, intermediate=64, experts=3, top_k=2, dtype=torch.bfloat16
)
_FLAGS = ("zero_points", "static", "repacked")
# Limit for paths of other packages, because interpreting cases with more tokens takes minutes.
_MAX_EXTERNAL_TOKENS = 9


@dataclass(frozen=True, order=True)
class PathCombination:
    """A code path, a scheme, and one property such as "bias=True" or "layout=spaced"."""

    path: str
    scheme: str
    value: str

    def __str__(self) -> str:
        return f"{self.path} x {self.scheme} x {self.value}"


@dataclass(frozen=True)
class Probe:
    """A call that enters a combination: its problem and the layout of its tensors.

    tokens: ascending token counts of `problem` that enter the same path.
    """

    problem: Problem
    variation: InputVariation
    tokens: tuple[int, ...] = ()


def list_combinations(
    path: str, problem: Problem, weights: ExpertWeights
) -> frozenset[PathCombination]:
    """Return the combinations of a call of `problem` with these weights."""
    scales = "none" if weights.w1_scale is None else dtype_name(weights.w1_scale.dtype)
    values = {
        "layout": detect_layout(weights.w1),
        "bias": problem.bias,
        "scales": scales,
        "dtype": dtype_name(problem.dtype),
        "adapters": problem.adapters is not None,
        "batch_invariant": problem.batch_invariant,
        "interleaved": problem.act.interleaved,
    }
    scheme = format_scheme(problem.scheme)
    return frozenset(
        PathCombination(path, scheme, f"{axis}={value}") for axis, value in values.items()
    )


def format_scheme(scheme: QuantScheme) -> str:
    """Format a scheme without its group sizes, which do not distinguish combinations."""
    flags = [flag for flag in _FLAGS if getattr(scheme, flag)]
    return ":".join([scheme.name, *flags])


def detect_layout(w_eNK: torch.Tensor) -> str:
    """Return the memory layout of weights, one of LAYOUTS."""
    if not w_eNK.is_contiguous():
        return "spaced" if w_eNK.stride(-1) == 1 else "transposed"
    return "shifted" if w_eNK.data_ptr() % 16 else "plain"


@cache
def reachable_combinations(
    prepare_finalize: str, experts: str, machine: Machine
) -> dict[PathCombination, Probe]:
    """Return every combination that a valid call of the pairing can enter on `machine`.

    Maps each combination to the probe with the fewest tokens that enters it. Returns {} for a part
    with a single path, whose `path_name` is empty.
    """
    probes: dict[PathCombination, Probe] = {}
    part = load_catalog().experts(experts)
    for problem, variation in _list_probes():
        if not check(prepare_finalize, experts, problem, machine).ok:
            continue
        instance = part(problem)
        inputs = make_inputs(problem, "uniform", torch.device("cpu"), variation=variation)
        counts_by_path = dict[str, tuple[int, ...]]()
        for tokens in _TOKENS:
            path = instance.path_name(inputs.x_TH[:tokens], inputs.weights)
            if not path:
                return {}
            counts_by_path[path] = (*counts_by_path.get(path, ()), tokens)
        for path, token_counts in counts_by_path.items():
            probe = Probe(problem.with_tokens(token_counts[0]), variation, token_counts)
            for combination in list_combinations(path, problem, inputs.weights):
                best = probes.get(combination)
                if best is None or best.problem.tokens > token_counts[0]:
                    probes[combination] = probe
    return probes


def list_scale_dtypes(problem: Problem) -> tuple[torch.dtype, ...]:
    """Return the allowed dtypes of weight scales."""
    return weight_specs(problem)["w1_scale"].dtypes


def _list_probes() -> Iterator[tuple[Problem, InputVariation]]:
    """Yield each scheme with every layout, and with one other property changed at a time."""
    changes: tuple[dict[str, Any], ...] = (
        {"bias": True},
        {"dtype": torch.float16},
        {"dtype": torch.float32},
        {"lora": "adapters=3,rank=7"},
        {"batch_invariant": True},
        {"activation": "silu:interleaved=true"},
        {"hidden": 50, "intermediate": 47},
    )
    for quant in ("none", *list_schemes()):
        problem = replace(_BASE, quant=quant)
        for layout in LAYOUTS:
            yield problem, InputVariation(layout=layout)
        for change in changes:
            yield replace(problem, **change), InputVariation()
        if problem.scheme.quantized and choose_short_scale_dtype(problem) in list_scale_dtypes(
            problem
        ):
            yield problem, InputVariation(has_short_scales=True)


def list_path_cases(experts: str) -> Iterator[tuple[Problem, str, InputVariation]]:
    """Yield cases with few tokens, for the paths that the pairwise-covering cases rarely enter.

    Each scheme is combined with every layout. Bias, dtype, scale dtype and the order of gate and up
    rows vary with the layout. Each scheme also has one case with adapters. Yields nothing for parts
    with a single path.
    """
    part = load_catalog().experts(experts)
    if part.path_name is PermuteExpertsUnpermute.path_name:
        return
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    silu, interleaved = "silu", "silu:interleaved=true"
    combinations = (
        ("plain", False, bf16, silu),
        ("spaced", True, fp16, interleaved),
        ("shifted", False, fp32, interleaved),
        ("transposed", True, bf16, silu),
    )
    for quant in ("none", *list_schemes()):
        scheme = QuantScheme.parse(quant)
        if scheme.act_order:
            continue  # a single path supports act_order, and the pairwise-covering cases enter it
        for layout, bias, dtype, activation in combinations[:2] if scheme.packed else combinations:
            changes: dict[str, Any] = {"bias": bias, "dtype": dtype, "activation": activation}
            problem = replace(_BASE, tokens=1, quant=quant, **changes)
            has_short_scales = (
                scheme.quantized
                and layout == "plain"
                and choose_short_scale_dtype(problem) in list_scale_dtypes(problem)
            )
            variation = InputVariation(layout=layout, has_short_scales=has_short_scales)
            yield problem, "uniform", variation
            if scheme.packed:  # packed weights have a second path, for slightly more tokens
                yield replace(problem, tokens=9, experts=5), "skips", variation
        adapted = replace(_BASE, tokens=1, quant=quant, lora="adapters=3,rank=7")
        yield adapted, "uniform", InputVariation()
        if scheme.packed:
            yield (
                replace(_BASE, tokens=5, quant=quant, batch_invariant=True),
                "zipf",
                InputVariation(),
            )


def find_external_paths(experts: str) -> frozenset[str]:
    """Return the names of the part's usable paths that another package provides."""
    paths = [path for path in load_catalog().experts(experts).paths() if not path.error]
    return frozenset(path.name for path in paths if path.origin != paths[0].origin)


def list_external_path_cases(
    prepare_finalize: str, experts: str, machine: Machine
) -> Iterator[tuple[Problem, str, InputVariation]]:
    """Yield cases for the paths of other packages ("external" paths).

    For every scheme that an external path supports, each combination gets a case with the fewest
    tokens that enter its path. A combination of an external path also gets a case with the most
    tokens, up to `_MAX_EXTERNAL_TOKENS`, because a path for few tokens may otherwise have only
    cases with one token.

    The other lists of cases are designed for the built-in paths. An external path computes some
    calls that a built-in path would compute otherwise, and adds combinations of its own.
    """
    external = find_external_paths(experts)
    if not external:
        return
    combinations = reachable_combinations(prepare_finalize, experts, machine)
    schemes = {combination.scheme for combination in combinations if combination.path in external}
    probes = {
        combination: probe
        for combination, probe in combinations.items()
        if combination.scheme in schemes
    }
    for probe in dict.fromkeys(probes.values()):
        yield probe.problem, "skips", probe.variation
    external_probes = (
        probe for combination, probe in probes.items() if combination.path in external
    )
    for probe in dict.fromkeys(external_probes):
        allowed_counts = (count for count in probe.tokens if count <= _MAX_EXTERNAL_TOKENS)
        tokens = max(allowed_counts, default=0)
        if tokens > probe.problem.tokens:
            yield probe.problem.with_tokens(tokens), "uniform", probe.variation


def predict_combinations(case: Case) -> frozenset[PathCombination]:
    """Return the combinations that the calls of a case enter, without running them.

    The PrepareAndFinalize is assumed not to change the tokens.
    """
    if case.variation.slot_pattern == "without":
        case = replace(
            case,
            problem=replace(case.problem, lora="none"),
            variation=replace(case.variation, slot_pattern=SLOT_PATTERNS[0]),
        )
    part = load_catalog().experts(case.experts)
    instance, combinations, tokens = part(case.problem), set[PathCombination](), case.problem.tokens
    device = torch.device("cpu")
    for seed_offset, count, strided in ((0, tokens, False), (2, (tokens + 1) // 2, True)):
        problem = case.problem.with_tokens(count)
        seed = 1000 * case.seed + seed_offset
        inputs = make_inputs(
            problem, case.routing, device, seed=seed, strided=strided, variation=case.variation
        )
        chunk = min(count, problem.chunk_tokens or count)
        remainder = count % chunk if chunk else 0
        for rows in {chunk, remainder} - {0}:
            path = instance.path_name(inputs.x_TH[:rows], inputs.weights)
            combinations |= list_combinations(path, case.problem, inputs.weights)
    return frozenset(combinations)
