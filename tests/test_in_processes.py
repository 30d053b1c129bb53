"""Cases that several processes share are proven as in one, and none is lost."""

import os
from collections.abc import Iterator, Sequence

import pytest
from run_mk import run_mk

from modular_kernel.cli.ranks import Host
from modular_kernel.errors import StateError
from modular_kernel.testing import Case, cases_for
from modular_kernel.testing.verify.in_processes import prove_all
from modular_kernel.testing.verify.one_process import Proof
from modular_kernel.types import Machine

PAIR = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
TORCH_PAIR = ("--pf-type", PAIR[0], "--experts-type", PAIR[1])


class Deadly(Case):
    """A case that ends the process that reads it."""

    def __reduce__(self) -> tuple[object, ...]:
        return os._exit, (9,)


def test_two_processes_prove_what_one_proves(machine: Machine) -> None:
    cases = cases_for(*PAIR, machine, "smoke").cases[:6]
    alone, shared = (list(prove_all(cases, machine, workers)) for workers in (1, 2))
    assert [proof.case for proof in shared] == list(cases)
    facts = [[(p.case, p.error, p.bound, p.failures) for p in found] for found in (alone, shared)]
    assert facts[0] == facts[1]
    assert all(proof.passed for proof in shared)


def test_a_process_that_ends_is_an_error_that_names_the_case(machine: Machine) -> None:
    case = cases_for(*PAIR, machine, "smoke").cases[0]
    deadly = Deadly(case.prepare_finalize, case.experts, case.problem)
    with pytest.raises(StateError, match=r"mk test --one.*got no proof"):
        list(prove_all([deadly], machine, 2))


def test_full_lists_are_shared_by_one_process_a_processor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def all_pass(host: Host, cases: Sequence[Case], workers: int) -> Iterator[Proof]:
        asked.append(workers)
        return (Proof(case, host.machine, 0.0, 1.0, (), 0.0) for case in cases)

    monkeypatch.setattr(Host, "prove_all", all_pass)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(3)))
    for words in ((), ("--level", "full"), ("--level", "full", "--workers", "2")):
        assert run_mk(capsys, "test", *TORCH_PAIR, *words).code == 0
    assert asked == [1, 3, 2]


@pytest.mark.parametrize(
    "words",
    [("0",), ("2", "--one"), ("2", "--mutate", "TorchExperts"), ("2", "--world-size", "2")],
    ids=" ".join,
)
def test_workers_that_could_share_nothing_are_refused(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    ended = run_mk(capsys, "test", *TORCH_PAIR, "--workers", *words)
    assert ended.code == 2
    assert f"--workers: got {words[0]}, need 1 or more, without --one" in ended.err
