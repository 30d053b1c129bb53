"""Compatibility of every pair of parts, for every scheme and number of ranks.

The verdicts hold for one layer and one machine. The machine is described instead of detected, so
that the result is the same everywhere.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from modular_kernel.catalog import Catalog
from modular_kernel.compatibility.rules import judge
from modular_kernel.compatibility.support import Rejection
from modular_kernel.contracts import PermuteExpertsUnpermute, PrepareAndFinalize
from modular_kernel.spec.problem import Machine, Parallel, Problem
from modular_kernel.spec.quantization import QUANT_SCHEMES

_BUILT_IN_ORIGIN = "modular-kernel "  # start of the origin of built-in parts
WORLD_SIZES = (1, 2, 4)
# A layer of Qwen3-30B. Its sizes are multiples of all quantization groups, and its number of
# experts is a multiple of the number of ranks.
PROBLEM = Problem(tokens=128, hidden=2048, intermediate=768, experts=128, top_k=8)
MACHINE = Machine("cuda", (9, 0), name="described")


@dataclass(frozen=True)
class PairVerdict:
    """The verdict on a pair with one scheme and world size.

    rejections: the rejections of all ranks, without duplicates.
    """

    prepare_finalize: str
    experts: str
    quant: str
    world_size: int
    rejections: tuple[Rejection, ...]

    @property
    def ok(self) -> bool:
        return not self.rejections

    @property
    def pair(self) -> tuple[str, str]:
        return self.prepare_finalize, self.experts

    @property
    def rules(self) -> tuple[str, ...]:
        """Names of the violated rules, without duplicates."""
        return tuple(dict.fromkeys(rejection.rule for rejection in self.rejections))


@dataclass(frozen=True)
class Matrix:
    """Verdicts on every pair, scheme and world size, for one problem and one machine."""

    catalog: Catalog
    problem: Problem
    machine: Machine
    cells: tuple[PairVerdict, ...]

    @cached_property
    def by_key(self) -> dict[tuple[str, str, str, int], PairVerdict]:
        """Cells by (prepare_finalize, experts, quant, world_size)."""
        return {(*cell.pair, cell.quant, cell.world_size): cell for cell in self.cells}

    @cached_property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        return tuple(dict.fromkeys(cell.pair for cell in self.cells))

    @cached_property
    def quants(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.quant for cell in self.cells))

    @cached_property
    def world_sizes(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(cell.world_size for cell in self.cells))


@dataclass(frozen=True)
class RefusalReason:
    """A rejection of every combination of these pairs, schemes and world sizes."""

    rejection: Rejection
    pairs: tuple[tuple[str, str], ...]
    quants: tuple[str, ...]
    world_sizes: tuple[int, ...]


def select_built_in_parts(catalog: Catalog) -> Catalog:
    """Return a catalog with only the built-in parts, so that plugins do not change the docs."""
    return Catalog(tuple(p for p in catalog.parts if p.origin.startswith(_BUILT_IN_ORIGIN)))


def set_required_packages(
    machine: Machine, *parts: type[PrepareAndFinalize | PermuteExpertsUnpermute]
) -> Machine:
    """Return the machine with exactly the packages that these parts require.

    No machine can have the packages of all parts, because some exclude each other.
    """
    packages = frozenset(package for part in parts for package in part.requires.packages)
    return replace(machine, packages=packages)


def judge_all(
    catalog: Catalog,
    *,
    problem: Problem = PROBLEM,
    machine: Machine = MACHINE,
    world_sizes: Sequence[int] = WORLD_SIZES,
) -> Matrix:
    """Judge every pair for every scheme and world size.

    machine: the machine to judge for. For each pair, its packages are replaced with those that the
        two parts require.
    """
    problems = {
        (size, quant): _make_rank_problems(problem, quant, size)
        for size in world_sizes
        for quant in QUANT_SCHEMES
    }
    cells = [
        PairVerdict(
            pf_name,
            experts_name,
            quant,
            size,
            _find_rejections(catalog, pf_name, experts_name, machine, problems[size, quant]),
        )
        for size in world_sizes
        for pf_name in catalog.names("prepare_finalize")
        for experts_name in catalog.names("experts")
        for quant in QUANT_SCHEMES
    ]
    return Matrix(catalog, problem, machine, tuple(cells))


def _make_rank_problems(problem: Problem, quant: str, world_size: int) -> list[Problem]:
    ranks = [Parallel(world_size, "linear", rank) for rank in range(world_size)]
    return [replace(problem, quant=quant, parallel=parallel) for parallel in ranks]


def _find_rejections(
    catalog: Catalog, pf_name: str, experts_name: str, machine: Machine, problems: Iterable[Problem]
) -> tuple[Rejection, ...]:
    """Return the rejections of all problems, one per rank, without duplicates."""
    pf, experts = catalog.prepare_finalize(pf_name), catalog.experts(experts_name)
    machine = set_required_packages(machine, pf, experts)
    verdicts = [judge(pf, experts, problem, machine) for problem in problems]
    return tuple(dict.fromkeys(r for verdict in verdicts for r in verdict.rejections))


def collect_refusal_reasons(matrix: Matrix) -> tuple[RefusalReason, ...]:
    """Return every rejection with the cells that it applies to, in order of first occurrence.

    An entry applies to all combinations of its pairs, world sizes and schemes. A rejection whose
    cells do not have this form has several entries.
    """
    cells_by_rejection: dict[Rejection, dict[tuple[tuple[str, str], int], list[str]]] = {}
    for cell in matrix.cells:
        for rejection in cell.rejections:
            cells_of_rejection = cells_by_rejection.setdefault(rejection, {})
            cells_of_rejection.setdefault((cell.pair, cell.world_size), []).append(cell.quant)
    return tuple(
        RefusalReason(rejection, pairs, quants, sizes)
        for rejection, cells_of_rejection in cells_by_rejection.items()
        for pairs, sizes, quants in _group_into_products(cells_of_rejection)
    )


CellProduct = tuple[tuple[tuple[str, str], ...], tuple[int, ...], tuple[str, ...]]


def _group_into_products(
    cells_of_rejection: dict[tuple[tuple[str, str], int], list[str]],
) -> list[CellProduct]:
    """Group cells into Cartesian products of pairs, world sizes and schemes.

    cells_of_rejection: the schemes of each pair and world size.
    """
    pairs_by_quants_and_size: dict[tuple[tuple[str, ...], int], list[tuple[str, str]]] = {}
    for (pair, size), quants in cells_of_rejection.items():
        pairs_by_quants_and_size.setdefault((tuple(quants), size), []).append(pair)
    sizes_by_quants_and_pairs: dict[
        tuple[tuple[str, ...], tuple[tuple[str, str], ...]], list[int]
    ] = {}
    for (quants_key, size), pairs in pairs_by_quants_and_size.items():
        sizes_by_quants_and_pairs.setdefault((quants_key, tuple(pairs)), []).append(size)
    return [
        (pairs_key, tuple(sizes), quants)
        for (quants, pairs_key), sizes in sizes_by_quants_and_pairs.items()
    ]
