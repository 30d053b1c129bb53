"""Mutation testing of cases over several ranks: each mutant runs in newly forked ranks.

`OverRanks` is the `run_mutant.MutationBackend` for these cases. A rank that waits for another rank
times out after some seconds. A digest is a hash of the result bits of a case.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from modular_kernel.catalog import this_machine
from modular_kernel.spec.problem import Machine
from modular_kernel.testing.cases.lists import Case
from modular_kernel.testing.cases.ranks import RankCase, rank_cases_for
from modular_kernel.testing.mutation import rank_tasks
from modular_kernel.testing.mutation.case_runs import Level, Pair
from modular_kernel.testing.mutation.case_steps import CaseListing, run_cases
from modular_kernel.testing.mutation.coverage import (
    CaseCoverage,
    Coverage,
    OnCase,
    ignore_case,
    join_pairs,
    merge_lines,
)
from modular_kernel.testing.mutation.forked_worker import ChildExit
from modular_kernel.testing.mutation.mutant_outcome import MutantOutcome, OutcomeTracker
from modular_kernel.testing.mutation.patched_module import find_dependents
from modular_kernel.testing.mutation.scope import get_known_imports
from modular_kernel.testing.mutation.source import Mutant
from modular_kernel.testing.ranks.closing import Closeable
from modular_kernel.testing.ranks.pool import DIED, NO_ANSWER, RankError, RankPool
from modular_kernel.testing.verify.checks import check_numeric
from modular_kernel.testing.verify.over_ranks import RANK_CHECKS, check_faults, prove_unchecked

Result = TypeVar("Result")

# Each timeout is a constant plus a multiple of the duration of the two calls of a case.
_EXCHANGE_TIMEOUT_S, _EXCHANGE_FACTOR = 4.0, 4.0
_RUN_TIMEOUT_S, _RUN_FACTOR = 30.0, 40.0
_DEFAULT_CASE_S = 15.0  # assumed duration of the calls of a case that was not traced
_TRACED_TIMEOUT_S = 120.0  # timeout of an exchange in a traced case
_RANK_GRACE_S = 0.5  # time to wait for the other ranks after one has failed


class RanksEnded(Exception):
    """Raised if a rank has died or has not answered in time."""

    def __init__(self, exit_info: ChildExit) -> None:
        super().__init__(f"{exit_info.status}: {exit_info.detail}")
        self.exit_info = exit_info


class Ranks(Closeable):
    """A `CaseRunner` that runs cases on a RankPool whose ranks have applied `mutants`.

    cases: traced cases. Their durations determine the timeouts.
    """

    def __init__(
        self,
        world_size: int,
        ranks_per_host: int | None,
        mutants: tuple[Mutant, ...] = (),
        cases: Iterable[CaseCoverage] = (),
    ) -> None:
        self.world_size, self._per_host, self._mutants = world_size, ranks_per_host, mutants
        self._seconds = {case_coverage.case: case_coverage.seconds for case_coverage in cases}
        self._pool: RankPool | None = None

    def close(self) -> None:
        """Stop the ranks. The next run starts new ranks."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def start(self) -> RankPool:
        """Start the ranks and apply the mutants in them. Raises RankError if this fails."""
        if self._pool is None:
            self._pool = RankPool(
                self.world_size,
                group_timeout=_RUN_TIMEOUT_S,
                grace=_RANK_GRACE_S,
                ranks_per_host=self._per_host,
            )
            if self._mutants:
                # Fill the cache of imports.
                find_dependents({mutant.module for mutant in self._mutants})
                self._pool.run(rank_tasks.apply_mutants, self._mutants, get_known_imports())
        return self._pool

    def this_machine(self) -> Machine:
        return this_machine(device="cpu")

    def list_cases(self, pairs: tuple[Pair, ...], level: Level) -> tuple[Sequence[Case], Machine]:
        machine = self.this_machine()
        query = rank_tasks.CaseQuery(pairs, level, machine, self._per_host)
        return self._run_on_rank_0(rank_tasks.list_cases, query), machine

    def list_invalid_cases(self, cases: Sequence[Case]) -> list[str]:
        return self._run_on_rank_0(rank_tasks.list_invalid_cases, tuple(cases), self.this_machine())

    def _run_on_rank_0(self, task: Callable[..., Result], *arguments: object) -> Result:
        try:
            return self.start().run(task, *arguments)[0]
        except RankError as error:
            self.close()
            raise RuntimeError(_get_last_line(error)) from error

    def hash_case(self, case: Case, machine: Machine) -> str:
        """Run a case; return the digests of all ranks, or "raised" if the case raised an error.

        Raises RanksEnded if a rank died or timed out.
        """
        timeout, run_timeout = self._get_timeouts(case)
        start = time.perf_counter()
        try:
            return join_digests(
                self.start().run(rank_tasks.hash_case, case, machine, timeout, timeout=run_timeout)
            )
        except RankError as error:
            self.close()
            exit_info = find_rank_exit(next(iter(error.failures.values())))
            if exit_info is None and time.perf_counter() - start >= timeout:
                exit_info = ChildExit("hang", f"after {timeout:.0f} s {_get_last_line(error)}")
            if exit_info is not None:
                raise RanksEnded(exit_info) from error
            return "raised"

    def run_until_failure(self, case: Case, machine: Machine) -> tuple[str | None, float]:
        """Run the checks of a case; return (first failure or None, duration in seconds).

        Raises RanksEnded if a rank died or timed out.
        """
        assert isinstance(case, RankCase)
        timeout, run_timeout = self._get_timeouts(case)
        build = rank_tasks.build_with_timeout(timeout)
        first_checks = (check_numeric, check_faults) if case.fault else (check_numeric,)
        seconds = 0.0
        for checks in (first_checks, RANK_CHECKS):  # most failures occur in the first call
            run_timeout *= len(checks)
            proof = prove_unchecked(
                case, self.start(), machine, build, checks=checks, timeout=run_timeout
            )
            seconds += proof.seconds
            if proof.failures:
                self.close()  # other ranks may still be in an exchange
                return _format_failure(proof.failures[0]), seconds
        return None, seconds

    def _get_timeouts(self, case: Case) -> tuple[float, float]:
        """Return the timeouts of an exchange and of a run of two calls, in seconds."""
        seconds = self._seconds.get(case, max(self._seconds.values(), default=_DEFAULT_CASE_S))
        return (
            _EXCHANGE_TIMEOUT_S + _EXCHANGE_FACTOR * seconds,
            _RUN_TIMEOUT_S + _RUN_FACTOR * seconds,
        )


class OverRanks:
    """`MutationBackend` for several ranks on this CPU, optionally on several simulated hosts.

    on_case: called after each traced case, and when a case of a mutant starts.
    """

    def __init__(
        self,
        world_size: int,
        ranks_per_host: int | None = None,
        on_case: OnCase = ignore_case,
    ) -> None:
        self.world_size, self.ranks_per_host = world_size, ranks_per_host
        self.on_case = on_case

    def _make_ranks(self, *args: Any) -> Ranks:
        return Ranks(self.world_size, self.ranks_per_host, *args)

    def has_cases(self, pair: Pair, level: Level) -> bool:
        machine, per_host = this_machine(device="cpu"), self.ranks_per_host
        return bool(rank_cases_for(*pair, machine, self.world_size, level, per_host).cases)

    def cover(self, modules: Mapping[str, Path], pairs: tuple[Pair, ...], level: Level) -> Coverage:
        """Trace all cases: the lines that any rank executes, and the duration on the slowest."""
        machine, files = this_machine(device="cpu"), {m: str(path) for m, path in modules.items()}
        find_dependents(set(modules))
        case_coverages: list[CaseCoverage] = []
        with self._make_ranks() as ranks:
            run = ranks.start().run
            query = rank_tasks.CaseQuery(pairs, level, machine, self.ranks_per_host)
            try:
                results = run(rank_tasks.trace_imports, files, get_known_imports(), query)
                loading = merge_lines(lines for _, lines in results)
                cases = results[0][0]
                for case in cases:
                    args = case, machine, _TRACED_TIMEOUT_S, tuple(files.values())
                    rank_results = run(
                        rank_tasks.hash_case_with_tracing, *args, timeout=2 * _TRACED_TIMEOUT_S
                    )
                    digests, seconds, lines, loaded = zip(*rank_results, strict=True)
                    case_coverages.append(
                        CaseCoverage(case, max(seconds), join_digests(digests), merge_lines(lines))
                    )
                    loading = merge_lines((loading, *loaded))
                    self.on_case(join_pairs(pairs), len(case_coverages), len(cases))
            except RankError as error:
                return Coverage({}, tuple(case_coverages), str(error))
        return Coverage(loading, tuple(case_coverages))

    def run_mutant(
        self, mutant: Mutant, cases: Sequence[CaseCoverage], listing: CaseListing | None
    ) -> MutantOutcome:
        tracker = OutcomeTracker(mutant, cases, self.on_case)
        with self._make_ranks((mutant,), cases) as ranks:
            try:
                ranks.start()
                run_cases(cases, listing, ranks, tracker.receive)
            except RanksEnded as error:
                return tracker.finish(error.exit_info)
            except RankError as error:
                tracker.receive({"failure": f"import: {_get_last_line(error)}"})
        return tracker.finish(ChildExit("done"))

    def find_failure(self, case: Case) -> str | None:
        with self._make_ranks() as ranks:
            try:
                return ranks.run_until_failure(case, ranks.this_machine())[0]
            except RanksEnded as error:
                return str(error)

    def compute_digests(self, cases: Sequence[Case], mutants: Sequence[Mutant]) -> Iterator[str]:
        with self._make_ranks(tuple(mutants)) as ranks:
            machine = ranks.this_machine()
            for case in cases:
                try:
                    digest = ranks.hash_case(case, machine)
                except RanksEnded:
                    return
                yield digest


def join_digests(digests: Collection[str]) -> str:
    """Join the digests of all ranks into one string."""
    return " ".join(digests)


def _format_failure(failure: str) -> str:
    """Reformat "RANK: CHECK: MESSAGE" such that the check comes first, as in one process.

    Raises RanksEnded if a rank died or timed out.
    """
    rank_text, _, message = failure.partition(": ")
    exit_info = find_rank_exit(message)
    if exit_info is not None:
        raise RanksEnded(exit_info)
    if "raised IncompatibleError" in message:
        return f"refused: {message} ({rank_text})"
    prefix = "build: " if message.startswith("raised ") else ""
    return f"{prefix}{message} ({rank_text})"


def find_rank_exit(failure: str) -> ChildExit | None:
    """Return how a rank crashed or timed out, or None if it raised an error instead."""
    first_line = failure.splitlines()[0]
    if first_line.startswith(DIED):
        return ChildExit("crash", first_line)
    return ChildExit("hang", first_line) if first_line.startswith(NO_ANSWER) else None


def _get_last_line(error: RankError) -> str:
    failure = next(iter(error.failures.values()))
    return f"raised {failure.strip().splitlines()[-1]}"
