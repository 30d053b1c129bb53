"""What each rank does for a mutant: tasks of a RankPool.

A rank finds a task by its module's name, so after `put_in` or `watch` it finds the one that was
imported since then, and with it the changed source.
"""

import hashlib
import importlib
import time
from collections.abc import Collection, Mapping
from functools import partial
from typing import NamedTuple

from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.settings import deadline
from modular_kernel.spec.problem import Machine
from modular_kernel.testing.cases.case import Case
from modular_kernel.testing.cases.ranks import RankCase, rank_cases_for
from modular_kernel.testing.mutation.case_runs import Level, Pair, digest_of
from modular_kernel.testing.mutation.coverage import as_lists, watched
from modular_kernel.testing.mutation.forked_worker import confine
from modular_kernel.testing.mutation.patched_module import forget, reattach, serve
from modular_kernel.testing.mutation.scope import learn
from modular_kernel.testing.mutation.source import Mutant
from modular_kernel.testing.verify import over_ranks

Imports = Mapping[str, tuple[str, ...]]
Lines = dict[str, list[int]]  # by file


class Asked(NamedTuple):
    """Of which cases. ranks_per_host: None where all ranks are on one."""

    pairs: tuple[Pair, ...]
    level: Level
    machine: Machine
    ranks_per_host: int | None


def put_in(
    _rank: int, _world_size: int, _group: object, mutants: tuple[Mutant, ...], imports: Imports
) -> None:
    """First of all: from here on this rank runs the changed source. imports: see `learn`."""
    confine()
    learn(imports)
    serve(*mutants)
    importlib.import_module(__name__)
    reattach()


def watch(
    rank: int,
    world_size: int,
    _group: object,
    modules: Mapping[str, str],
    imports: Imports,
    asked: Asked,
) -> tuple[list[RankCase], Lines]:
    """First of all: import `modules` (name -> file) again; the cases, and the lines executed."""
    confine()
    learn(imports)
    forget(set(modules))
    with watched(set(modules.values())) as (lines, loaded):
        fresh = importlib.import_module(__name__)
        reattach()
        cases: list[RankCase] = fresh.listed(rank, world_size, None, asked)
    both = {file: lines.get(file, set()) | loaded.get(file, set()) for file in lines | loaded}
    return cases, as_lists(both)


def listed(_rank: int, world_size: int, _group: object, asked: Asked) -> list[RankCase]:
    """Every case of every pairing that is valid here, each once."""
    pairs, level, machine, per_host = asked
    found = (
        case
        for pair in pairs
        for case in rank_cases_for(*pair, machine, world_size, level, per_host).cases
    )
    return list(dict.fromkeys(found))


def refused(
    _rank: int, _world_size: int, _group: object, cases: tuple[RankCase, ...], machine: Machine
) -> list[str]:
    """Those of the cases that are not valid here."""
    return [str(case) for case in cases if not case.verdict(machine).ok]


def digest(
    rank: int, _world_size: int, group: object, case: RankCase, machine: Machine, waits: float
) -> str:
    """`digest_of` the case on this rank. waits: seconds that ranks wait for each other."""
    built: list[FusedMoEModularKernel] = []

    def here(of_rank: Case, machine: Machine, poison: bool) -> FusedMoEModularKernel:
        built.append(build(waits, of_rank, machine, poison, group))
        return built[-1]

    trial = over_ranks.RankTrial(case, rank, machine, here)
    found = digest_of(trial)
    if case.fault:
        said = repr([said for said, _ in trial.told])
        found = hashlib.sha256(f"{found} {said}".encode()).hexdigest()
    for kernel in built:
        kernel.prepare_finalize.destroy()
    return found


def watched_digest(
    rank: int,
    world_size: int,
    group: object,
    case: RankCase,
    machine: Machine,
    waits: float,
    files: Collection[str],
) -> tuple[str, float, Lines, Lines]:
    """Return the digest, how many seconds it took, and the lines of `files` that it executed; and,
    apart, those that an import of one of them did."""
    start = time.perf_counter()
    with watched(set(files)) as (lines, loaded):
        found = digest(rank, world_size, group, case, machine, waits)
    return found, time.perf_counter() - start, as_lists(lines), as_lists(loaded)


def build(
    waits: float, case: Case, machine: Machine, poison: bool, group: object
) -> FusedMoEModularKernel:
    """Return a rank's kernel whose exchanges take `waits` seconds at most; `partial(build, waits)`
    is a RankBuild."""
    with deadline(waits):
        return over_ranks.build_kernel(case, machine, poison, group)


def builds(waits: float) -> over_ranks.RankBuild:
    """`build` of so many seconds."""
    return partial(build, waits)
