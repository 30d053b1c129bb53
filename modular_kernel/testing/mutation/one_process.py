"""Mutation testing of cases without ranks: each mutant runs in a separate forked process.

`OneProcess` is the default `run_mutant.MutationBackend`. A digest is a hash of the result bits of a
case.
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from modular_kernel.catalog import this_machine
from modular_kernel.testing.cases.lists import Case, cases_for
from modular_kernel.testing.mutation.case_runs import Level, Pair, run_until_failure
from modular_kernel.testing.mutation.case_steps import CaseListing, run_cases
from modular_kernel.testing.mutation.coverage import (
    CaseCoverage,
    Coverage,
    OnCase,
    cover,
    ignore_case,
)
from modular_kernel.testing.mutation.forked_worker import ChildProcess, Send
from modular_kernel.testing.mutation.mutant_outcome import GRACE_S, MutantOutcome, OutcomeTracker
from modular_kernel.testing.mutation.patched_module import (
    find_dependents,
    patch_modules,
    restore_submodule_attributes,
)
from modular_kernel.testing.mutation.source import Mutant

_CASE_TIMEOUT_S = 600.0  # timeout for a case without a mutant
_DIGEST_TIMEOUT_S = 300.0  # timeout for a digest, including the imports of the first one


class OneProcess:
    """`MutationBackend` for one process.

    on_case: called after each traced case, and when a case of a mutant starts.
    """

    world_size = 1
    ranks_per_host = None

    def __init__(self, on_case: OnCase = ignore_case) -> None:
        self.on_case = on_case

    def has_cases(self, pair: Pair, level: Level) -> bool:
        return bool(cases_for(*pair, this_machine(), level).cases)

    def cover(self, modules: Mapping[str, Path], pairs: tuple[Pair, ...], level: Level) -> Coverage:
        return cover(modules, pairs, level, on_case=self.on_case)

    def run_mutant(
        self, mutant: Mutant, cases: Sequence[CaseCoverage], listing: CaseListing | None
    ) -> MutantOutcome:
        find_dependents({mutant.module})  # fills the cache of imports once for all children
        tracker = OutcomeTracker(mutant, cases, self.on_case)
        child = ChildProcess(lambda send: _run_in_child(mutant, cases, listing, send), GRACE_S)
        for message in child:
            tracker.receive(message)
            if tracker.outcome is not None:
                break
            child.timeout_s = tracker.timeout_s
        return tracker.finish(child.exit)

    def find_failure(self, case: Case) -> str | None:
        child = ChildProcess(
            lambda send: send({"failure": run_until_failure(case, this_machine())[0]}),
            _CASE_TIMEOUT_S,
        )
        failure: str | None = next((m["failure"] for m in child), "ended")
        return failure

    def compute_digests(self, cases: Sequence[Case], mutants: Sequence[Mutant]) -> Iterator[str]:
        find_dependents({mutant.module for mutant in mutants})
        child = ChildProcess(lambda send: _send_digests(cases, mutants, send), _DIGEST_TIMEOUT_S)
        return (message["digest"] for message in child)


def _send_digests(cases: Sequence[Case], mutants: Sequence[Mutant], send: Send) -> None:
    if mutants:
        patch_modules(*mutants)
    runner: Any = importlib.import_module("modular_kernel.testing.mutation.case_runs")
    restore_submodule_attributes()
    machine = runner.this_machine()
    for case in cases:
        send({"digest": runner.hash_case(case, machine)})


def _run_in_child(
    mutant: Mutant, cases: Sequence[CaseCoverage], listing: CaseListing | None, send: Send
) -> None:
    try:
        patch_modules(mutant)
        runner: Any = importlib.import_module("modular_kernel.testing.mutation.case_runs")
        restore_submodule_attributes()
        runner.this_machine()
    # A mutant that raises any error when it is imported or probed is killed.
    except Exception as error:  # noqa: BLE001
        send({"failure": f"import: raised {type(error).__name__}: {error}"})
        return
    run_cases(cases, listing, runner, send)
