"""Every compatibility rule is tested at its boundary.

An edge is a pair of problems that differ in one field by one step, to the next value of the field.
A rule accepts one problem of the pair and rejects the other. The accepted problem must be computed
correctly, no other rule may reject the other problem, and a rule that is off by one must be
detected.
"""

import ast
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from textwrap import dedent
from typing import Any

import pytest

from modular_kernel.catalog import load_catalog, make_kernel, this_machine
from modular_kernel.compatibility.rules import RULES
from modular_kernel.compatibility.support import Rejection
from modular_kernel.contracts import PermuteExpertsUnpermute
from modular_kernel.errors import IncompatibleError
from modular_kernel.spec.problem import ActivationSpec, Machine, Parallel, Problem
from modular_kernel.testing.cases.case import Case
from modular_kernel.testing.cases.ranks import RankCase
from modular_kernel.testing.edges.edges import Edge, Edges, edges_of, make_case
from modular_kernel.testing.edges.sites import find_part_sites, find_rule_sites
from modular_kernel.testing.ranks.pool import RankPool
from modular_kernel.testing.verify.over_ranks import CHECKS, prove_ranks
from modular_kernel.testing.verify.trial import Trial

GPU = Machine("cuda", (9, 0), frozenset({"triton"}))
NO_EP, BATCHED = "MoEPrepareAndFinalizeNoEP", "BatchedPrepareAndFinalize"
ONE_RANK_PAIRS = (
    (NO_EP, "TorchExperts"),
    (NO_EP, "TritonExperts"),
    (NO_EP, "GroupedGemmExperts"),
    (BATCHED, "NaiveBatchedExperts"),
    (BATCHED, "BatchedTritonExperts"),
)
RANK_PAIRS = (
    ("ReplicatedEPPrepareAndFinalize", "TorchExperts"),
    ("AllGatherReduceScatterPrepareAndFinalize", "TorchExperts"),
    ("TorchAll2AllPrepareAndFinalize", "TorchExperts"),
    ("TorchAll2AllBatchedPrepareAndFinalize", "NaiveBatchedExperts"),
    ("SymmMemPrepareAndFinalize", "TorchExperts"),
    ("HostThenRankPrepareAndFinalize", "TorchExperts"),
)
# For these pairings, the search goes two steps from the start, because some rules only apply after
# a first step, such as another scheme or placement.
TWO_STEP_PAIRS = (
    (BATCHED, "NaiveBatchedExperts", None),
    ("AllGatherReduceScatterPrepareAndFinalize", "TorchExperts", None),
    (NO_EP, "TorchExperts", GPU),
    (NO_EP, "TritonExperts", GPU),
)


# Problems at which the search starts, for rules of a part that apply to one scheme or activation.
BLOCK_FP8_PROBLEM = Problem(
    7, 256, 128, 8, 2, quant="fp8_w8a8_block", activation=ActivationSpec(up_first=True)
)
START_PROBLEMS = (
    ("FlashInferExperts", BLOCK_FP8_PROBLEM),
    ("FlashInferExperts", replace(BLOCK_FP8_PROBLEM, quant="fp8_w8a8_tensor:static=true")),
    (
        "FlashInferExperts",
        replace(BLOCK_FP8_PROBLEM, quant="none", activation=ActivationSpec("gelu", up_first=True)),
    ),
    ("TritonKernelsExperts", Problem(7, 256, 128, 8, 2, quant="mxfp4_w4a16")),
)
# Problems that span several hosts. Some parts have rules that apply only to such problems.
HOSTS_PROBLEM = Problem(7, 2048, 128, 64, 2, parallel=Parallel(16, ranks_per_host=8))
START_PROBLEMS_ON_HOSTS = (
    ("DeepEPHTPrepareAndFinalize", HOSTS_PROBLEM),
    ("DeepEPV2PrepareAndFinalize", replace(HOSTS_PROBLEM, parallel=Parallel(32, ranks_per_host=1))),
)


@cache
def find_edges(
    prepare_finalize: str,
    experts: str,
    machine: Machine | None = None,
    depth: int = 1,
    start: Problem | None = None,
) -> Edges:
    catalog = load_catalog()
    parts = catalog.prepare_finalize(prepare_finalize), catalog.experts(experts)
    return edges_of(*parts, machine or this_machine(), depth=depth, start=start)


def find_all_edges() -> Iterator[Edges]:
    """Yield the edges of every pairing.

    For some pairings, the search also goes two steps from the start, or starts at other problems.
    """
    catalog = load_catalog()
    for prepare_finalize in catalog.names("prepare_finalize"):
        for experts in catalog.names("experts"):
            yield find_edges(prepare_finalize, experts)
    yield from (
        find_edges(prepare_finalize, experts, machine, 2)
        for prepare_finalize, experts, machine in TWO_STEP_PAIRS
    )
    yield from (find_edges(NO_EP, experts, start=start) for experts, start in START_PROBLEMS)
    yield from (
        find_edges(prepare_finalize, "TritonExperts", start=start)
        for prepare_finalize, start in START_PROBLEMS_ON_HOSTS
    )


def describe_edge_error(edge: Edge) -> str:
    """Return why an edge is wrong, or ""."""
    passing, failing = edge.passing.verdict, edge.failing.verdict
    if passing.rejections:
        return f"{edge}: the passing side is rejected, {passing}"
    if {r.rule for r in failing.rejections} != {edge.reason.rule}:
        return f"{edge}: rejected by other rules too, {failing}"
    return f"{edge}: {edge.contradiction}" if edge.contradiction else ""


@pytest.mark.share(2)
def test_every_rule_has_edges() -> None:
    """For every condition that can reject, some edge is rejected by that condition alone."""
    catalog, reasons_with_edges = load_catalog(), set()
    for search_result in find_all_edges():
        assert [error for edge in search_result.edges if (error := describe_edge_error(edge))] == []
        reasons_with_edges |= {edge.reason for edge in search_result.edges}
    all_sites = set(find_rule_sites())
    for prepare_finalize in catalog.names("prepare_finalize"):
        all_sites |= find_part_sites(catalog.prepare_finalize(prepare_finalize))
    for experts in catalog.names("experts"):
        all_sites |= find_part_sites(catalog.experts(experts))
    assert sorted(all_sites - {reason.site for reason in reasons_with_edges}) == []
    assert {reason.rule for reason in reasons_with_edges} >= set(RULES)


@pytest.mark.parametrize(("prepare_finalize", "experts"), ONE_RANK_PAIRS)
def test_problems_that_pass_are_computed_correctly(prepare_finalize: str, experts: str) -> None:
    """Passing problems are computed correctly. make_kernel rejects failing ones for the same
    reason.
    """
    machine, cases = this_machine(), list_passing_cases(find_edges(prepare_finalize, experts))
    for edge in find_edges(prepare_finalize, experts).edges:
        failing = edge.failing
        if failing.as_declared:
            with pytest.raises(IncompatibleError) as caught:
                make_kernel(prepare_finalize, experts, failing.problem, machine=failing.machine)
            assert caught.value.rejections == failing.verdict.rejections
    assert len(cases) >= 2
    for case in cases:
        trial = Trial(case, machine)
        comparison = trial.first.compare(trial.eager_output)
        assert comparison.ok, f"{case}: {comparison}"


def list_passing_cases(search_result: Edges) -> list[Case]:
    """Return the cases of passing problems that this machine can run."""
    edges = [edge for edge in search_result.edges if edge.passing.machine == this_machine()]
    return list(dict.fromkeys(case for edge in edges if (case := make_case(edge)) is not None))


@pytest.mark.skipif(
    not this_machine(device="cpu").interpreter, reason="needs the Triton interpreter on a CPU"
)
@pytest.mark.parametrize(("prepare_finalize", "experts"), RANK_PAIRS)
def test_problems_that_pass_are_computed_correctly_over_ranks(
    rank_pool: Callable[[int], RankPool], prepare_finalize: str, experts: str
) -> None:
    cases = [
        c
        for c in list_passing_cases(find_edges(prepare_finalize, experts))
        if c.problem.parallel.world_size == 2
    ]
    assert len(cases) >= 2
    for case in cases:
        assert isinstance(case, RankCase)
        proof = prove_ranks(case, rank_pool(2), checks=CHECKS[:1])  # only the numeric check
        assert proof.passed, str(proof)


Change = Callable[[ast.Compare, int], None]


def swap_strictness(node: ast.Compare, index: int) -> None:
    """Replace `<` by `<=`, `<=` by `<`, and `>` and `>=` likewise."""
    replacements = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
    node.ops[index] = replacements[type(node.ops[index])]()


def shift_bound(node: ast.Compare, index: int, *, by: int) -> None:
    """Add `by` to the right operand of a comparison."""
    node.comparators[index] = ast.BinOp(node.comparators[index], ast.Add(), ast.Constant(by))


CHANGES: tuple[Change, ...] = (
    swap_strictness,
    partial(shift_bound, by=1),
    partial(shift_bound, by=-1),
)


def make_mutants() -> Iterator[Any]:
    """Yield mutants of each rule, which differ from it in one comparison.

    The strictness of the comparison is swapped, or a bound that is a number is changed by 1 or -1.
    """
    for rule, function in RULES.items():
        source = dedent(inspect.getsource(function))
        for position, (node, _) in enumerate(find_comparisons(ast.parse(source))):
            is_numeric = "arch" not in ast.unparse(node)  # an architecture is a tuple
            for change in CHANGES if is_numeric else CHANGES[:1]:
                tree = ast.parse(source)
                mutated_node, index = find_comparisons(tree)[position]
                change(mutated_node, index)
                module = sys.modules[function.__module__]
                namespace = dict(vars(module))
                code = compile(ast.fix_missing_locations(tree), str(module.__file__), "exec")
                exec(code, namespace)
                mutant = namespace[function.__name__]
                yield pytest.param(rule, mutant, id=f"{rule}: {ast.unparse(mutated_node)}")


def find_comparisons(tree: ast.AST) -> list[tuple[ast.Compare, int]]:
    """Return the comparisons by `<`, `<=`, `>` or `>=`, each with the index of the operator."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    order_operators = ast.Lt | ast.LtE | ast.Gt | ast.GtE
    return [
        (node, index)
        for node in nodes
        for index, operator in enumerate(node.ops)
        if isinstance(operator, order_operators)
    ]


MUTANTS = list(make_mutants())


def test_mutants_are_made() -> None:
    rules_with_bounds = {
        "arch",
        "top_k",
        "min_tokens",
        "max_experts",
        "addressing",
        "world_size",
        "hosts",
        "capacity",
    }
    assert {mutant.values[0] for mutant in MUTANTS} == rules_with_bounds


@pytest.mark.parametrize(("rule", "mutant"), MUTANTS)
def test_a_rule_that_is_off_by_one_is_detected(
    rule: str, mutant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog, prepare_finalize_names = load_catalog(), (NO_EP, "SymmMemPrepareAndFinalize")

    def list_errors(search_results: Iterable[Edges]) -> list[str]:
        edges = [
            edge
            for search_result in search_results
            for edge in search_result.edges
            if edge.reason.rule == rule
        ]
        errors = [error for edge in edges if (error := describe_edge_error(edge))]
        return errors if edges else ["no edge"]

    assert (
        list_errors(
            find_edges(prepare_finalize, "TorchExperts", GPU)
            for prepare_finalize in prepare_finalize_names
        )
        == []
    )
    monkeypatch.setitem(RULES, rule, mutant)
    experts = catalog.experts("TorchExperts")
    assert (
        list_errors(
            edges_of(catalog.prepare_finalize(prepare_finalize), experts, GPU)
            for prepare_finalize in prepare_finalize_names
        )
        != []
    )


def test_a_rule_of_a_third_party_has_edges() -> None:
    """Edges are found for a rule outside this package. Its bound is a literal in its code."""

    def reject_wide(cls: type, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
        if problem.intermediate > 5000:
            got = str(problem.intermediate)
            return (Rejection("Theirs.width", (cls.__name__, "problem"), got, "<= 5000"),)
        return ()

    catalog = load_catalog()
    base: type[PermuteExpertsUnpermute] = catalog.experts("TorchExperts")
    theirs = type("Theirs", (base,), {"extra_rejections": classmethod(reject_wide)})
    search_result = edges_of(catalog.prepare_finalize(NO_EP), theirs, this_machine())
    (edge,) = (edge for edge in search_result.edges if edge.reason.rule == "Theirs.width")
    assert (edge.field, edge.values, describe_edge_error(edge)) == (
        "problem.intermediate",
        (5000, 5001),
        "",
    )
    assert edge.reason.site in find_part_sites(theirs)
