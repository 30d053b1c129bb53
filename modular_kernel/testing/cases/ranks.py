"""Cases with several ranks: a problem, the token count of each rank, and a placement of experts.

The lists have a base case, cases that change one property each, and combinations of properties that
interact. The number of tokens differs between ranks and may be 0. Experts are placed in blocks of
unequal size, round-robin, or with copies.
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
from modular_kernel.spec.quantization import list_external_schemes
from modular_kernel.testing.cases import rank_pairs
from modular_kernel.testing.cases.case import Case
from modular_kernel.testing.cases.inputs import ORDINARY, InputVariation
from modular_kernel.testing.cases.lists import BASE
from modular_kernel.testing.cases.nearest import list_neighbors
from modular_kernel.testing.cases.row_order import apply_part_row_order
from modular_kernel.testing.cases.scenario_names import (
    SCENARIOS,
    can_skip_host_handshakes,
    supported_scenarios,
)

Level = Literal["smoke", "full"]
_FP16, _BF16 = torch.float16, torch.bfloat16
_LONG_ROW_SIZE = 16400  # more values than a program quantizes at once
_SWIGLU_OAI = "swiglu_oai:alpha=1.702,limit=1.0,interleaved=true"


def _place_with_copies(experts: int, world_size: int) -> Placement:
    """Place experts in blocks; copy the last expert to rank 0, and expert 0 to the last rank."""
    copies: dict[int, tuple[int, ...]] = {experts - 1: (0,), 0: (world_size - 1,)}
    return Placement.linear(experts, world_size).with_copies(copies)


PLACEMENTS: dict[str, Callable[[int, int], Placement]] = {
    "linear": Placement.linear,
    "round_robin": Placement.round_robin,
    "copies": _place_with_copies,
}


def parse_placement(text: str, experts: int, world_size: int) -> Placement:
    """Parse a placement: a name in PLACEMENTS, or the experts of each rank, such as "0,2/1,3".

    Raises ConfigurationError for any other text.
    """
    if text in PLACEMENTS:
        return PLACEMENTS[text](experts, world_size)
    try:
        return Placement(tuple(tuple(map(int, slots.split(","))) for slots in text.split("/")))
    except ValueError:
        need = f"one of {', '.join(PLACEMENTS)}, or experts by rank such as 0,2/1,3"
        raise ConfigurationError("placement", got=repr(text), need=need) from None


def placement_name(placement: Placement) -> str:
    """Return the text from which `parse_placement` makes this placement; a name if possible."""
    experts, world_size = placement.experts, placement.world_size
    for name, make_placement in PLACEMENTS.items():
        if experts >= world_size > 1 and placement == make_placement(experts, world_size):
            return name
    return "/".join(",".join(map(str, slots)) for slots in placement.slots)


@dataclass(frozen=True)
class RankCase(Case):
    """One test case with several ranks.

    Attributes:
        problem: the problem of rank 0. On other ranks, only `parallel.rank` differs.
            `problem.tokens` is the maximum over all ranks.
        tokens: the number of tokens of each rank in the first call.
        fault: a fault scenario to run in addition, one of `scenario_names.SCENARIOS`, or "".
        checked: argument of the part's manager. If False, only the first call of each layer has a
            handshake on the host.
    """

    tokens: tuple[int, ...] = ()
    fault: str = ""
    checked: bool = True

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
        part = load_catalog().prepare_finalize(self.prepare_finalize)
        if not self.checked and not can_skip_host_handshakes(part):
            need = f"handshakes on the host, which {self.prepare_finalize} cannot skip"
            raise ConfigurationError("unchecked", got=True, need=need)
        if self.is_replicated and len(set(self.tokens)) > 1:
            need = f"the same number on each rank: {self.prepare_finalize} needs replicated input"
            raise ConfigurationError("tokens", got=self.tokens, need=need)

    @property
    def world_size(self) -> int:
        return self.problem.parallel.world_size

    @property
    def is_replicated(self) -> bool:
        """Whether every rank passes the same tokens."""
        part = load_catalog().prepare_finalize(self.prepare_finalize)
        return part.requires.replicated_input

    @property
    def global_problem(self) -> Problem:
        """The problem of the same layer on a single rank with all experts."""
        one_rank = replace(self.problem, parallel=Parallel(), local_experts=None, expert_map=False)
        return replace(one_rank, max_received=None)

    def of_rank(self, rank: int) -> Case:
        problem = replace(self.problem, parallel=replace(self.problem.parallel, rank=rank))
        pairing = self.prepare_finalize, self.experts
        return Case(*pairing, problem, self.routing, self.seed, self.variation)

    def verdict(self, machine: Machine) -> Verdict:
        """Return the verdict of the first refused rank, or of rank 0 if no rank is refused."""
        cases = [self.of_rank(rank) for rank in range(self.world_size)]
        verdicts = [check(c.prepare_finalize, c.experts, c.problem, machine) for c in cases]
        return next((verdict for verdict in verdicts if not verdict.ok), verdicts[0])

    def options(self) -> dict[str, object]:
        return {
            "rank-tokens": ",".join(map(str, self.tokens)),
            "placement": placement_name(self.problem.placement),
            **super().options(),
            **({"fault": self.fault} if self.fault else {}),
            **({} if self.checked else {"unchecked": True}),
        }

    def __str__(self) -> str:
        tokens = "+".join(map(str, self.tokens))
        placement = placement_name(self.problem.placement)
        fault = f"-{self.fault}" if self.fault else ""
        unchecked = "" if self.checked else "-unchecked"
        return f"{super().__str__()}-{tokens}-{placement}{fault}{unchecked}"


@dataclass(frozen=True)
class RankSelection:
    """Cases of a pairing with several ranks.

    Attributes:
        cases: the valid cases, which the pairing must pass.
        refused: the cases that the rules refuse, with their verdicts.
        replacements: pairs of a refused case and the supported case that replaces it.
    """

    cases: tuple[RankCase, ...]
    refused: tuple[tuple[RankCase, Verdict], ...]
    replacements: tuple[tuple[RankCase, RankCase], ...] = ()


@dataclass(frozen=True)
class Variant:
    """A case without its pairing and number of ranks.

    Attributes:
        problem: the problem as if it ran on one rank.
        placement: a name in PLACEMENTS.
        tokens: number of tokens of each rank, repeated cyclically. With replicated input, every
            rank passes the maximum.
        routing, fault, variation: as in RankCase.
        checked: as in RankCase; ignored for parts that always have handshakes on the host.
        max_tokens: lower bound of `problem.tokens` in the case, to allow more tokens than any rank
            passes.
    """

    problem: Problem
    placement: str
    tokens: tuple[int, ...]
    routing: str
    fault: str = ""
    variation: InputVariation = ORDINARY
    max_tokens: int = 0
    checked: bool = True

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
            apply_part_row_order(problem, experts),
            self.routing,
            variation=self.variation,
            tokens=tokens,
            fault=self.fault,
            checked=self.checked or not can_skip_host_handshakes(part),
        )


def rank_cases_for(
    prepare_finalize: str,
    experts: str,
    machine: Machine,
    world_size: int,
    level: Level = "smoke",
    ranks_per_host: int | None = None,
) -> RankSelection:
    """Return every case of `level` for a pairing with `world_size` ranks, checked for `machine`.

    A case that is refused only because of its shape is replaced with the nearest supported case.

    ranks_per_host: number of ranks per host; None means that all ranks are on one host.
    """
    cases: list[RankCase] = []
    refused: list[tuple[RankCase, Verdict]] = []
    replacements: list[tuple[RankCase, RankCase]] = []
    catalog = load_catalog()
    part = catalog.prepare_finalize(prepare_finalize)
    scenarios = ("", *supported_scenarios(part, machine))
    uses_triton = "triton" in catalog.experts(experts).requires.packages
    for variant in list_rank_variants(world_size, level):
        # A rank that interprets GEMMs with such a large K takes so long that its peers time out.
        times_out = uses_triton and variant.problem.hidden >= _LONG_ROW_SIZE
        # Interpreting the padding rows of many ranks also takes too long.
        times_out |= (
            bool(variant.max_tokens) and part.requires.padding is not None and world_size > 2
        )
        if times_out or variant.fault not in scenarios:
            continue
        case = variant.case(prepare_finalize, experts, world_size)
        verdict = case.verdict(machine)
        supported_case: RankCase | None = case
        if not verdict.ok:
            refused.append((case, verdict))
            candidates = (
                neighbor.case(prepare_finalize, experts, world_size)
                for neighbor in list_neighbors(variant, verdict, world_size)
            )
            supported_case = next(
                (candidate for candidate in candidates if candidate.verdict(machine).ok), None
            )
            if supported_case is not None:
                replacements.append((case, supported_case))
        # Several refused cases may have the same replacement.
        if supported_case is not None and supported_case not in cases:
            cases.append(supported_case)
    selection = RankSelection(tuple(cases), tuple(refused), tuple(replacements))
    return (
        selection if ranks_per_host is None else _place_on_hosts(selection, ranks_per_host, machine)
    )


def _place_on_hosts(
    selection: RankSelection, ranks_per_host: int, machine: Machine
) -> RankSelection:
    """Return the cases with `ranks_per_host`; cases that become invalid move to `refused`."""
    cases, refused = [], list(selection.refused)
    for case in selection.cases:
        parallel = replace(case.problem.parallel, ranks_per_host=ranks_per_host)
        placed_case = replace(case, problem=replace(case.problem, parallel=parallel))
        verdict = placed_case.verdict(machine)
        if verdict.ok:
            cases.append(placed_case)
        else:
            refused.insert(0, (placed_case, verdict))
    return RankSelection(tuple(cases), tuple(refused), selection.replacements)


def rank_pairings(
    machine: Machine, world_size: int, level: Level = "smoke"
) -> tuple[tuple[str, str], ...]:
    """Return every pairing with a valid case of `level` with `world_size` ranks."""
    catalog = load_catalog()
    return tuple(
        (pf, experts)
        for pf in catalog.names("prepare_finalize")
        for experts in catalog.names("experts")
        if rank_cases_for(pf, experts, machine, world_size, level).cases
    )


def list_rank_variants(world_size: int, level: Level) -> tuple[Variant, ...]:
    """Return the variants of `level`.

    The base problem has 2 * world_size + 1 experts and at most seven tokens per rank.
    """
    base = replace(BASE, tokens=7, experts=2 * world_size + 1)
    variants = [*_list_smoke_variants(base, world_size)]
    if level == "full":
        variants += [*_list_full_variants(base, world_size), *_list_pairwise_variants(world_size)]
        variants += _list_unchecked_variants(base, world_size)
    return tuple(dict.fromkeys(variants))


UNEVEN_TOKENS = (7, 4, 0, 5)


def _make_variant(
    base: Problem,
    routing: str = "uniform",
    *,
    placement: str = "linear",
    tokens: Sequence[int] = UNEVEN_TOKENS,
    checked: bool = True,
    **changes: Any,
) -> Variant:
    problem = replace(base, **changes)
    return Variant(problem, placement, tuple(tokens), routing, checked=checked)


def _list_smoke_variants(base: Problem, world_size: int) -> Iterator[Variant]:
    even = replace(base, experts=2 * world_size)
    on_input = replace(even, apply_router_weight_on_input=True, top_k=1)
    yield _make_variant(base)
    yield _make_variant(even, tokens=(0, 5))
    yield _make_variant(even, "zipf", bias=True, routed_scaling_factor=2.5, dtype=_BF16)
    yield _make_variant(
        base, "skips", placement="round_robin", dtype=_BF16, bias=True, activation=_SWIGLU_OAI
    )
    yield _make_variant(base, "duplicates", placement="copies", dtype=_FP16, top_k=3)
    yield _make_variant(base, placement="round_robin", tokens=(0,))
    yield _make_variant(
        base, "out_of_range", placement="copies", tokens=(5, 0), ids_dtype=torch.int64
    )
    yield _make_variant(base, "all_to_one", inplace=True, activation="relu2", tokens=(4, 7))
    yield _make_variant(on_input, "empty_experts")
    yield _make_variant(even, hidden=160, intermediate=96, dtype=_BF16, quant="fp8_w8a8_block")
    yield _make_variant(base, placement="round_robin", lora="adapters=3,rank=7")
    wide = replace(even, ids_dtype=torch.int64, dtype=_BF16, lora="adapters=3,rank=7", bias=True)
    yield _make_variant(wide, "beyond_int32", placement="copies", tokens=(0, 5))
    yield _make_variant(base, "skips", graph=True, placement="copies")
    block = "fp8_w8a8_block:block=32x32"
    wide = replace(even, hidden=160, intermediate=96, dtype=_BF16)
    yield _make_variant(wide, tokens=(0, 5), graph=True, quant=block)
    ties = InputVariation(values="ties")
    int8 = replace(even, hidden=64, intermediate=32, dtype=_BF16, quant="int8_w8a8_channel")
    yield Variant(int8, "round_robin", (4, 0), "skips", variation=ties)


def _list_full_variants(base: Problem, world_size: int) -> Iterator[Variant]:
    make_variant = partial(_make_variant, base)
    even = replace(base, experts=2 * world_size)
    wide = replace(base, hidden=160, intermediate=96, dtype=_BF16)
    for placement in PLACEMENTS:
        for routing in ("uniform", "all_to_one", "zipf", "skips", "out_of_range", "all_skipped"):
            yield make_variant(routing, placement=placement)
        for dtype in (_FP16, _BF16):
            yield make_variant(placement=placement, dtype=dtype, top_k=3, routed_scaling_factor=2.5)
        token_counts: tuple[tuple[int, ...], ...] = ((0, 0, 0, 7), (1,), (1, 0), (17, 3))
        for tokens in token_counts:
            yield make_variant(placement=placement, tokens=tokens)
        yield make_variant(
            "duplicates", placement=placement, bias=True, top_k=4, ids_dtype=torch.int64
        )
    for routing in ("uniform", "zipf", "out_of_range"):
        yield _make_variant(even, routing)
    for max_tokens in (15, 16, 17, 33):
        yield make_variant("all_to_one", tokens=(max_tokens, 1), top_k=1, dtype=_BF16)
    # More pairs than a chunk.
    yield make_variant("skips", hidden=16, intermediate=16, tokens=(83, 46))
    yield make_variant(experts=world_size, top_k=1)
    yield make_variant(experts=8 * world_size + 3, top_k=8, placement="round_robin")
    yield make_variant(experts=16 * world_size, top_k=17, dtype=_BF16)
    yield make_variant("skips", experts=16 * world_size + 3, top_k=22, placement="round_robin")
    yield make_variant("duplicates", experts=3 * world_size, top_k=MAX_TOP_K, placement="copies")
    yield make_variant(apply_router_weight_on_input=True, top_k=2, bias=True)
    yield make_variant("skips", apply_router_weight_on_input=True, top_k=1, bias=True, dtype=_BF16)
    for combine in (Combine.TOPK_WEIGHTED, Combine.TOPK_UNWEIGHTED):
        yield make_variant("skips", combine=combine, routed_scaling_factor=2.5)
    yield make_variant(chunk_tokens=4)
    # The number of tokens that a rank receives if it computes all tokens.
    total_tokens = sum(UNEVEN_TOKENS[rank % len(UNEVEN_TOKENS)] for rank in range(world_size))
    yield make_variant("all_to_one", max_received=total_tokens)
    yield make_variant("duplicates", inplace=True, dtype=_BF16, top_k=3)
    yield make_variant(hidden=47, intermediate=33, dtype=_BF16, activation=_SWIGLU_OAI)
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
        yield _make_variant(wide, quant=quant)
    yield from _list_captured_variants(base, world_size)
    yield from _list_adapter_variants(base, world_size)
    for fault in SCENARIOS:
        yield Variant(base, "linear", UNEVEN_TOKENS, "uniform", fault)
    yield from _list_quantized_variants(replace(base, dtype=_BF16), world_size)
    block = "fp8_w8a8_block:block=48x64"
    yield _make_variant(wide, "skips", quant=block, placement="copies", top_k=3, bias=True)
    yield _make_variant(wide, "zipf", quant=block, placement="round_robin", tokens=(0, 17))
    # The last group of columns has one column, and the only row has one value.
    yield _make_variant(wide, hidden=65, quant="fp8_w8a8_block:block=32x32", tokens=(3, 2))
    one_value = replace(base, hidden=1, intermediate=1, dtype=_BF16)
    yield _make_variant(one_value, quant="fp8_w8a8_channel", tokens=(1,))
    # More rows than one program quantizes. The group size divides I, but not H.
    yield _make_variant(wide, intermediate=128, quant=block, tokens=(35, 2))


def _list_pairwise_variants(world_size: int) -> Iterator[Variant]:
    for row in rank_pairs.draw_rank_array(world_size).rows:
        values, problem = rank_pairs.name_values(row), rank_pairs.build_problem(row, world_size)
        args = values["placement"], values["tokens"], values["routing"]
        variation = rank_pairs.build_variation(row)
        yield Variant(problem, *args, variation=variation, checked=values["checked"])


def _list_unchecked_variants(base: Problem, world_size: int) -> Iterator[Variant]:
    """Yield variants of the full list whose calls have no handshake on the host.

    Parts may exchange blocks of a fixed capacity in these calls.
    """
    make_variant = partial(_make_variant, base, checked=False)
    for placement in PLACEMENTS:
        for routing in ("uniform", "out_of_range"):
            yield make_variant(routing, placement=placement)
    for tokens in ((0, 0, 0, 7), (17, 3)):
        yield make_variant(tokens=tokens)
    yield make_variant("duplicates", placement="copies", bias=True, top_k=4, ids_dtype=torch.int64)
    yield make_variant("skips", apply_router_weight_on_input=True, top_k=1, bias=True, dtype=_BF16)
    yield make_variant(chunk_tokens=4)
    yield make_variant("all_to_one", max_received=world_size * max(UNEVEN_TOKENS))
    lora = "adapters=3,rank=7"
    yield make_variant("skips", placement="copies", top_k=3, bias=True, lora=lora)
    for quant in (
        "fp8_w8a8_tensor",
        "fp8_w8a8_channel",
        "fp8_w8a8_block:block=48x64",
        "int8_w8a8_channel",
    ):
        yield make_variant(hidden=160, intermediate=96, dtype=_BF16, quant=quant)


def _list_captured_variants(base: Problem, world_size: int) -> Iterator[Variant]:
    """Yield variants whose calls can be captured in a CUDA graph.

    In these calls, parts may use an exchange that does not involve the host.
    """
    base = replace(base, graph=True)
    make_variant = partial(_make_variant, base)
    for placement in PLACEMENTS:
        for routing in ("uniform", "all_to_one", "out_of_range"):
            yield make_variant(routing, placement=placement)
    for tokens in ((0, 0, 0, 7), (0,), (17, 3)):
        yield make_variant("zipf", tokens=tokens, dtype=_BF16)
    yield make_variant("all_skipped", bias=True, routed_scaling_factor=2.5)
    yield make_variant("duplicates", top_k=4, ids_dtype=torch.int64, placement="copies", bias=True)
    yield make_variant("skips", apply_router_weight_on_input=True, top_k=1, bias=True, dtype=_BF16)
    yield make_variant(inplace=True, dtype=_FP16, activation="relu2")
    yield make_variant(chunk_tokens=4)
    yield make_variant("all_to_one", max_received=world_size * 7)
    yield make_variant("skips", lora="adapters=3,rank=7", placement="round_robin", top_k=3)
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
        yield _make_variant(wide, quant=quant)


def _list_adapter_variants(base: Problem, world_size: int) -> Iterator[Variant]:
    """Yield variants with LoRA, in which each token is sent with its adapter slot."""
    with_adapters = replace(base, lora="adapters=3,rank=7")
    yield _make_variant(with_adapters, "skips", placement="copies", top_k=3, bias=True)
    yield _make_variant(with_adapters, placement="round_robin", tokens=(0, 9), dtype=_BF16)
    yield _make_variant(
        with_adapters, lora="adapters=4,rank=20,a13=shared,outer=shared", tokens=(5, 3)
    )
    for slot_pattern in ("nobody", "without"):
        variation = InputVariation(slot_pattern=slot_pattern)
        yield Variant(with_adapters, "linear", UNEVEN_TOKENS, "uniform", variation=variation)
    block = replace(with_adapters, hidden=160, intermediate=96, quant="fp8_w8a8_block:block=32x32")
    yield _make_variant(block, dtype=_BF16)


def _list_quantized_variants(base: Problem, world_size: int) -> Iterator[Variant]:
    """Yield variants with shapes and values that are difficult for scales.

    The variants cover group sizes that are not a power of two, rows longer than one program holds,
    a scale for all tokens that a value on a single rank determines, and values so small that the
    scale is clamped. Each scheme of another package also has a variant.
    """
    top_1 = replace(base, experts=2 * world_size, top_k=1)
    ragged = replace(top_1, hidden=160, intermediate=136)
    yield _make_variant(ragged, quant="int8_w8a8_block:block=32x96", dtype=_FP16)
    yield _make_variant(top_1, hidden=2080, intermediate=16, quant="fp8_w8a8_block:block=32x32")
    # Calls pass few tokens, but problem.tokens is so large that programs read longer blocks of a
    # row.
    long_rows = replace(top_1, hidden=2080, intermediate=16)
    yield Variant(long_rows, "linear", (3, 1), "uniform", max_tokens=513)
    short_rows = replace(top_1, hidden=64, intermediate=16)
    yield Variant(short_rows, "linear", (3, 1), "uniform", max_tokens=513)
    peaks, faint = InputVariation(values="peaks"), InputVariation(values="faint")
    wide = replace(top_1, hidden=1040, intermediate=16, quant="fp8_w8a8_tensor", dtype=_FP16)
    yield Variant(wide, "linear", (2, 5), "all_to_one", variation=peaks)
    long = replace(top_1, hidden=_LONG_ROW_SIZE, intermediate=16)
    wide_groups = f"fp8_w8a8_block:block=16x{_LONG_ROW_SIZE}"
    for quant, tokens in (("fp8_w8a8_channel", (2, 1)), (wide_groups, (5, 4))):
        yield Variant(replace(long, quant=quant), "linear", tokens, "uniform", variation=peaks)
    # The only token of all ranks is zero, and so is the maximum that determines the shared scale.
    zero_input = replace(top_1, intermediate=16, bias=True, quant="fp8_w8a8_tensor")
    yield Variant(
        zero_input, "linear", (1, 0), "uniform", variation=InputVariation(values="zero_rows")
    )
    # NaN in a token, in the router weight of a pair, and in the bias of an expert. Rows of other
    # ranks must not become NaN.
    for quant in ("none", "int8_w8a8_channel", "fp8_w8a8_block:block=48x64"):
        nan = InputVariation(nan="x+topk_weights+b2")
        with_nan = replace(top_1, experts=4 * world_size, quant=quant, bias=True, dtype=_BF16)
        yield Variant(with_nan, "linear", (5, 3), "uniform", variation=nan)
    for quant in list_external_schemes():
        yield _make_variant(top_1, hidden=160, intermediate=72, quant=quant, dtype=_BF16)
    linear = ActivationSpec.parse("swiglu_oai:alpha=1.702,limit=1.0")
    for quant in ("fp8_w8a8_channel", "fp8_w8a8_tensor"):
        small = replace(top_1, intermediate=16, activation=linear, quant=quant)
        yield Variant(small, "linear", (5, 3), "uniform", variation=faint)
