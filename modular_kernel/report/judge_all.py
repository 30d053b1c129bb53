"""Every pair judged for every scheme and number of ranks, on a machine that is described."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from modular_kernel.catalog import Catalog
from modular_kernel.compatibility.rules import judge
from modular_kernel.compatibility.support import Rejection
from modular_kernel.contracts import PermuteExpertsUnpermute, PrepareAndFinalize
from modular_kernel.spec.problem import Machine, Parallel, Problem
from modular_kernel.spec.quantization import QUANT_SCHEMES

_DISTRIBUTION = "modular-kernel "  # how the origin of a part of ours begins
WORLD_SIZES = (1, 2, 4)
# A layer of Qwen3-30B: no scheme's group leaves a rest, and ranks share the experts evenly.
PROBLEM = Problem(tokens=128, hidden=2048, intermediate=768, experts=128, top_k=8)
MACHINE = Machine("cuda", (9, 0), name="described")


@dataclass(frozen=True)
class JudgedPair:
    """One pair in one situation, and every reason that any of its ranks has against it."""

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
        """Names of the rules violated, each once."""
        return tuple(dict.fromkeys(rejection.rule for rejection in self.rejections))


@dataclass(frozen=True)
class Matrix:
    """All cells, and what they were judged for."""

    catalog: Catalog
    problem: Problem
    machine: Machine
    cells: tuple[JudgedPair, ...]

    @cached_property
    def by_place(self) -> dict[tuple[str, str, str, int], JudgedPair]:
        """Cells by pair, scheme and number of ranks."""
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
    """One rejection, and every cell that it is a reason against."""

    rejection: Rejection
    pairs: tuple[tuple[str, str], ...]
    quants: tuple[str, ...]
    world_sizes: tuple[int, ...]


def built_in(catalog: Catalog) -> Catalog:
    """Return the parts of this distribution alone.

    What else is installed must not change the docs.
    """
    return Catalog(tuple(p for p in catalog.parts if p.origin.startswith(_DISTRIBUTION)))


def furnished(
    machine: Machine, *parts: type[PrepareAndFinalize | PermuteExpertsUnpermute]
) -> Machine:
    """Return the machine with all the packages that these parts ask for, and none besides.

    Two parts may want packages that exclude each other, so there is no machine with all of them.
    """
    packages = frozenset(package for part in parts for package in part.requires.packages)
    return replace(machine, packages=packages)


def judged_matrix(
    catalog: Catalog,
    *,
    problem: Problem = PROBLEM,
    machine: Machine = MACHINE,
    world_sizes: Sequence[int] = WORLD_SIZES,
) -> Matrix:
    """Judge all of it. machine: each pair finds the packages that its parts ask for there."""
    problems = {
        (size, quant): _ranks(problem, quant, size)
        for size in world_sizes
        for quant in QUANT_SCHEMES
    }
    cells = [
        JudgedPair(
            pf, ex, quant, size, _rejections(catalog, (pf, ex), machine, problems[size, quant])
        )
        for size in world_sizes
        for pf in catalog.names("prepare_finalize")
        for ex in catalog.names("experts")
        for quant in QUANT_SCHEMES
    ]
    return Matrix(catalog, problem, machine, tuple(cells))


def _ranks(problem: Problem, quant: str, world_size: int) -> list[Problem]:
    """Return the problem as each rank sees it."""
    ranks = [Parallel(world_size, "linear", rank) for rank in range(world_size)]
    return [replace(problem, quant=quant, parallel=parallel) for parallel in ranks]


def _rejections(
    catalog: Catalog, pair: tuple[str, str], machine: Machine, problems: Iterable[Problem]
) -> tuple[Rejection, ...]:
    pf, experts = catalog.prepare_finalize(pair[0]), catalog.experts(pair[1])
    here = furnished(machine, pf, experts)
    found = [judge(pf, experts, problem, here).rejections for problem in problems]
    return tuple(dict.fromkeys(rejection for of_rank in found for rejection in of_rank))


def reasons(matrix: Matrix) -> tuple[RefusalReason, ...]:
    """Every rejection once, in the order found; together they say all that the cells say.

    A rejection is listed again where it holds for other schemes with other pairs or ranks.
    """
    places: dict[Rejection, dict[tuple[tuple[str, str], int], list[str]]] = {}
    for cell in matrix.cells:
        for rejection in cell.rejections:
            at = places.setdefault(rejection, {})
            at.setdefault((cell.pair, cell.world_size), []).append(cell.quant)
    return tuple(
        RefusalReason(rejection, pairs, quants, sizes)
        for rejection, at in places.items()
        for pairs, sizes, quants in _rectangles(at)
    )


Rectangle = tuple[tuple[tuple[str, str], ...], tuple[int, ...], tuple[str, ...]]


def _rectangles(at: dict[tuple[tuple[str, str], int], list[str]]) -> list[Rectangle]:
    """Group the places into products of pairs, ranks and schemes."""
    pairs_of: dict[tuple[tuple[str, ...], int], list[tuple[str, str]]] = {}
    for (pair, size), quants in at.items():
        pairs_of.setdefault((tuple(quants), size), []).append(pair)
    sizes_of: dict[tuple[tuple[str, ...], tuple[tuple[str, str], ...]], list[int]] = {}
    for (quants_key, size), pairs in pairs_of.items():
        sizes_of.setdefault((quants_key, tuple(pairs)), []).append(size)
    return [(pairs_key, tuple(sizes), quants) for (quants, pairs_key), sizes in sizes_of.items()]
