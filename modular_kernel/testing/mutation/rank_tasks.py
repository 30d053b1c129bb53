"""Tasks that run a mutant on each rank of a RankPool; `over_ranks` sends them.

`apply_mutants` and `trace_imports` import this module again on a rank. A rank looks up each task by
its module name, so later tasks are functions of the new module, which use the changed source.
"""

import hashlib
import importlib
import time
from collections.abc import Collection, Mapping
from functools import partial
from typing import NamedTuple

from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.settings import use_timeout
from modular_kernel.spec.problem import Machine
from modular_kernel.testing.cases.case import Case
from modular_kernel.testing.cases.ranks import RankCase, rank_cases_for
from modular_kernel.testing.mutation.case_runs import Level, Pair, hash_trial
from modular_kernel.testing.mutation.coverage import convert_to_lists, trace_lines
from modular_kernel.testing.mutation.forked_worker import silence_and_limit_memory
from modular_kernel.testing.mutation.patched_module import (
    patch_modules,
    restore_submodule_attributes,
    unload,
)
from modular_kernel.testing.mutation.scope import add_known_imports
from modular_kernel.testing.mutation.source import Mutant
from modular_kernel.testing.verify import over_ranks

Imports = Mapping[str, tuple[str, ...]]
Lines = dict[str, list[int]]  # by file


class CaseQuery(NamedTuple):
    """Query for a list of cases.

    ranks_per_host: number of ranks per host; None if all ranks are on one host.
    """

    pairs: tuple[Pair, ...]
    level: Level
    machine: Machine
    ranks_per_host: int | None


def apply_mutants(
    _rank: int, _world_size: int, _group: object, mutants: tuple[Mutant, ...], imports: Imports
) -> None:
    """Make this rank use the changed source. This must be the first task of the rank.

    imports: the import cache of another process (see `add_known_imports`).
    """
    silence_and_limit_memory()
    add_known_imports(imports)
    patch_modules(*mutants)
    importlib.import_module(__name__)
    restore_submodule_attributes()


def trace_imports(
    rank: int,
    world_size: int,
    _group: object,
    modules: Mapping[str, str],
    imports: Imports,
    query: CaseQuery,
) -> tuple[list[RankCase], Lines]:
    """Import `modules` again; return the cases and the executed lines.

    This must be the first task of the rank.

    modules: maps names of modules to files.
    """
    silence_and_limit_memory()
    add_known_imports(imports)
    unload(set(modules))
    with trace_lines(set(modules.values())) as (lines, loaded):
        reimported = importlib.import_module(__name__)
        restore_submodule_attributes()
        cases: list[RankCase] = reimported.list_cases(rank, world_size, None, query)
    all_lines = {file: lines.get(file, set()) | loaded.get(file, set()) for file in lines | loaded}
    return cases, convert_to_lists(all_lines)


def list_cases(_rank: int, world_size: int, _group: object, query: CaseQuery) -> list[RankCase]:
    """Return every valid case of the requested pairings, without repetition."""
    pairs, level, machine, per_host = query
    cases = (
        case
        for pair in pairs
        for case in rank_cases_for(*pair, machine, world_size, level, per_host).cases
    )
    return list(dict.fromkeys(cases))


def list_invalid_cases(
    _rank: int, _world_size: int, _group: object, cases: tuple[RankCase, ...], machine: Machine
) -> list[str]:
    """Return the cases that are not valid on this machine."""
    return [str(case) for case in cases if not case.verdict(machine).ok]


def hash_case(
    rank: int, _world_size: int, group: object, case: RankCase, machine: Machine, timeout: float
) -> str:
    """Run a case on this rank; return the hash of its results (`hash_trial`).

    For a fault scenario, the hash includes the outcomes of the scenario.

    timeout: seconds after which an exchange fails.
    """
    with use_timeout(timeout), over_ranks.open_group(case, group) as opened_group:
        return _hash_case(rank, opened_group, case, machine, timeout)


def _hash_case(rank: int, group: object, case: RankCase, machine: Machine, timeout: float) -> str:
    kernels: list[FusedMoEModularKernel] = []

    def build_on_rank(rank_case: Case, machine: Machine, poison: bool) -> FusedMoEModularKernel:
        kernels.append(build(timeout, rank_case, machine, poison, group))
        return kernels[-1]

    trial = over_ranks.RankTrial(case, rank, machine, build_on_rank)
    digest = hash_trial(trial)
    if case.fault:
        outcomes = repr([outcomes for outcomes, _ in trial.scenario_outcomes])
        digest = hashlib.sha256(f"{digest} {outcomes}".encode()).hexdigest()
    for kernel in kernels:
        kernel.prepare_finalize.destroy()
    return digest


def hash_case_with_tracing(
    rank: int,
    world_size: int,
    group: object,
    case: RankCase,
    machine: Machine,
    timeout: float,
    files: Collection[str],
) -> tuple[str, float, Lines, Lines]:
    """Run `hash_case` with tracing.

    Returns (hash, seconds, executed lines of `files`, lines of `files` executed by imports).
    """
    start = time.perf_counter()
    with trace_lines(set(files)) as (lines, loaded):
        digest = hash_case(rank, world_size, group, case, machine, timeout)
    return digest, time.perf_counter() - start, convert_to_lists(lines), convert_to_lists(loaded)


def build(
    timeout: float, case: Case, machine: Machine, poison: bool, group: object
) -> FusedMoEModularKernel:
    """Make a kernel of one rank whose exchanges time out after `timeout` seconds.

    With `timeout` bound by `functools.partial`, this function is the `build` argument of
    `prove_ranks`.

    poison: whether the kernel fills its buffers with NaN before each call.
    """
    with use_timeout(timeout):
        return over_ranks.build_kernel(case, machine, poison, group)


def build_with_timeout(timeout: float) -> over_ranks.RankBuild:
    """Return `build` with this timeout in seconds."""
    return partial(build, timeout)
