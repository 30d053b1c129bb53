"""Cases over ranks: a problem, the number of tokens of each rank, and the placement of experts.

As in `lists`, there is a base case, a case with one change per axis, and small products over axes
that interact. The number of tokens differs between ranks and may be 0. Experts are placed in blocks
of unequal size, round-robin, or with copies.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from modular_kernel.catalog import check, load_catalog
from modular_kernel.compatibility.support import Verdict
from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.problem import (
    MAX_TOP_K,
    ActivationSpec,
    Combine,
    Machine,
    Parallel,
    Problem,
)
from modular_kernel.spec.quantization import external_names
from modular_kernel.testing.cases import rank_pairs
from modular_kernel.testing.cases.case import Case
from modular_kernel.testing.cases.inputs import ORDINARY, InputVariation
from modular_kernel.testing.cases.lists import BASE
from modular_kernel.testing.cases.nearest import neighbors
from modular_kernel.testing.cases.row_order import in_row_order
from modular_kernel.testing.cases.scenario_names import SCENARIOS, supported_scenarios

Level = Literal["smoke", "full"]
_FP16, _BF16 = torch.float16, torch.bfloat16
_LONG_ROWS = 16400  # more values than a program quantizes at once
_OAI = "swiglu_oai:alpha=1.702,limit=1.0,interleaved=true"


def _with_copies(experts: int, world_size: int) -> Placement:
    """Place experts in blocks, and copy the last expert to the first rank and vice versa."""
    copies: dict[int, tuple[int, ...]] = {experts - 1: (0,), 0: (world_size - 1,)}
    return Placement.linear(experts, world_size).with_copies(copies)


PLACEMENTS: dict[str, Callable[[int, int], Placement]] = {
    "linear": Placement.linear,
    "round_robin": Placement.round_robin,
    "copies": _with_copies,
}


def parse_placement(text: str, experts: int, world_size: int) -> Placement:
    """Parse a placement: a name in PLACEMENTS, or the experts of each rank, such as "0,2/1,3".

    Raise ConfigurationError for any other text.
    """
    if text in PLACEMENTS:
        return PLACEMENTS[text](experts, world_size)
    try:
        return Placement(tuple(tuple(map(int, part.split(","))) for part in text.split("/")))
    except ValueError:
        need = f"one of {', '.join(PLACEMENTS)}, or experts by rank such as 0,2/1,3"
        raise ConfigurationError("placement", got=repr(text), need=need) from None


def placement_name(placement: Placement) -> str:
    """Return the text that `parse_placement` parses into this placement; a name if it has one."""
    experts, world_size = placement.experts, placement.world_size
    for name, make_placement in PLACEMENTS.items():
        if experts >= world_size > 1 and placement == make_placement(experts, world_size):
            return name
    return "/".join(",".join(map(str, slots)) for slots in placement.slots)


@dataclass(frozen=True)
class RankCase(Case):
    """One test case over ranks.

    problem: that of rank 0; other ranks differ in `parallel.rank` only. `problem.tokens` is the
    maximum over the ranks. tokens: the number of tokens of each rank in the first call. fault: the
    fault scenario that is run in addition (see `scenario_names.SCENARIOS`), or "" for none.
    """

    tokens: tuple[int, ...] = ()
    fault: str = ""

    def __post_init__(self) -> None:
        parallel = self.problem.parallel
        if len(self.tokens) != parallel.world_size or parallel.rank:
            got = f"{len(self.tokens)} numbers, rank {parallel.rank}"
            need = f"{parallel.world_size} numbers, one per rank, and the problem of rank 0"
            raise ConfigurationError("tokens", got=got, need=need)
        if max(self.tokens) > self.problem.tokens:
            need = f"at most problem.tokens = {self.problem.tokens} on each rank"
            raise ConfigurationError("tokens", got=self.tokens, need=need)
        if self.fault and self.fault not in SCENARIOS:
            need = f"one of {', '.join(SCENARIOS)}"
            raise ConfigurationError("fault", got=repr(self.fault), need=need)
        if self.replicated and len(set(self.tokens)) > 1:
            need = f"the same number on each rank: {self.prepare_finalize} needs replicated input"
            raise ConfigurationError("tokens", got=self.tokens, need=need)

    @property
    def world_size(self) -> int:
        return self.problem.parallel.world_size

    @property
    def replicated(self) -> bool:
        """Whether every rank passes the same tokens."""
        part = load_catalog().prepare_finalize(self.prepare_finalize)
        return part.requires.replicated_input

    @property
    def global_problem(self) -> Problem:
        """The same layer on one rank with every expert."""
        one_rank = replace(self.problem, parallel=Parallel(), local_experts=None, expert_map=False)
        return replace(one_rank, max_received=None)

    def of_rank(self, rank: int) -> Case:
        """Return the case of one rank."""
        problem = replace(self.problem, parallel=replace(self.problem.parallel, rank=rank))
        pair = self.prepare_finalize, self.experts
        return Case(*pair, problem, self.routing, self.seed, self.variation)

    def verdict(self, machine: Machine) -> Verdict:
        """Return the verdict of the first rank that is refused, or that of rank 0."""
        cases = [self.of_rank(rank) for rank in range(self.world_size)]
        verdicts = [check(c.prepare_finalize, c.experts, c.problem, machine) for c in cases]
        return next((verdict for verdict in verdicts if not verdict.ok), verdicts[0])

    def options(self) -> dict[str, object]:
        return {
            "rank-tokens": ",".join(map(str, self.tokens)),
            "placement": placement_name(self.problem.placement),
            **super().options(),
            **({"fault": self.fault} if self.fault else {}),
        }

    def __str__(self) -> str:
        tokens = "+".join(map(str, self.tokens))
        placement = placement_name(self.problem.placement)
        fault = f"-{self.fault}" if self.fault else ""
        return f"{super().__str__()}-{tokens}-{placement}{fault}"


@dataclass(frozen=True)
class RankSelection:
    """The valid cases of a pairing over ranks, and those that the rules refuse, with verdicts.

    replacements: (refused case, case of a supported shape that replaces it).
    """

    cases: tuple[RankCase, ...]
    refused: tuple[tuple[RankCase, Verdict], ...]
    replacements: tuple[tuple[RankCase, RankCase], ...] = ()


@dataclass(frozen=True)
class Variant:
    """A case without its pairing and number of ranks.

    tokens: number of tokens of each rank, repeated cyclically. With replicated input, every rank
    passes the maximum. fault, variation: as in RankCase. max_tokens: lower bound of
    `problem.tokens`, for a problem that allows more tokens than any rank passes.
    """

    problem: Problem
    placement: str
    tokens: tuple[int, ...]
    routing: str
    fault: str = ""
    variation: InputVariation = ORDINARY
    max_tokens: int = 0

    def case(self, prepare_finalize: str, experts: str, world_size: int) -> RankCase:
        make_placement = PLACEMENTS[self.placement]
        placement: Placement | Literal["linear"] = "linear"
        if self.placement != "linear":
            placement = make_placement(self.problem.experts, world_size)
        tokens = tuple(self.tokens[rank % len(self.tokens)] for rank in range(world_size))
        part = load_catalog().prepare_finalize(prepare_finalize)
        if part.requires.replicated_input:
            tokens = (max(tokens),) * world_size
        problem_tokens, parallel = max(*tokens, self.max_tokens), Parallel(world_size, placement)
        problem = replace(self.problem, tokens=problem_tokens, parallel=parallel)
        return RankCase(
            prepare_finalize,
            experts,
            in_row_order(problem, experts),
            self.routing,
            variation=self.variation,
            tokens=tokens,
            fault=self.fault,
        )


def rank_cases_for(
    prepare_finalize: str,
    experts: str,
    machine: Machine,
    world_size: int,
    level: Level = "smoke",
    ranks_per_host: int | None = None,
) -> RankSelection:
    """Return every case of `level` for a pairing over `world_size` ranks, checked on `machine`.

    A case that is refused for its shape alone is replaced by the nearest supported one.
    ranks_per_host: None means that all ranks are on one host.
    """
    cases: list[RankCase] = []
    refused: list[tuple[RankCase, Verdict]] = []
    replacements: list[tuple[RankCase, RankCase]] = []
    catalog = load_catalog()
    part = catalog.prepare_finalize(prepare_finalize)
    scenarios = ("", *supported_scenarios(part, machine))
    interpreted = "triton" in catalog.experts(experts).requires.packages
    for variant in rank_variants(world_size, level):
        # While one rank interprets such deep GEMMs, the deadline of the other ranks expires.
        exceeds_deadline = interpreted and variant.problem.hidden >= _LONG_ROWS
        # The same holds if a part passes the padding rows of many ranks to the experts.
        exceeds_deadline |= (
            bool(variant.max_tokens) and part.requires.padding is not None and world_size > 2
        )
        if exceeds_deadline or variant.fault not in scenarios:
            continue
        case = variant.case(prepare_finalize, experts, world_size)
        verdict = case.verdict(machine)
        accepted: RankCase | None = case
        if not verdict.ok:
            refused.append((case, verdict))
            candidates = (
                neighbor.case(prepare_finalize, experts, world_size)
                for neighbor in neighbors(variant, verdict, world_size)
            )
            accepted = next(
                (candidate for candidate in candidates if candidate.verdict(machine).ok), None
            )
            if accepted is not None:
                replacements.append((case, accepted))
        # Several refused cases may have the same replacement.
        if accepted is not None and accepted not in cases:
            cases.append(accepted)
    selection = RankSelection(tuple(cases), tuple(refused), tuple(replacements))
    return selection if ranks_per_host is None else _on_hosts(selection, ranks_per_host, machine)


def _on_hosts(selection: RankSelection, ranks_per_host: int, machine: Machine) -> RankSelection:
    """Return the selection for ranks on several hosts, checked again."""
    cases, refused = [], list(selection.refused)
    for case in selection.cases:
        parallel = replace(case.problem.parallel, ranks_per_host=ranks_per_host)
        on_hosts = replace(case, problem=replace(case.problem, parallel=parallel))
        verdict = on_hosts.verdict(machine)
        if verdict.ok:
            cases.append(on_hosts)
        else:
            refused.insert(0, (on_hosts, verdict))
    return RankSelection(tuple(cases), tuple(refused), selection.replacements)


def rank_pairings(
    machine: Machine, world_size: int, level: Level = "smoke"
) -> tuple[tuple[str, str], ...]:
    """Return every pairing in the catalog with a valid case of `level` over `world_size` ranks."""
    catalog = load_catalog()
    return tuple(
        (pf, experts)
        for pf in catalog.names("prepare_finalize")
        for experts in catalog.names("experts")
        if rank_cases_for(pf, experts, machine, world_size, level).cases
    )


def rank_variants(world_size: int, level: Level) -> tuple[Variant, ...]:
    """Return the variants of `level`.

    The base has 2 * world_size + 1 experts and at most seven tokens per rank.
    """
    base = replace(BASE, tokens=7, experts=2 * world_size + 1)
    variants = [*_smoke(base, world_size)]
    if level == "full":
        variants += [*_full(base, world_size), *_pairwise(world_size)]
    return tuple(dict.fromkeys(variants))


UNEVEN = (7, 4, 0, 5)


def _variant(
    base: Problem,
    routing: str = "uniform",
    *,
    placement: str = "linear",
    tokens: Sequence[int] = UNEVEN,
    **changes: Any,
) -> Variant:
    return Variant(replace(base, **changes), placement, tuple(tokens), routing)


def _smoke(base: Problem, world_size: int) -> Iterator[Variant]:
    """Yield every placement, zero tokens on some and on all ranks, and each other axis once."""
    even = replace(base, experts=2 * world_size)
    on_input = replace(even, apply_router_weight_on_input=True, top_k=1)
    yield _variant(base)
    yield _variant(even, tokens=(0, 5))
    yield _variant(even, "zipf", bias=True, routed_scaling_factor=2.5, dtype=_BF16)
    yield _variant(base, "skips", placement="round_robin", dtype=_BF16, bias=True, activation=_OAI)
    yield _variant(base, "duplicates", placement="copies", dtype=_FP16, top_k=3)
    yield _variant(base, placement="round_robin", tokens=(0,))
    yield _variant(base, "out_of_range", placement="copies", tokens=(5, 0), ids_dtype=torch.int64)
    yield _variant(base, "all_to_one", inplace=True, activation="relu2", tokens=(4, 7))
    yield _variant(on_input, "empty_experts")
    yield _variant(even, hidden=160, intermediate=96, dtype=_BF16, quant="fp8_w8a8_block")
    yield _variant(base, placement="round_robin", lora="adapters=3,rank=7")
    wide = replace(even, ids_dtype=torch.int64, dtype=_BF16, lora="adapters=3,rank=7", bias=True)
    yield _variant(wide, "beyond_int32", placement="copies", tokens=(0, 5))
    yield _variant(base, "skips", graph=True, placement="copies")
    block = "fp8_w8a8_block:block=32x32"
    wide = replace(even, hidden=160, intermediate=96, dtype=_BF16)
    yield _variant(wide, tokens=(0, 5), graph=True, quant=block)
    ties = InputVariation(values="ties")
    int8 = replace(even, hidden=64, intermediate=32, dtype=_BF16, quant="int8_w8a8_channel")
    yield Variant(int8, "round_robin", (4, 0), "skips", variation=ties)


def _full(base: Problem, world_size: int) -> Iterator[Variant]:
    change = partial(_variant, base)
    even = replace(base, experts=2 * world_size)
    wide = replace(base, hidden=160, intermediate=96, dtype=_BF16)
    for placement in PLACEMENTS:
        for routing in ("uniform", "all_to_one", "zipf", "skips", "out_of_range", "all_skipped"):
            yield change(routing, placement=placement)
        for dtype in (_FP16, _BF16):
            yield change(placement=placement, dtype=dtype, top_k=3, routed_scaling_factor=2.5)
        token_counts: tuple[tuple[int, ...], ...] = ((0, 0, 0, 7), (1,), (1, 0), (17, 3))
        for tokens in token_counts:
            yield change(placement=placement, tokens=tokens)
        yield change("duplicates", placement=placement, bias=True, top_k=4, ids_dtype=torch.int64)
    for routing in ("uniform", "zipf", "out_of_range"):
        yield _variant(even, routing)
    for edge in (15, 16, 17, 33):
        yield change("all_to_one", tokens=(edge, 1), top_k=1, dtype=_BF16)
    yield change("skips", hidden=16, intermediate=16, tokens=(83, 46))  # more pairs than a chunk
    yield change(experts=world_size, top_k=1)
    yield change(experts=8 * world_size + 3, top_k=8, placement="round_robin")
    yield change(experts=16 * world_size, top_k=17, dtype=_BF16)
    yield change("skips", experts=16 * world_size + 3, top_k=22, placement="round_robin")
    yield change("duplicates", experts=3 * world_size, top_k=MAX_TOP_K, placement="copies")
    yield change(apply_router_weight_on_input=True, top_k=2, bias=True)
    yield change("skips", apply_router_weight_on_input=True, top_k=1, bias=True, dtype=_BF16)
    for combine in (Combine.TOPK_WEIGHTED, Combine.TOPK_UNWEIGHTED):
        yield change("skips", combine=combine, routed_scaling_factor=2.5)
    yield change(chunk_tokens=4)
    # The number of tokens a rank receives if it has the experts of all tokens.
    total_tokens = sum(UNEVEN[rank % len(UNEVEN)] for rank in range(world_size))
    yield change("all_to_one", max_received=total_tokens)
    yield change("duplicates", inplace=True, dtype=_BF16, top_k=3)
    yield change(hidden=47, intermediate=33, dtype=_BF16, activation=_OAI)
    for quant in (
        "fp8_w8a8_tensor",
        "fp8_w8a8_tensor:static=true",
        "fp8_w8a8_channel",
        "fp8_w8a8_block:block=48x64",
        "int8_w8a8_channel",
        "int8_w8a16_group:group=64",
        "int4_w4a16_group:group=32,zero_points=true",
        "mxfp4_w4a16",
        "nvfp4_w4a16",
        "nvfp4_w4a4",
        "fp8_w8a16_block:block=48x64",
        "int4_w4a16_act_order:group=32",
    ):
        yield _variant(wide, quant=quant)
    yield from _captured(base, world_size)
    yield from _adapters(base, world_size)
    for fault in SCENARIOS:
        yield Variant(base, "linear", UNEVEN, "uniform", fault)
    yield from _quantized(replace(base, dtype=_BF16), world_size)
    block = "fp8_w8a8_block:block=48x64"
    yield _variant(wide, "skips", quant=block, placement="copies", top_k=3, bias=True)
    yield _variant(wide, "zipf", quant=block, placement="round_robin", tokens=(0, 17))
    # More rows than one program quantizes. The group size divides I, but not H.
    yield _variant(wide, intermediate=128, quant=block, tokens=(35, 2))


def _pairwise(world_size: int) -> Iterator[Variant]:
    """Yield the pairwise-covering variants of features of a layer over ranks."""
    for row in rank_pairs.rank_array(world_size).rows:
        values, problem = rank_pairs.values_of(row), rank_pairs.problem_of(row, world_size)
        args = values["placement"], values["tokens"], values["routing"]
        yield Variant(problem, *args, variation=rank_pairs.variation_of(row))


def _captured(base: Problem, world_size: int) -> Iterator[Variant]:
    """Yield problems whose calls can be captured in a CUDA graph.

    Parts may then exchange rows in another way, without the host.
    """
    base = replace(base, graph=True)
    change = partial(_variant, base)
    for placement in PLACEMENTS:
        for routing in ("uniform", "all_to_one", "out_of_range"):
            yield change(routing, placement=placement)
    for tokens in ((0, 0, 0, 7), (0,), (17, 3)):
        yield change("zipf", tokens=tokens, dtype=_BF16)
    yield change("all_skipped", bias=True, routed_scaling_factor=2.5)
    yield change("duplicates", top_k=4, ids_dtype=torch.int64, placement="copies", bias=True)
    yield change("skips", apply_router_weight_on_input=True, top_k=1, bias=True, dtype=_BF16)
    yield change(inplace=True, dtype=_FP16, activation="relu2")
    yield change(chunk_tokens=4)
    yield change("all_to_one", max_received=world_size * 7)
    yield change("skips", lora="adapters=3,rank=7", placement="round_robin", top_k=3)
    wide = replace(base, hidden=160, intermediate=96, dtype=_BF16)
    for quant in (
        "fp8_w8a8_tensor",
        "fp8_w8a8_tensor:static=true",
        "fp8_w8a8_channel",
        "fp8_w8a8_block:block=32x32",
        "int8_w8a8_channel",
        "int4_w4a16_group:group=32,zero_points=true",
        "mxfp4_w4a16",
        "nvfp4_w4a4",
    ):
        yield _variant(wide, quant=quant)


def _adapters(base: Problem, world_size: int) -> Iterator[Variant]:
    """Yield LoRA cases: slots travel with the tokens, matrices are placed with the experts."""
    with_adapters = replace(base, lora="adapters=3,rank=7")
    yield _variant(with_adapters, "skips", placement="copies", top_k=3, bias=True)
    yield _variant(with_adapters, placement="round_robin", tokens=(0, 9), dtype=_BF16)
    yield _variant(with_adapters, lora="adapters=4,rank=20,a13=shared,outer=shared", tokens=(5, 3))
    for slot_pattern in ("nobody", "without"):
        variation = InputVariation(slot_pattern=slot_pattern)
        yield Variant(with_adapters, "linear", UNEVEN, "uniform", variation=variation)
    block = replace(with_adapters, hidden=160, intermediate=96, quant="fp8_w8a8_block:block=32x32")
    yield _variant(block, dtype=_BF16)


def _quantized(base: Problem, world_size: int) -> Iterator[Variant]:
    """Yield shapes and values that are difficult for scales.

    Group sizes that are not a power of two; rows longer than one program holds; one scale for all
    tokens, determined by a value on one rank; values so small that the scale is clamped. Also each
    scheme of another package.
    """
    one_expert_each = replace(base, experts=2 * world_size, top_k=1)
    ragged = replace(one_expert_each, hidden=160, intermediate=136)
    yield _variant(ragged, quant="int8_w8a8_block:block=32x96", dtype=_FP16)
    yield _variant(
        one_expert_each, hidden=2080, intermediate=16, quant="fp8_w8a8_block:block=32x32"
    )
    # problem.tokens is so large that a program reads more of a row at once. Calls pass few tokens.
    long_rows = replace(one_expert_each, hidden=2080, intermediate=16)
    yield Variant(long_rows, "linear", (3, 1), "uniform", max_tokens=513)
    peaks, faint = InputVariation(values="peaks"), InputVariation(values="faint")
    wide = replace(
        one_expert_each, hidden=1040, intermediate=16, quant="fp8_w8a8_tensor", dtype=_FP16
    )
    yield Variant(wide, "linear", (2, 5), "all_to_one", variation=peaks)
    long = replace(one_expert_each, hidden=_LONG_ROWS, intermediate=16)
    wide_groups = f"fp8_w8a8_block:block=16x{_LONG_ROWS}"
    for quant, tokens in (("fp8_w8a8_channel", (2, 1)), (wide_groups, (5, 4))):
        yield Variant(replace(long, quant=quant), "linear", tokens, "uniform", variation=peaks)
    # The only token of all ranks is zero, and so is the maximum that determines the common scale.
    zero_input = replace(one_expert_each, intermediate=16, bias=True, quant="fp8_w8a8_tensor")
    yield Variant(
        zero_input, "linear", (1, 0), "uniform", variation=InputVariation(values="zero_rows")
    )
    # A NaN in a token, in the router weight of a pair, and in the bias of an expert: rows of other
    # ranks must not become NaN.
    for quant in ("none", "int8_w8a8_channel", "fp8_w8a8_block:block=48x64"):
        nan = InputVariation(nan="x+topk_weights+b2")
        with_nan = replace(
            one_expert_each, experts=4 * world_size, quant=quant, bias=True, dtype=_BF16
        )
        yield Variant(with_nan, "linear", (5, 3), "uniform", variation=nan)
    for quant in external_names():
        yield _variant(one_expert_each, hidden=160, intermediate=72, quant=quant, dtype=_BF16)
    linear = ActivationSpec.parse("swiglu_oai:alpha=1.702,limit=1.0")
    for quant in ("fp8_w8a8_channel", "fp8_w8a8_tensor"):
        small = replace(one_expert_each, intermediate=16, activation=linear, quant=quant)
        yield Variant(small, "linear", (5, 3), "uniform", variation=faint)
